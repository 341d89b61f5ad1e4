"""A whole Runner run, cancelled in each of its moments; the sandbox is the run's or the app's."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from fence import TurnCancelled, TurnFence
from tests.battery._tools import assert_proven, run, unix_local, until
from tests.runs._scenes import MOMENTS, Moment, Scene
from tests.support import procs

OWNERS = ["run-owned", "app-owned"]
STREAMS = [pytest.param(False, id="plain"), pytest.param(True, id="streamed")]


@pytest.mark.parametrize("streamed", STREAMS)
@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_nothing_is_left_of_a_cancelled_run(
    moment: Moment, owner: str, streamed: bool, tmp_path: Path
) -> None:
    scene_file = tmp_path / "second-tool-ran"

    async def main() -> None:
        scene = Scene(moment, scene_file)
        async with AsyncExitStack() as stack:
            session = None
            if owner == "app-owned":
                session = await stack.enter_async_context(unix_local())
            fence = await stack.enter_async_context(TurnFence())
            going = scene.start(fence, session, streamed=streamed)
            await until(lambda: going.task.done() or scene.is_reached(), f"the moment {moment}")
            assert not going.task.done(), await going.ended()

            fence.cancel("user pressed stop")
            if moment != "between-tools":
                going.stop()
            receipt = await fence.wait_for_quiescence()
            left = procs.find(scene.token)
            assert left == [], [str(process) for process in left]
            assert_proven(receipt)
            assert receipt.reason == "user pressed stop"

            # The model wakes up after the fence has closed and asks for one more command.
            scene.model_goes_on.set()
            end = await going.ended()
            if moment == "between-tools":
                assert isinstance(end, TurnCancelled), end
                assert not scene_file.exists()
            else:
                assert end is None or isinstance(end, asyncio.CancelledError | TurnCancelled), end
            assert procs.find(scene.token) == []

    with procs.canary():
        run(main)


@pytest.mark.parametrize("streamed", STREAMS)
@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_without_the_fence_something_is_left(
    moment: Moment, owner: str, streamed: bool, tmp_path: Path
) -> None:
    """The negative control: the same run, stopped as the SDK offers, and its sandbox closed."""

    async def main() -> list[procs.Process]:
        scene = Scene(moment, tmp_path / "second-tool-ran")
        try:
            async with AsyncExitStack() as stack:
                session = None
                if owner == "app-owned":
                    session = await stack.enter_async_context(unix_local())
                going = scene.start(None, session, streamed=streamed)
                await until(lambda: going.task.done() or scene.is_reached(), f"the moment {moment}")
                assert not going.task.done(), await going.ended()
                going.stop()
                scene.model_goes_on.set()
                await going.ended()
            return procs.find(scene.token)
        finally:
            procs.end(procs.find(scene.token))

    assert run(main) != [], "the negative control no longer shows what the fence is for"
