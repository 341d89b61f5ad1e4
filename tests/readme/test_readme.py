"""Runs the README's code, with real sandboxes and real processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient
from agents.testing import ModelStep, ScriptedModel, assistant_message, function_call

from fence import QuiescenceReceipt, QuiescenceTimeout, SandboxControl, TurnFence, quiesce_turn
from fence.errors import ControlError
from tests.support import procs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"<!-- test: (\w+) -->\n *```python\n(.*?)\n *```", re.DOTALL)
BLOCKS = {name: textwrap.dedent(code) for name, code in BLOCK.findall(README)}


def run_block(name: str, **names: Any) -> dict[str, Any]:
    """Execute a block of the README and return its names."""
    namespace: dict[str, Any] = {"__name__": f"readme_{name}", **names}
    module = type(sys)(namespace["__name__"])
    module.__dict__.update(namespace)
    # dataclasses look their module up by name.
    sys.modules[module.__name__] = module
    try:
        exec(compile(BLOCKS[name], f"README.md:{name}", "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return module.__dict__


def shell_call(cmd: str, call_id: str) -> Any:
    return function_call(
        "exec_command", json.dumps({"cmd": cmd, "yield_time_ms": 250}), call_id=call_id
    )


def test_every_python_block_is_run_here():
    assert README.count("```python") == len(BLOCKS)
    assert set(BLOCKS) == {"app", "worker", "provider", "hook"}


async def _until(token: str, count: int) -> list[procs.Process]:
    async with asyncio.timeout(20):
        while len(found := [p for p in procs.find(token) if p.name == "sleep"]) < count:
            await asyncio.sleep(0.02)
    return found


@pytest.mark.parametrize("ends", ["stopped", "by itself"])
async def test_the_app_leaves_nothing(ends: str):
    token = procs.new_token()
    calls = [
        shell_call(f"setsid sleep {token} & wait", "call-1"),
        shell_call(f"nohup sleep {token} >/dev/null 2>&1 & echo started", "call-2"),
    ]
    steps: list[Any] = [calls]
    if ends == "stopped":
        steps.append([shell_call(f"sleep {token}", f"call-{n}") for n in range(3, 6)])
        steps += [[shell_call("sleep 0.2", f"call-{n}")] for n in range(6, 60)]
    steps.append([assistant_message("done")])
    stop = asyncio.Event()
    app = run_block("app")
    turn = asyncio.create_task(app["run_turn"](ScriptedModel(steps), "go", stop))
    if ends == "stopped":
        await _until(token, 5)
        stop.set()
    receipt = await turn
    assert isinstance(receipt, QuiescenceReceipt)
    assert receipt.proven
    assert receipt.reason == ("cancel_on was set" if ends == "stopped" else "turn ended")
    assert procs.find(token) == []


async def test_the_app_stops_a_model_that_is_still_talking():
    """The commonest moment of all: the fence stops the tools, `on_cancel` the model."""
    token = procs.new_token()
    talking, never = asyncio.Event(), asyncio.Event()

    async def talk(call: Any) -> Any:
        talking.set()
        await never.wait()
        yield

    model = ScriptedModel(
        [[shell_call(f"setsid sleep {token} & wait", "call-1")], ModelStep.stream(talk)]
    )
    stop = asyncio.Event()
    turn = asyncio.create_task(run_block("app")["run_turn"](model, "go", stop))
    await _until(token, 1)
    async with asyncio.timeout(20):
        await talking.wait()
        stop.set()
        receipt = await turn
    assert receipt.proven
    assert procs.find(token) == []


WORKER = """
import asyncio, sys
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient
from fence import TurnFence

async def main():
    session = await UnixLocalSandboxClient().create()
    await session.start()
    async with TurnFence(turn_id=sys.argv[1]) as fence:
        cmd = f"(env -i setsid sleep {sys.argv[2]} &) ; setsid sleep {sys.argv[2]} & wait"
        await fence.run_sandbox_command(session, cmd)

asyncio.run(main())
"""


async def _killed_worker(turn: str, token: str, folder: Path) -> None:
    """Let a worker start an attempt, and kill it in the middle."""
    script = folder / "worker.py"
    script.write_text(WORKER)
    worker = subprocess.Popen(
        [sys.executable, str(script), turn, token], env={**os.environ, "TMPDIR": str(folder)}
    )
    try:
        await _until(token, 2)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()


async def test_the_worker_stops_what_a_killed_one_left(tmp_path: Path, no_leaks):
    from fence.lineage.marks import turn_key

    token, job = procs.new_token(), f"job-{procs.new_token()}"
    no_leaks.turns.add(turn_key(f"{job}/1"))
    await _killed_worker(f"{job}/1", token, tmp_path)
    # The negative control: without the README's step, the attempt before goes on.
    assert len([p for p in procs.find(token) if p.name == "sleep"]) == 2

    client = UnixLocalSandboxClient()
    session = await client.create()
    try:
        await session.start()
        text = await run_block("worker")["attempt"](session, job, 2)
    finally:
        await session.aclose()
        await client.delete(session)
    assert procs.find(token) == []
    receipt = QuiescenceReceipt.from_json(text)
    assert receipt.proven
    assert receipt.turn_id == f"{job}/2"


async def test_the_worker_does_not_start_what_it_cannot_prove(monkeypatch: pytest.MonkeyPatch):
    from fence import EscalationPolicy

    class Broken:
        provider, sandbox_id = "broken", "1"

        async def run(self, argv, *, timeout):
            raise ControlError("no route")

    worker = run_block("worker")
    quick = EscalationPolicy(int_grace=0, term_grace=0, sweep=0.2, deadline=0.3)

    async def quiesce(session, turn_id):
        return await quiesce_turn(session, turn_id, policy=quick)

    worker["quiesce_turn"] = quiesce
    with pytest.raises(SystemExit, match=r"attempt 1 is not quiet.*no route") as caught:
        await worker["attempt"](Broken(), f"job-{procs.new_token()}", 2)
    assert isinstance(caught.value.__cause__, QuiescenceTimeout)


async def test_the_provider_is_a_control_that_works(turn_id: str, tmp_path: Path):
    token = procs.new_token()
    await _killed_worker(turn_id, token, tmp_path)
    provider = run_block("provider")
    control = provider["PrefixControl"]("here", ("env",))
    assert isinstance(control, SandboxControl)
    receipt = await quiesce_turn(control, turn_id)
    assert receipt.proven
    assert receipt.sandboxes[0].provider == "boxes"
    assert procs.find(token) == []


async def test_the_provider_reports_its_own_trouble():
    provider = run_block("provider")
    lost = provider["PrefixControl"]("x", ("/nonexistent-program",))
    with pytest.raises(ControlError, match="nonexistent-program"):
        await lost.run(["true"], timeout=5)
    slow = provider["PrefixControl"]("x", ("env",))
    with pytest.raises(ControlError, match="TimeoutError"):
        await slow.run(["sleep", procs.new_token()], timeout=0.1)


def test_the_provider_knows_its_own_sessions_only():
    control_for = run_block("provider")["control_for"]
    assert control_for(object()) is None
    session = type("Session", (), {"box_id": "box-1"})()
    assert control_for(session).sandbox_id == "box-1"


async def test_the_hook_is_awaited_and_named():
    async with TurnFence() as fence:
        run_block("hook", fence=fence)
    assert fence.receipt is not None
    (hook,) = fence.receipt.hooks
    assert (hook.name, hook.finished) == ("containers", True)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(((?!http)[^)#]+)", README))))
def test_every_file_that_the_readme_names_is_there(link: str):
    assert (ROOT / link).is_file()


def test_the_defaults_in_the_readme_are_the_real_ones():
    from fence import EscalationPolicy

    policy = EscalationPolicy()
    text = " ".join(README.split())
    assert f"{policy.int_grace:g} s from Ctrl-C to TERM" in text
    assert f"{policy.term_grace:g} s from TERM to KILL" in text
    assert f"{policy.deadline:g} s until `QuiescenceTimeout`" in text
