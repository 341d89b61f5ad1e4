"""Who owns a call: the fence. Callers come and go, are cancelled twice, or never come back."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import warnings

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from fence import QuiescenceTimeout, TurnCancelled, TurnFence
from fence.errors import FenceUsageError
from fence.tasks import is_cancellation
from tests.core.fakes import FOREVER, QUICK, SHORT, FakeSandbox, Sink, start


async def test_a_cancelled_caller_leaves_at_once_and_its_command_is_stopped() -> None:
    world, sink, entered, never = FakeSandbox(), Sink(), anyio.Event(), anyio.Event()
    async with TurnFence(policy=QUICK, on_event=sink) as fence:
        box = fence.bind_sandbox(world)
        other = await start(fence, box, world)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: start(fence, box, world, after=never, entered=entered))
            await entered.wait()
            await anyio.wait_all_tasks_blocked()
            assert len(world.alive()) == 2
            group.cancel_scope.cancel()
        # The caller is gone; the call is still ours.
        assert "1 stopping" in repr(fence)
        while len(world.alive()) == 2:
            await anyio.wait_all_tasks_blocked()
        assert world.alive() == [other.session_id]
        assert [run.command for run in world.sweeps] == ["2"]
        assert not fence.cancelled
    assert "caller_lost" in sink.kinds
    assert "command_stopping" in sink.kinds
    assert fence.receipt is not None
    assert [c.outcome for c in fence.receipt.commands] == ["stopped", "stopped"]


async def test_a_lost_command_that_was_not_spawned_yet_finds_its_own_tombstone() -> None:
    world, entered, gate = FakeSandbox(), anyio.Event(), anyio.Event()
    async with TurnFence(policy=QUICK) as fence:
        box = fence.bind_sandbox(world)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: start(fence, box, world, before=gate, entered=entered))
            await entered.wait()
            group.cancel_scope.cancel()
        while not world.sweeps:
            await anyio.wait_all_tasks_blocked()
        gate.set()
        await anyio.wait_all_tasks_blocked()
        assert world.refused == [1]
        assert world.alive() == []
        await start(fence, box, world)  # the turn goes on
        assert len(world.alive()) == 1


async def test_the_stop_of_a_lost_command_is_retried() -> None:
    world = FakeSandbox(faults=["raise", "garbage"])
    async with TurnFence(policy=QUICK) as fence:
        box = fence.bind_sandbox(world)
        await _lose_a_start(fence, box, world)
        while len(world.sweeps) < 3 or world.alive():
            await anyio.sleep(0.001)
        # "garbage" did its work all the same: nobody is sent a second Ctrl-C.
        assert [run.no_int for run in world.sweeps] == [(), (1,), (1,)]


async def test_a_result_that_arrives_with_the_cancellation_is_not_lost() -> None:
    """The caller is cancelled in the tick in which its start returned: nobody has the session."""
    world, after, entered = FakeSandbox(), anyio.Event(), anyio.Event()
    async with TurnFence(policy=QUICK) as fence:
        box = fence.bind_sandbox(world)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: start(fence, box, world, after=after, entered=entered))
            await entered.wait()
            after.set()
            group.cancel_scope.cancel()
        while world.alive():
            await anyio.sleep(0.001)
        assert [run.command for run in world.sweeps] == ["1"]


@pytest.mark.parametrize("kind", ["function", "custom", "computer", "shell", "patch", "mcp"])
async def test_a_caller_s_cancellation_is_passed_on(kind) -> None:
    ended = anyio.Event()

    async def call() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    async with TurnFence(policy=QUICK) as fence:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: fence.run_operation("tool", kind, call))
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        await ended.wait()


@pytest.mark.parametrize("kind", ["file", "thread"])
async def test_a_file_operation_goes_on_without_its_caller(kind) -> None:
    gate, done = anyio.Event(), anyio.Event()

    async def call() -> None:
        await gate.wait()
        done.set()

    async with TurnFence(policy=QUICK) as fence:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: fence.run_operation("write", kind, call))
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        assert "1 in flight" in repr(fence)
        gate.set()
    assert done.is_set()
    assert fence.receipt is not None
    assert fence.receipt.operations.cancelled == 0


async def test_a_file_operation_is_waited_for_and_named_not_cancelled() -> None:
    gate = anyio.Event()
    fence = TurnFence(policy=QUICK)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: fence.run_operation("write", "file", gate.wait, call_id="c9"))
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(
            QuiescenceTimeout, match=r"call write \(file\) has not settled"
        ) as caught:
            await fence.wait_for_quiescence(0.2)
        assert caught.value.partial.open_operations[0].call_id == "c9"
        gate.set()
        assert (await fence.wait_for_quiescence()).proven


async def test_a_sync_tool_stuck_in_a_thread_is_named() -> None:
    leave = threading.Event()

    async def call() -> str:
        await anyio.to_thread.run_sync(leave.wait)
        return "written"

    results = []

    async def run() -> None:
        results.append(await fence.run_operation("sync tool", "thread", call))

    fence = TurnFence(policy=QUICK)
    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        try:
            with pytest.raises(QuiescenceTimeout, match=r"call sync tool \(thread\)"):
                await fence.wait_for_quiescence(0.2)
        finally:
            leave.set()
        await fence.wait_for_quiescence()
    # It really did its work: its true result comes through.
    assert results == ["written"]


async def test_calls_in_flight_get_a_grace_and_their_true_result() -> None:
    quick = anyio.Event()
    outcomes: dict[str, object] = {}

    async def tool(name: str, call) -> None:
        try:
            outcomes[name] = await fence.run_operation(name, "function", call)
        except (TurnCancelled, OSError) as error:
            outcomes[name] = type(error).__name__

    async def result() -> str:
        await quick.wait()
        return "done"

    async def failure() -> None:
        await quick.wait()
        raise OSError

    fence = TurnFence(policy=QUICK)
    async with anyio.create_task_group() as group:
        group.start_soon(tool, "result", result)
        group.start_soon(tool, "failure", failure)
        group.start_soon(tool, "stuck", anyio.sleep_forever)
        await anyio.wait_all_tasks_blocked()
        fence.cancel()
        quick.set()
        receipt = await fence.wait_for_quiescence()
    assert outcomes == {"result": "done", "failure": "OSError", "stuck": "TurnCancelled"}
    assert receipt.operations.cancelled == 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_tool_that_swallows_its_cancellation_is_named() -> None:
    gate = asyncio.Event()

    async def deaf() -> str:
        while True:
            try:
                await gate.wait()
                return "at last"
            except asyncio.CancelledError:
                continue

    fence = TurnFence(policy=QUICK)
    task = asyncio.create_task(fence.run_operation("deaf", "function", deaf))
    await asyncio.sleep(0)
    with pytest.raises(QuiescenceTimeout, match="call deaf"):
        await fence.wait_for_quiescence(0.2)
    gate.set()
    await fence.wait_for_quiescence()
    assert await task == "at last"


async def test_cancelling_a_waiter_ends_only_its_wait() -> None:
    world = FakeSandbox(gate=anyio.Event())
    fence = TurnFence(policy=QUICK)
    await start(fence, fence.bind_sandbox(world), world)
    receipts = []

    async def wait() -> None:
        receipts.append(await fence.wait_for_quiescence())

    async with anyio.create_task_group() as keep:
        keep.start_soon(wait)
        keep.start_soon(wait)
        for _ in range(3):
            async with anyio.create_task_group() as group:
                group.start_soon(fence.wait_for_quiescence)
                await anyio.wait_all_tasks_blocked()
                group.cancel_scope.cancel()
        world.gate.set()
    assert len(world.turn_sweeps) == 1
    assert receipts[0] is receipts[1] is fence.receipt
    assert await fence.wait_for_quiescence() is fence.receipt


async def test_leaving_a_cancelled_block_still_proves_and_then_ends_as_cancelled() -> None:
    world = FakeSandbox()
    seen = []

    async def turn() -> None:
        try:
            async with TurnFence(policy=QUICK) as fence:
                seen.append(fence)
                await start(fence, fence.bind_sandbox(world), world)
                await anyio.sleep_forever()
        except BaseException as error:
            seen.append(is_cancellation(error))
            raise

    async with anyio.create_task_group() as group:
        group.start_soon(turn)
        while not world.processes:
            await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    fence, cancelled = seen
    assert cancelled
    assert world.alive() == []
    assert fence.receipt is not None
    assert fence.reason in ("turn ended by CancelledError", "turn ended by Cancelled")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_second_and_a_third_cancel_do_not_interrupt_the_drain() -> None:
    world = FakeSandbox(gate=anyio.Event())

    async def turn() -> None:
        async with TurnFence(policy=QUICK) as fence:
            await start(fence, fence.bind_sandbox(world), world)
            await asyncio.sleep(3600)

    task = asyncio.create_task(turn())
    while not world.processes:
        await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await anyio.wait_all_tasks_blocked()
        assert not task.done()
    assert world.gate is not None
    world.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.alive() == []
    assert len(world.turn_sweeps) == 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancel_during_the_drain_of_a_good_body_is_raised_after_it() -> None:
    world = FakeSandbox(gate=anyio.Event())
    fences = []

    async def turn() -> None:
        async with TurnFence(policy=QUICK) as fence:
            fences.append(fence)
            await start(fence, fence.bind_sandbox(world), world)

    task = asyncio.create_task(turn())
    while not world.turn_sweeps:
        await asyncio.sleep(0)
    task.cancel()
    await anyio.wait_all_tasks_blocked()
    assert not task.done()
    assert world.gate is not None
    world.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fences[0].receipt is not None


async def test_the_body_s_error_wins_and_the_missing_proof_travels_with_it(caplog) -> None:
    world = FakeSandbox(always="raise")
    with pytest.raises(KeyError) as caught:
        async with TurnFence(policy=SHORT) as fence:
            await start(fence, fence.bind_sandbox(world), world)
            raise KeyError("the body's own")
    assert any("is not proven quiet" in note for note in caught.value.__notes__)
    assert any(record.levelname == "ERROR" for record in caplog.records)
    assert fence.reason == "turn ended by KeyError"
    world.always = None
    await fence.wait_for_quiescence()


async def test_after_a_good_body_the_missing_proof_is_raised() -> None:
    world = FakeSandbox(always="raise")
    with pytest.raises(QuiescenceTimeout):
        async with TurnFence(policy=SHORT) as fence:
            await start(fence, fence.bind_sandbox(world), world)
    assert fence.reason == "turn ended"
    world.always = None
    await fence.wait_for_quiescence()


async def test_a_keyboard_interrupt_in_the_body_is_raised_after_the_proof() -> None:
    world = FakeSandbox()
    with pytest.raises(KeyboardInterrupt):
        async with TurnFence(policy=QUICK) as fence:
            await start(fence, fence.bind_sandbox(world), world)
            raise KeyboardInterrupt
    assert fence.receipt is not None
    assert world.alive() == []


def test_ctrl_c_on_a_running_program_is_raised_after_the_proof() -> None:
    world = FakeSandbox()
    fences = []

    async def main() -> None:
        async with TurnFence(policy=QUICK) as fence:
            fences.append(fence)
            await start(fence, fence.bind_sandbox(world), world)
            signal.raise_signal(signal.SIGINT)
            await anyio.sleep_forever()

    with pytest.raises(KeyboardInterrupt):
        anyio.run(main, backend="asyncio")
    assert fences[0].receipt is not None
    assert world.alive() == []


def test_a_second_ctrl_c_does_not_skip_the_proof() -> None:
    """The second one ends the loop's run; the tasks are cancelled, and the block still waits."""
    world = FakeSandbox()
    fences = []

    async def main() -> None:
        world.gate = anyio.Event()
        loop = asyncio.get_running_loop()

        def again() -> None:
            if not world.turn_sweeps:
                loop.call_soon(again)
                return
            assert world.gate is not None
            loop.call_later(0.05, world.gate.set)
            signal.raise_signal(signal.SIGINT)

        async with TurnFence(policy=QUICK) as fence:
            fences.append(fence)
            await start(fence, fence.bind_sandbox(world), world)
            loop.call_soon(again)
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(3600)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert fences[0].receipt is not None
    assert world.alive() == []


async def test_a_fence_may_be_closed_in_another_task_than_it_was_opened_in() -> None:
    world = FakeSandbox()
    fence = TurnFence(policy=QUICK)

    async def enter() -> None:
        await fence.__aenter__()
        await start(fence, fence.bind_sandbox(world), world)

    async def leave() -> None:
        await fence.__aexit__(None, None, None)

    async with anyio.create_task_group() as group:
        group.start_soon(enter)
    async with anyio.create_task_group() as group:
        group.start_soon(leave)
    assert fence.receipt is not None
    assert world.alive() == []


async def test_two_fences_may_be_closed_in_the_order_they_were_opened() -> None:
    one, two = FakeSandbox("one"), FakeSandbox("two")
    first, second = TurnFence(policy=QUICK), TurnFence(policy=QUICK)
    await first.__aenter__()
    await second.__aenter__()
    await start(first, first.bind_sandbox(one), one)
    await start(second, second.bind_sandbox(two), two)
    await first.__aexit__(None, None, None)
    assert (one.alive() == [], two.alive() == []) == (True, False)
    assert not second.cancelled
    await second.__aexit__(None, None, None)
    assert two.alive() == []


async def test_two_turns_in_one_sandbox_leave_each_other_alone() -> None:
    world = FakeSandbox()
    async with TurnFence(policy=QUICK) as outer:
        async with TurnFence(policy=QUICK) as inner:
            await start(outer, outer.bind_sandbox(world), world)
            await start(inner, inner.bind_sandbox(world), world)
        assert world.alive(inner.turn) == []
        assert world.alive(outer.turn) != []


def test_a_fence_is_awaited_on_a_new_loop_when_its_own_is_over() -> None:
    world, never = FakeSandbox(), []

    async def work() -> None:
        never.append(anyio.Event())
        fence.bind_sandbox(world)
        await start(fence, fence.bind_sandbox(world), world)
        await anyio.wait_all_tasks_blocked()

    fence = TurnFence(policy=QUICK)
    for backend in ("asyncio", "trio"):
        anyio.run(work, backend=backend)
    fence.cancel("the loop is over")
    receipt = anyio.run(fence.wait_for_quiescence, backend="asyncio")
    assert receipt.proven
    assert receipt.operations.admitted == 2
    assert world.alive() == []


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_calls_that_went_down_with_their_loop_do_not_block_the_proof(backend: str) -> None:
    world = FakeSandbox(always="hang")

    async def work() -> None:
        box = fence.bind_sandbox(world)
        await start(fence, box, world)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: start(fence, box, world, after=anyio.Event()))
            group.start_soon(lambda: fence.run_operation("slow", "file", anyio.sleep_forever))
            await anyio.wait_all_tasks_blocked()
            fence.cancel("shutting down")
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()

    fence = TurnFence(policy=QUICK)
    anyio.run(work, backend=backend)
    assert fence.receipt is None
    world.always = None
    receipt = anyio.run(fence.wait_for_quiescence, backend=backend)
    assert receipt.proven
    assert world.alive() == []
    assert receipt.operations.settled + len(receipt.unsettled_starts) == 3


def test_an_interrupted_loop_leaves_a_fence_that_can_be_closed() -> None:
    """The loop is closed with tasks pending: they can never report."""
    world = FakeSandbox()

    async def work() -> None:
        box = fence.bind_sandbox(world)
        await start(fence, box, world)
        world.lost = asyncio.ensure_future(  # type: ignore[attr-defined]
            fence.run_operation("stuck", "function", asyncio.Event().wait)
        )
        await asyncio.sleep(0)

    fence = TurnFence(policy=QUICK)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(work())
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    receipt = anyio.run(fence.wait_for_quiescence, backend="asyncio")
    assert receipt.proven
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "coroutine ... was never awaited", by the closed loop
        del world.lost  # type: ignore[attr-defined]
        gc.collect()


async def test_a_cancel_may_come_from_any_thread() -> None:
    world = FakeSandbox()
    fence = TurnFence(policy=QUICK)
    box = fence.bind_sandbox(world)
    await start(fence, box, world)
    answers: list[bool] = []

    def press_stop() -> None:
        answers.append(fence.cancel("from a thread"))
        answers.append(fence.cancel("again"))

    thread = threading.Thread(target=press_stop)
    thread.start()
    await anyio.to_thread.run_sync(thread.join)
    with pytest.raises(TurnCancelled, match="from a thread"):
        await start(fence, box, world)
    # The drain has begun by itself, nobody waits for it.
    while world.alive():
        await anyio.sleep(0.001)
    assert answers == [True, False]
    assert fence.reason == "from a thread"
    assert (await fence.wait_for_quiescence()).reason == "from a thread"


async def test_racing_cancels_have_one_winner() -> None:
    fence = TurnFence(policy=QUICK)
    won: list[str] = []
    ready = threading.Barrier(8)

    def press(name: str) -> None:
        ready.wait()
        if fence.cancel(name):
            won.append(name)

    threads = [threading.Thread(target=press, args=(str(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [fence.reason]
    await fence.wait_for_quiescence()


async def test_a_cancel_may_come_from_a_signal_handler() -> None:
    world = FakeSandbox()
    async with TurnFence(policy=QUICK) as fence:
        box = fence.bind_sandbox(world)
        await start(fence, box, world)
        before = signal.signal(signal.SIGUSR1, lambda *_: fence.cancel("signal"))
        try:
            signal.raise_signal(signal.SIGUSR1)
            assert fence.cancelled
            with pytest.raises(TurnCancelled):
                await start(fence, box, world)
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert fence.reason == "signal"
    assert world.alive() == []


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_another_running_loop_may_wait_but_not_call() -> None:
    world = FakeSandbox()
    fence = TurnFence(policy=QUICK)
    box = fence.bind_sandbox(world)
    await start(fence, box, world)

    async def elsewhere():
        with pytest.raises(FenceUsageError, match="event loop"):
            await start(fence, box, world)
        return await fence.wait_for_quiescence()

    receipt = await anyio.to_thread.run_sync(lambda: anyio.run(elsewhere, backend="trio"))
    assert receipt is fence.receipt
    assert world.alive() == []


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_home_that_goes_down_hands_the_drain_to_who_waits_elsewhere() -> None:
    world, leave = FakeSandbox(always="hang"), threading.Event()
    fence = TurnFence(policy=QUICK)

    async def home() -> None:
        await start(fence, fence.bind_sandbox(world), world)
        await anyio.to_thread.run_sync(leave.wait)
        world.always = None

    async with anyio.create_task_group() as group:
        group.start_soon(
            lambda: anyio.to_thread.run_sync(lambda: anyio.run(home, backend="asyncio"))
        )
        while not world.processes:
            await anyio.sleep(0.001)

        async def let_it_end() -> None:
            while not world.turn_sweeps:
                await anyio.sleep(0.001)
            leave.set()

        group.start_soon(let_it_end)
        receipt = await fence.wait_for_quiescence()
    assert receipt.proven
    assert receipt.sandboxes[0].control_runs == 2
    assert world.alive() == []


async def test_a_thrown_away_block_is_cancelled_without_an_await() -> None:
    fence = TurnFence(policy=QUICK)

    async def turn() -> None:
        async with fence:
            await anyio.sleep_forever()

    coroutine = turn()
    coroutine.send(None)
    coroutine.close()
    assert fence.reason == "turn ended by GeneratorExit"
    await fence.wait_for_quiescence()


async def test_a_call_keeps_its_caller_s_context() -> None:
    import contextvars

    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")
    name.set("the caller's")

    async def call() -> str:
        return name.get()

    async with TurnFence(policy=QUICK) as fence:
        assert await fence.run_operation("tool", "function", call) == "the caller's"


async def test_a_nested_call_is_refused_once_the_turn_is_cancelled() -> None:
    async def inner() -> str:
        return "inner"

    async def outer() -> str:
        fence.cancel("from inside")
        with pytest.raises(TurnCancelled, match="from inside"):
            await fence.run_operation("inner", "function", inner)
        return "outer"

    async with TurnFence(policy=QUICK) as fence:
        assert await fence.run_operation("outer", "function", outer) == "outer"
    assert fence.receipt is not None
    assert fence.receipt.operations.rejected == 1


async def test_a_tool_that_waits_for_its_own_turn_is_let_go() -> None:
    async def suicidal() -> None:
        await fence.wait_for_quiescence()

    async with TurnFence(policy=QUICK) as fence:
        with pytest.raises(TurnCancelled):
            await fence.run_operation("suicidal", "function", suicidal)
    assert fence.receipt is not None


async def _lose_a_start(fence, box, world) -> None:
    entered, never = anyio.Event(), anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: start(fence, box, world, after=never, entered=entered))
        await entered.wait()
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()


def test_the_fake_s_survivors_can_be_seen() -> None:
    """The checks above say `alive() == []`; here is one that lives."""
    world = FakeSandbox(always="raise")

    async def main() -> None:
        fence = TurnFence(policy=SHORT)
        await start(fence, fence.bind_sandbox(world), world, lives=FOREVER)
        with pytest.raises(QuiescenceTimeout):
            await fence.wait_for_quiescence()
        assert len(world.alive()) == 1
        world.always = None
        world.processes.clear()
        await fence.wait_for_quiescence()

    anyio.run(main)
