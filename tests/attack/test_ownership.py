"""Who waits for what: cancelled waiters, a loop that ends, a host that is interrupted or deaf."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from agents import function_tool
from agents.tool_context import ToolContext

from fence import EscalationPolicy, QuiescenceReceipt, QuiescenceTimeout, TurnFence
from tests.attack.test_signals import SLOW_LEAVER
from tests.battery._tools import Tools, assert_proven, run, unix_local, until
from tests.support import procs

ROOT = Path(__file__).parents[2]


def _command(token: str, directory: Path) -> str:
    """Something that takes its time to leave, and something that left the session."""
    slow = shlex.join([sys.executable, "-c", SLOW_LEAVER, str(directory / token), token])
    return f"setsid sleep {token} & {slow} & wait; wait"


def _is_up(token: str, directory: Path) -> bool:
    slow = directory / token
    sleeping = any(process.name == "sleep" for process in procs.find(token))
    return sleeping and slow.exists() and "ready" in slow.read_text()


def test_waiters_that_are_cancelled_do_not_interrupt_the_drain(tmp_path: Path) -> None:
    token = procs.new_token()

    async def main() -> None:
        async with unix_local() as session, TurnFence() as fence:
            call = asyncio.ensure_future(
                Tools(session, fence).exec_command(_command(token, tmp_path), yield_time_ms=60_000)
            )
            await until(lambda: _is_up(token, tmp_path), "the command")
            fence.cancel("stop")
            for _ in range(3):
                waiter = asyncio.ensure_future(fence.wait_for_quiescence())
                await asyncio.sleep(0.02)
                waiter.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiter
            receipt = await fence.wait_for_quiescence()
            assert procs.find(token) == []
            assert_proven(receipt)
            assert [sandbox.control_runs for sandbox in receipt.sandboxes] == [1]
            assert "left in order" in (tmp_path / token).read_text()
            await asyncio.gather(call, return_exceptions=True)

    run(main)


def test_a_block_that_is_cancelled_three_times_ends_cancelled_and_quiet(tmp_path: Path) -> None:
    token = procs.new_token()
    fences: list[TurnFence] = []

    async def turn(session: object) -> None:
        async with TurnFence() as fence:
            fences.append(fence)
            await Tools(session, fence).exec_command(  # type: ignore[arg-type]
                _command(token, tmp_path), yield_time_ms=60_000
            )

    async def main() -> None:
        async with unix_local() as session:
            task = asyncio.ensure_future(turn(session))
            await until(lambda: _is_up(token, tmp_path), "the command")
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0.02)
            assert not task.done()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert procs.find(token) == []
            assert fences[0].receipt is not None
            assert_proven(fences[0].receipt)

    run(main)


def test_the_loop_ends_before_the_turn_does(tmp_path: Path) -> None:
    """What the dead loop's fence started is proved quiet from a new loop, by the same fence."""
    token = procs.new_token()

    async def first() -> TurnFence:
        async with unix_local() as session:
            fence = TurnFence()
            await Tools(session, fence).exec_command(
                f"setsid sleep {token} >/dev/null 2>&1 & echo up"
            )
            return fence

    fence = run(first)
    # The control: the end of the loop and of the session has stopped nothing.
    assert procs.find(token) != []
    receipt = asyncio.run(fence.wait_for_quiescence())
    assert procs.find(token) == []
    assert_proven(receipt)


def test_closed_in_the_order_opened_and_in_another_task() -> None:
    tokens = [procs.new_token(), procs.new_token()]

    async def main() -> None:
        async with unix_local() as session:
            innocent = asyncio.ensure_future(asyncio.Event().wait())
            fences = [TurnFence(), TurnFence()]
            for fence, token in zip(fences, tokens, strict=True):
                await fence.__aenter__()
                await Tools(session, fence).exec_command(
                    f"setsid sleep {token} >/dev/null 2>&1 & echo up"
                )

            async def close() -> None:
                for fence in fences:
                    await fence.__aexit__(None, None, None)

            await asyncio.ensure_future(close())
            assert [procs.find(token) for token in tokens] == [[], []]
            assert not innocent.done()
            innocent.cancel()
            await asyncio.gather(innocent, return_exceptions=True)

    run(main)


def test_a_sync_tool_stuck_in_its_thread_is_named(tmp_path: Path) -> None:
    """The processes are stopped although a thread cannot be; the fence refuses until it ends."""
    token = procs.new_token()
    release, begun = threading.Event(), threading.Event()

    @function_tool
    def stubborn() -> str:
        """Block until the test lets go."""
        begun.set()
        release.wait(30)
        return "done"

    async def main() -> None:
        policy = EscalationPolicy(call_grace=0.1)
        async with unix_local() as session, TurnFence(policy=policy) as fence:
            try:
                (tool,) = fence.wrap_tools([stubborn])
                context = ToolContext(
                    context=None, tool_name="stubborn", tool_call_id="c", tool_arguments="{}"
                )
                stuck = asyncio.ensure_future(tool.on_invoke_tool(context, "{}"))
                await Tools(session, fence).exec_command(
                    f"setsid sleep {token} >/dev/null 2>&1 & echo up"
                )
                await until(begun.is_set, "the tool to begin")
                with pytest.raises(QuiescenceTimeout) as caught:
                    await fence.wait_for_quiescence(timeout=1.0)
                assert [one.name for one in caught.value.partial.open_operations] == ["stubborn"]
                assert "stubborn" in str(caught.value)
                assert procs.find(token) == []
            finally:
                release.set()
            receipt = await fence.wait_for_quiescence()
            assert_proven(receipt)
            await asyncio.gather(stuck, return_exceptions=True)

    run(main)


HOST = """
import asyncio, os, signal, sys
from fence import TurnFence
from tests.battery._tools import Tools, run, unix_local, until
from tests.support import procs

async def main():
    token = os.environ["TOKEN"]
    async with unix_local() as session, TurnFence() as fence:
        tools = Tools(session, fence)
        call = asyncio.ensure_future(
            tools.exec_command(f"setsid sleep {token} & trap '' INT; wait", yield_time_ms=60_000)
        )
        await until(lambda: any(p.name == "sleep" for p in procs.find(token)), "the sleep")
        print("up", flush=True)
        if WAIT:
            await asyncio.Event().wait()
        receipt = await fence.wait_for_quiescence()
        print(receipt.to_json(), flush=True)
        await asyncio.gather(call, return_exceptions=True)

if IGNORE:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
run(main)
"""


def _host(*, wait: bool, ignore: bool) -> list[str]:
    text = HOST.replace("WAIT", str(wait))
    return [sys.executable, "-c", text.replace("IGNORE", str(ignore))]


@pytest.mark.slow
def test_a_host_interrupted_by_ctrl_c_leaves_nothing() -> None:
    token = procs.new_token()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOKEN": token}
    with subprocess.Popen(
        _host(wait=True, ignore=False),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as host:
        try:
            assert host.stdout is not None
            assert host.stdout.readline() == b"up\n"
            assert [p for p in procs.find(token) if p.name == "sleep"] != []
            host.send_signal(signal.SIGINT)
            _out, error = host.communicate(timeout=40)
            assert b"KeyboardInterrupt" in error
            assert procs.find(token) == []
        finally:
            host.kill()
            procs.end(procs.find(token))


@pytest.mark.slow
def test_a_host_that_ignores_sigchld() -> None:
    """The kernel reaps the children itself: nobody ever learns an exit code."""
    token = procs.new_token()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOKEN": token}
    try:
        done = subprocess.run(
            _host(wait=False, ignore=True),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
        )
        assert done.returncode == 0, done.stderr
        up, receipt = done.stdout.splitlines()
        assert up == "up"
        assert_proven(QuiescenceReceipt.from_json(receipt))
        assert procs.find(token) == []
    finally:
        procs.end(procs.find(token))


def test_a_command_that_deletes_its_turns_markers() -> None:
    """Environment and brand still tell whose it is; the next command makes a marker again."""
    token = procs.new_token()

    async def main() -> None:
        async with unix_local() as session, TurnFence() as fence:
            tools = Tools(session, fence)
            await tools.exec_command(
                f"rm -rf /tmp/.fence/*/{fence.turn}; "
                f"setsid sleep {token} >/dev/null 2>&1 & "
                f"(env -i setsid sleep {token} >/dev/null 2>&1 &) ; echo up"
            )
            await until(lambda: len(procs.find(token)) >= 2, "both to be up")
            # What does not see the control's directory could not see the tombstone: refused once,
            # then the directory is made anew.
            refused = await tools.exec_command("echo again")
            assert "exited with code 125" in refused
            assert "fence: it does not see the directory" in refused
            assert "again" in await tools.exec_command("echo again")
            receipt = await fence.wait_for_quiescence()
            # Only the markers could have said that both commands bore their brands.
            assert (receipt.proven, receipt.containment) == (True, "lineage-unbranded")
            assert procs.find(token) == []

    run(main)
