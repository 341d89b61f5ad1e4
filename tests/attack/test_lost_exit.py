"""A child's exit that the host never hears of: the proof rests on the process table, not on it."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Iterator

import pytest

from fence import TurnCancelled, TurnFence
from tests.battery._tools import Tools, assert_proven, banner, run, unix_local, until
from tests.support import procs

pytestmark = [
    pytest.mark.skipif(
        sys.version_info >= (3, 12), reason="asyncio waits by pidfd there, nothing can be lost"
    ),
    # The injected fault itself: asyncio's transport of the lost child is never told that it ended.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def lost() -> Iterator[set[int]]:
    """Pids whose exit is reaped and then kept from asyncio (bug reports 22 and 68)."""
    watcher = asyncio.ThreadedChildWatcher
    kept: set[int] = set()
    original = watcher._do_waitpid

    def reap_in_silence(self, loop, expected_pid, callback, args):
        os.waitpid(expected_pid, 0)
        kept.add(expected_pid)
        self._threads.pop(expected_pid)

    watcher._do_waitpid = reap_in_silence
    yield kept
    watcher._do_waitpid = original
    # Those transports complain when they are collected: here, not in somebody else's test.
    for _ in range(3):
        gc.collect()


@pytest.mark.parametrize("state", ["waiting", "yielded"])
def test_a_lost_exit_does_not_hold_the_turn(lost: set[int], state: str) -> None:
    """The provider's call never comes back; the drain gives it its grace and ends it."""
    token = procs.new_token()

    async def main() -> None:
        async with unix_local() as session, TurnFence() as fence:
            tools = Tools(session, fence)
            patience = 250 if state == "yielded" else 60_000
            call = asyncio.ensure_future(
                tools.exec_command(f"exec sleep {token}", yield_time_ms=patience)
            )
            await until(lambda: bool(procs.find(token)), "the command")
            if state == "yielded":
                assert banner(await call).session_id is not None
            receipt = await fence.wait_for_quiescence()
            assert procs.find(token) == []
            assert_proven(receipt)
            assert len(lost) == 1, "the exit was not lost: the case is not the case"
            if state == "waiting":
                with pytest.raises(TurnCancelled):
                    await call

    run(main)


def test_many_quick_turns_of_which_each_loses_an_exit(lost: set[int]) -> None:
    """40 rounds at once; each has its proof although its provider hears of nothing."""

    async def one(session: object) -> bool:
        token = procs.new_token()
        async with TurnFence() as fence:
            call = asyncio.ensure_future(
                fence.wrap_session(session).pty_exec_start(f"exec sleep {token}", yield_time_s=0.25)
            )
            await asyncio.wait([call])
            receipt = await fence.wait_for_quiescence()
        return receipt.proven and not procs.find(token)

    async def main() -> None:
        async with unix_local() as session:
            assert all(await asyncio.gather(*(one(session) for _ in range(40))))
        assert len(lost) == 40

    run(main)
