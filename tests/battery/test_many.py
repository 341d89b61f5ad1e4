"""Many commands, one cancel: how many control runs there were is counted from outside."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from fence import TurnCancelled, TurnFence
from fence.receipt import QuiescenceReceipt
from tests.battery._tools import Tools, assert_proven, run, unix_local, until
from tests.support import procs
from tests.support.observer import Observation, observe

WORKER = Path(__file__).with_name("worker.py")
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[2])}


def observed(
    kind: str, turn_id: str, token: str, count: int, *, tty: bool = False, cancels: int = 1
) -> Observation:
    arguments = [kind, str(count), "tty" if tty else "pipe", str(cancels)]
    seen = observe(WORKER, arguments, env={**ENVIRONMENT, "TURN_ID": turn_id, "TOKEN": token})
    assert seen.exit_code == 0, seen.stderr
    return seen


@pytest.mark.parametrize(
    ("count", "tty", "cancels"),
    [
        pytest.param(1, False, 1, id="one-pipe"),
        pytest.param(4, True, 1, id="four-pty", marks=pytest.mark.slow),
        pytest.param(4, False, 5, id="five-cancels", marks=pytest.mark.slow),
        pytest.param(60, False, 1, id="sixty", marks=pytest.mark.slow),
    ],
)
def test_one_cancel_is_one_control_run(count: int, tty: bool, cancels: int, turn_id: str) -> None:
    token = procs.new_token()
    with procs.canary() as canary:
        seen = observed("fenced", turn_id, token, count, tty=tty, cancels=cancels)
        left = procs.find(token)
        assert left == [], [str(process) for process in left]
        assert seen.delivered_to(canary.pid) == []
        assert canary.pid not in {abs(signal.target) for signal in seen.signals}
    answer = json.loads(seen.stdout)
    receipt = QuiescenceReceipt.from_json(json.dumps(answer["receipt"]))
    assert answer["left"] == []
    assert answer["ended"] == ["RunTurnCancelled"]
    assert_proven(receipt)
    assert len(receipt.commands) == count
    assert receipt.reason == "stop 0"
    assert seen.control_runs("fence-sweep") == 1, receipt.sandboxes
    assert seen.control_runs("fence-prepare") == 1
    # What the receipt says of itself agrees with what was counted.
    assert [sandbox.control_runs for sandbox in receipt.sandboxes] == [1]


@pytest.mark.slow
def test_without_the_fence_there_is_no_control_run_and_much_is_left(turn_id: str) -> None:
    token = procs.new_token()
    try:
        seen = observed("unfenced", turn_id, token, 4)
        left = procs.find(token)
        assert seen.control_runs("fence-sweep") == 0
        assert len(left) >= 2, "the negative control no longer shows what the fence is for"
    finally:
        procs.end(procs.find(token))


def test_sixty_at_once_and_one_cancel() -> None:
    """The same without strace in between, so that they really run at the same time."""
    token = procs.new_token()

    async def main() -> None:
        async with unix_local() as session, TurnFence() as fence:
            tools = Tools(session, fence)
            command = f"setsid sleep {token} & wait"
            calls = [
                asyncio.ensure_future(tools.exec_command(command, yield_time_ms=60_000))
                for _ in range(60)
            ]
            await until(
                lambda: sum(p.name == "sleep" for p in procs.find(token)) == 60, "all 60 to be up"
            )
            fence.cancel("stop")
            receipt = await fence.wait_for_quiescence()
            assert procs.find(token) == []
            assert_proven(receipt)
            assert [sandbox.control_runs for sandbox in receipt.sandboxes] == [1]
            assert len(receipt.commands) == 60
            ended = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(one, TurnCancelled) for one in ended)

    run(main)


@pytest.mark.parametrize("count", [6, 12])
def test_open_ptys_that_fill_the_default_executor(count: int) -> None:
    """UnixLocal's deadlock: each open PTY holds a thread, and every start and exec needs one."""
    token = procs.new_token()
    threads = min(32, (os.cpu_count() or 1) + 4)
    first = min(count, threads)

    async def main() -> None:
        async with unix_local() as session, TurnFence() as fence:
            tools = Tools(session, fence)
            calls = [
                asyncio.ensure_future(
                    tools.exec_command(f"sleep {token}", tty=True, yield_time_ms=60_000)
                )
                for _ in range(count)
            ]
            await until(
                lambda: sum(p.name == "sleep" for p in procs.find(token)) >= first,
                f"{first} PTYs to be open",
            )
            if count >= threads:
                # The control: what goes through the session and that executor hangs by now.
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await session.exec("true")
            fence.cancel("stop")
            receipt = await fence.wait_for_quiescence()
            assert procs.find(token) == []
            assert_proven(receipt)
            ended = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(one, TurnCancelled) for one in ended), ended

    run(main, threads=None)
