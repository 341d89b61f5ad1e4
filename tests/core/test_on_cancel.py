"""`on_cancel` and `cancel_on`: who is told of the cancel, and who may ask for it."""

from __future__ import annotations

import asyncio
import logging
import threading

import anyio
import pytest

from fence import TurnFence
from fence.errors import FenceUsageError, QuiescenceTimeout, TurnCancelled

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_is_called_once_at_the_cancel_from_any_thread() -> None:
    """The run that drives the turn ends with it."""
    told: list[str] = []
    ended = anyio.Event()
    async with TurnFence() as fence:

        def tell() -> None:
            told.append("stop")
            ended.set()

        fence.on_cancel(tell)
        assert told == []
        thread = threading.Thread(target=fence.cancel)
        thread.start()
        with anyio.fail_after(5):
            await ended.wait()
        thread.join()
        fence.cancel()
    assert told == ["stop"]


async def test_is_called_at_once_after_the_cancel() -> None:
    told: list[str] = []
    async with TurnFence() as fence:
        fence.cancel("x")
        await anyio.lowlevel.checkpoint()
        await fence.wait_for_quiescence()
        fence.on_cancel(lambda: told.append("late"))
        assert told == ["late"]


async def test_an_error_of_it_is_logged_and_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []
    async with TurnFence() as fence:
        fence.on_cancel(lambda: 1 / 0)
        fence.on_cancel(lambda: told.append("second"))
        fence.cancel("x")
        receipt = await fence.wait_for_quiescence()
    assert receipt.proven
    assert told == ["second"]
    assert any("on_cancel" in record.message for record in caplog.records)


async def test_needs_a_callable() -> None:
    async with TurnFence() as fence:
        with pytest.raises(FenceUsageError, match="callback"):
            fence.on_cancel(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [threading.Event(), asyncio.Event, 5, "stop", threading.Condition()]
)
async def test_what_would_hold_the_event_loop_is_refused(wrong: object) -> None:
    """threading.Event has a wait(), too."""
    with pytest.raises(FenceUsageError, match=r"cancel_on: .*cancel\(\)"):
        TurnFence(cancel_on=wrong)  # type: ignore[arg-type]


async def test_a_finished_fence_cannot_be_entered_again() -> None:
    async with TurnFence() as fence:
        pass
    with pytest.raises(TurnCancelled):
        async with fence:
            raise AssertionError("entered")


async def test_a_fence_that_is_dropped_says_so_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Python hides a ResourceWarning by default."""
    fence = TurnFence()

    async def call() -> None:
        return None

    await fence.run_operation("x", "function", call)
    with pytest.warns(ResourceWarning, match="dropped"), caplog.at_level(logging.WARNING):
        fence.__del__()
    assert any("dropped" in record.message for record in caplog.records)
    await fence.wait_for_quiescence()


def test_the_advice_of_a_timeout_fits_who_waited() -> None:
    from fence.receipt import OperationCounts, QuiescenceReceipt

    def partial(origin: str) -> QuiescenceReceipt:
        return QuiescenceReceipt(
            turn_id="t",
            turn="0" * 32,
            proven=False,
            reason=None,
            started_at=0.0,
            cancelled_at=0.0,
            quiesced_at=None,
            elapsed_ms=1,
            containment=None,
            sandboxes=(),
            commands=(),
            operations=OperationCounts(0, 0, 0, 0),
            origin=origin,  # type: ignore[arg-type]
        )

    assert "await quiesce_turn() again" in str(QuiescenceTimeout(partial("other-process")))
    own = str(QuiescenceTimeout(partial("turn")))
    assert "await wait_for_quiescence() again" in own
    assert "sandbox" not in own, "none is involved"
