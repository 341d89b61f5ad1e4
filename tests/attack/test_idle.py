"""An open fence costs nothing while nothing is cancelled: the event loop is not woken up by it."""

from __future__ import annotations

import asyncio
import selectors

from fence import TurnFence
from tests.battery._tools import Tools, unix_local
from tests.support import procs


class Counting(selectors.DefaultSelector):
    """Counts how often the loop goes to sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.naps = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.naps += 1
        return super().select(timeout)


async def poll() -> None:
    while True:
        await asyncio.sleep(0.01)


def naps_in_half_a_second(*, fenced: bool, polling: bool = False) -> int:
    selector, token = Counting(), procs.new_token()

    async def main() -> int:
        async with unix_local() as session:
            fence = TurnFence(cancel_on=asyncio.Event()) if fenced else None
            if fence is not None:
                await fence.__aenter__()
            # A command that ended, one that left something behind, and then nothing.
            await Tools(session, fence).exec_command(f"(sleep {token} >/dev/null 2>&1 &); true")
            poller = asyncio.create_task(poll()) if polling else None
            await asyncio.sleep(0.1)
            before = selector.naps
            await asyncio.sleep(0.5)
            count = selector.naps - before
            if poller is not None:
                poller.cancel()
            if fence is not None:
                await fence.__aexit__(None, None, None)
            return count

    try:
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            return runner.run(main())
    finally:
        procs.end(procs.find(token))


def test_a_fence_that_polls_would_be_seen() -> None:
    quiet = naps_in_half_a_second(fenced=False)
    assert naps_in_half_a_second(fenced=False, polling=True) > quiet + 5


def test_no_wake_up_while_idle() -> None:
    assert naps_in_half_a_second(fenced=True) <= naps_in_half_a_second(fenced=False) + 1
