"""The 28 hostile commands, pipe and PTY, through the real exec_command tool on UnixLocal.

What counts as running is decided by an independent look at /proc, never by the fence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from fence import TurnCancelled, TurnFence
from tests.battery._tools import (
    Started,
    Tools,
    assert_proven,
    is_up,
    run,
    start,
    stop_unfenced,
    unix_local,
    until,
)
from tests.support import procs
from tests.support.battery import stop_case, stop_ids

MODES = [pytest.param(False, id="pipe"), pytest.param(True, id="pty")]

# What outlives "cancel the task, then pty_terminate_all()" every time. More do when a race goes
# their way: on a PTY, nohup and setsid against the hang-up.
KNOWN_BAD = {
    False: {
        "left-behind",
        "nohup",
        "setsid-child",
        "setsid-left-behind",
        "setsid-orphan",
        "env-scrubbed",
        "double-fork",
        "timeout-group",
        "own-marker-removed",
        "tmux-like",
    },
    True: {
        "setsid-child",
        "setsid-orphan",
        "env-scrubbed",
        "double-fork",
        "timeout-group",
        "job-control",
        "own-marker-removed",
        "tmux-like",
    },
}


@pytest.fixture
def canaries() -> Iterator[None]:
    """Two bystanders of the same uid: in the test's own group, and with a session of its own."""
    with procs.canary(), procs.canary(new_session=False):
        yield


@pytest.mark.usefixtures("canaries")
@pytest.mark.parametrize("tty", MODES)
@pytest.mark.parametrize("case_id", stop_ids())
def test_nothing_is_left_after_the_receipt(case_id: str, tty: bool, tmp_path: Path) -> None:
    case = stop_case(case_id)
    if case.missing:
        pytest.skip(f"needs {case.missing}")

    async def main() -> Started:
        async with unix_local() as session, TurnFence() as fence:
            started = start(Tools(session, fence), case, tty=tty, directory=tmp_path)
            await until(lambda: is_up(started), f"{case_id} to be up")
            ended_before = started.call.done()
            fence.cancel("stop")
            receipt = await fence.wait_for_quiescence()
            left = started.running()
            assert left == [], [str(process) for process in left]
            # Only `graceful` may write, before the receipt; `late-writer` has a test of its own.
            written = started.out.exists()
            assert_proven(receipt)
            (ended,) = await asyncio.gather(started.call, return_exceptions=True)
            if not ended_before:
                assert isinstance(ended, TurnCancelled), ended
            with pytest.raises(TurnCancelled):
                await Tools(session, fence).exec_command(f"sleep {case.token}")
            assert started.out.exists() == written
            return started

    started = run(main)
    left = started.running()
    assert left == [], [str(process) for process in left]


def test_late_writer_never_writes(tmp_path: Path) -> None:
    """A twin without the fence, started later, shows when the time to write has passed."""

    async def main() -> None:
        async with unix_local() as session:
            fenced = []
            for tty in (False, True):
                async with TurnFence() as fence:
                    case = stop_case("late-writer")
                    started = start(Tools(session, fence), case, tty=tty, directory=tmp_path)
                    await until(lambda one=started: is_up(one), "the shell to end")  # type: ignore[misc]
                    assert_proven(await fence.wait_for_quiescence())
                fenced.append(started)
            twin = start(
                Tools(session, None), stop_case("late-writer"), tty=False, directory=tmp_path
            )
            await until(lambda: is_up(twin), "the twin's shell to end")
            await stop_unfenced(session, [twin])
            await until(twin.out.exists, "the late file of the unfenced twin")
            assert [one.out.exists() for one in fenced] == [False, False]

    run(main)


@pytest.mark.parametrize("tty", MODES)
def test_without_the_fence_the_known_bad_ones_survive(tty: bool, tmp_path: Path) -> None:
    """The negative control: same commands, same gates, same eyes, the SDK alone."""

    async def main() -> dict[str, list[procs.Process]]:
        cases = [stop_case(case_id) for case_id in sorted(KNOWN_BAD[tty])]
        async with unix_local() as session:
            tools = Tools(session, None)
            started = [
                start(tools, case, tty=tty, directory=tmp_path)
                for case in cases
                if not case.missing
            ]
            try:
                for one in started:
                    await until(lambda one=one: is_up(one), f"{one.case.id} to be up")  # type: ignore[misc]
                await stop_unfenced(session, started)
                # KILL works within this time; what is there after it was not killed.
                await asyncio.sleep(0.5)
                return {one.case.id: one.running() for one in started}
            finally:
                procs.end(process for one in started for process in one.running())

    survivors = run(main)
    missed = {case_id for case_id, left in survivors.items() if not left}
    assert missed == set(), "the negative control no longer shows what the fence is for"
