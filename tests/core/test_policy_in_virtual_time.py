"""Graces, backoff and deadlines, to the digit: the clock jumps, nobody waits."""

from __future__ import annotations

import itertools

import anyio
import pytest
import trio
import trio.testing

from fence import EscalationPolicy, QuiescenceTimeout, TurnCancelled, TurnFence
from fence.errors import SandboxNotReady
from tests.core.fakes import FOREVER, FakeSandbox, Sink, start

POLICY = EscalationPolicy()


@pytest.fixture
def anyio_backend():
    return ("trio", {"clock": trio.testing.MockClock(autojump_threshold=0)})


class Clock(Sink):
    """Notes the virtual time of each event."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def __call__(self, event) -> None:
        self.times.append(round(trio.current_time() - self.zero, 3))
        super().__call__(event)

    def begin(self) -> None:
        self.zero = trio.current_time()

    def times_of(self, kind: str) -> list[float]:
        return [at for at, k in zip(self.times, self.kinds, strict=True) if k == kind]


@pytest.fixture
def clock(anyio_backend) -> Clock:
    return Clock()


async def test_failed_sweeps_are_repeated_with_a_doubling_pause_until_the_deadline(clock) -> None:
    clock.begin()
    world = FakeSandbox(always="raise")
    fence = TurnFence(on_event=clock)
    await start(fence, fence.bind_sandbox(world), world, lives=FOREVER)
    with pytest.raises(QuiescenceTimeout) as caught:
        await fence.wait_for_quiescence()
    times = clock.times_of("sweep_started")
    pauses = [round(b - a, 3) for a, b in itertools.pairwise(times)]
    assert pauses[:6] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert set(pauses[6:]) == {2.0}
    assert times[-1] <= 30.0
    assert clock.times_of("deadline_missed") == [30.0]
    assert len(caught.value.partial.sandboxes[0].errors) == len(times)
    assert caught.value.partial.sandboxes[0].control_runs == len(times)
    # Once more, with a pause that starts from the first again.
    clock.begin()
    clock.times.clear()
    clock.events.clear()
    with pytest.raises(QuiescenceTimeout):
        await fence.wait_for_quiescence(1.0)
    assert clock.times_of("sweep_started") == [0.0, 0.1, 0.3, 0.7]
    world.always = None
    world.processes.clear()
    await fence.wait_for_quiescence()


async def test_a_hanging_control_run_is_given_up_after_its_own_bound(clock) -> None:
    clock.begin()
    world = FakeSandbox(faults=["hang"])
    fence = TurnFence(on_event=clock)
    await start(fence, fence.bind_sandbox(world), world)
    receipt = await fence.wait_for_quiescence()
    bound = POLICY.sweep + POLICY.control_overhead
    assert world.turn_sweeps[0].timeout == bound
    assert clock.times_of("sweep_failed") == [bound]
    assert clock.times_of("quiesced") == [bound + POLICY.retry_first]
    assert receipt.sandboxes[0].errors == (f"no answer in {bound:g} s",)


async def test_calls_in_flight_are_cancelled_after_the_grace_and_not_before(clock) -> None:
    clock.begin()
    ended = []

    async def tool() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(trio.current_time() - clock.zero)

    async def call() -> None:
        with pytest.raises(TurnCancelled):
            await fence.run_operation("tool", "function", tool)

    fence = TurnFence(on_event=clock)
    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        await fence.wait_for_quiescence()
    assert ended == [POLICY.call_grace]


async def test_a_call_that_ends_in_its_grace_costs_no_more_than_it_takes(clock) -> None:
    clock.begin()

    async def tool() -> str:
        await anyio.sleep(0.3)
        return "done"

    results = []

    async def call() -> None:
        results.append(await fence.run_operation("tool", "function", tool))

    fence = TurnFence(on_event=clock)
    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        await fence.wait_for_quiescence()
        assert trio.current_time() - clock.zero == pytest.approx(0.3)
    assert results == ["done"]


async def test_the_sweep_does_not_wait_for_calls_in_flight(clock) -> None:
    clock.begin()
    world = FakeSandbox()
    fence = TurnFence(on_event=clock)
    box = fence.bind_sandbox(world)
    await start(fence, box, world)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: fence.run_operation("slow", "file", lambda: anyio.sleep(5)))
        await anyio.wait_all_tasks_blocked()
        await fence.wait_for_quiescence()
    assert clock.times_of("sweep_reported") == [0.0]
    assert clock.times_of("quiesced") == [5.0]


async def test_a_stuck_start_is_given_up_two_graces_after_the_proof(clock) -> None:
    clock.begin()
    world, entered, gate = FakeSandbox(), anyio.Event(), anyio.Event()
    fence = TurnFence(on_event=clock)
    box = fence.bind_sandbox(world)
    released = []

    async def stubborn(argv):
        entered.set()
        with anyio.CancelScope(shield=True):
            await gate.wait()

    async def call() -> None:
        with pytest.raises(TurnCancelled):
            await fence.start_command(box, ["true"], stubborn, lambda r: r)
        released.append(trio.current_time() - clock.zero)

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await entered.wait()
        receipt = await fence.wait_for_quiescence()
    assert receipt.unsettled_starts == (1,)
    assert released == [2 * POLICY.call_grace]
    assert clock.times_of("quiesced") == [2 * POLICY.call_grace]
    gate.set()
    await anyio.wait_all_tasks_blocked()


async def test_a_waiter_s_own_timeout_leaves_the_drain_running(clock) -> None:
    clock.begin()
    world = FakeSandbox(faults=["raise"] * 5)
    fence = TurnFence(on_event=clock)
    await start(fence, fence.bind_sandbox(world), world)
    with pytest.raises(QuiescenceTimeout):
        await fence.wait_for_quiescence(0)
    assert trio.current_time() == clock.zero
    with pytest.raises(QuiescenceTimeout):
        await fence.wait_for_quiescence(0.5)
    assert trio.current_time() - clock.zero == 0.5
    await fence.wait_for_quiescence()
    assert clock.times_of("quiesced") == [3.1]


async def test_a_longer_timeout_extends_the_deadline(clock) -> None:
    clock.begin()
    world = FakeSandbox(always="raise")
    fence = TurnFence(on_event=clock)
    await start(fence, fence.bind_sandbox(world), world)
    async with anyio.create_task_group() as group:

        async def heal() -> None:
            await anyio.sleep(100)
            world.always = None

        group.start_soon(heal)
        receipt = await fence.wait_for_quiescence(300)
    assert receipt.proven
    assert 100 <= clock.times_of("quiesced")[0] <= 102


async def test_leaving_the_block_is_bounded_by_the_deadline(clock) -> None:
    clock.begin()
    world = FakeSandbox(always="hang")
    with trio.CancelScope() as scope:
        async with TurnFence(on_event=clock) as fence:
            await start(fence, fence.bind_sandbox(world), world)
            scope.cancel()
            await anyio.sleep_forever()
    assert trio.current_time() - clock.zero == pytest.approx(POLICY.deadline, abs=0.01)
    world.always = None
    await fence.wait_for_quiescence()


async def test_a_turn_that_ends_by_itself_has_its_own_policy(clock) -> None:
    patient = EscalationPolicy(int_grace=1, term_grace=10, sweep=20, deadline=60)
    world = FakeSandbox()
    async with TurnFence(end_policy=patient) as fence:
        await start(fence, fence.bind_sandbox(world), world)
    assert world.turn_sweeps[0].timeout == patient.sweep + patient.control_overhead
    world = FakeSandbox()
    async with TurnFence(end_policy=patient) as fence:
        await start(fence, fence.bind_sandbox(world), world)
        fence.cancel("stop")
    assert world.turn_sweeps[0].timeout == POLICY.sweep + POLICY.control_overhead


async def test_a_failing_prepare_run_is_given_up_in_the_control_overhead(clock) -> None:
    clock.begin()
    world = FakeSandbox(prepare_faults=["raise"] * 100)
    async with TurnFence(on_event=clock) as fence:
        with pytest.raises(SandboxNotReady):
            await start(fence, fence.bind_sandbox(world), world)
        assert trio.current_time() - clock.zero <= POLICY.control_overhead
    world = FakeSandbox(prepare_faults=["hang"])
    async with TurnFence(on_event=clock) as fence:
        clock.begin()
        with pytest.raises(SandboxNotReady, match="no answer in 5 s"):
            await start(fence, fence.bind_sandbox(world), world)
        assert trio.current_time() - clock.zero == POLICY.control_overhead


async def test_hooks_and_probes_back_off_too(clock) -> None:
    clock.begin()
    tries = []

    async def hook() -> None:
        tries.append(round(trio.current_time() - clock.zero, 3))
        if len(tries) < 5:
            raise OSError

    probes = []

    async def probe(session: int) -> int | None:
        probes.append(round(trio.current_time() - clock.zero, 3))
        return None if len(probes) < 4 else 0

    from fence.turn import CommandOutcome

    async def running() -> CommandOutcome:
        return CommandOutcome(5, None)

    fence = TurnFence(on_event=clock)
    box = fence.bind_sandbox(FakeSandbox(), probe=probe)
    await fence.write_stdin(box, 5, running, lambda r: r)
    fence.on_quiesce(hook)
    await fence.wait_for_quiescence()
    assert tries == [0.0, 0.1, 0.3, 0.7, 1.5]
    assert probes == [0.0, 0.1, 0.3, 0.7]


async def test_a_stop_of_a_lost_command_that_cannot_be_made_is_told_to_a_person(
    clock, caplog
) -> None:
    clock.begin()
    world, entered = FakeSandbox(always="raise"), anyio.Event()
    async with TurnFence(on_event=clock) as fence:
        box = fence.bind_sandbox(world)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: start(fence, box, world, after=anyio.Event(), entered=entered))
            await entered.wait()
            group.cancel_scope.cancel()
        await anyio.sleep(60)
        assert "command 1 of a cancelled call could not be stopped" in caplog.text
        before = len(world.runs)
        await anyio.sleep(600)
        assert len(world.runs) == before
        world.always = None
    assert world.alive() == []


async def test_nothing_wakes_up_while_nothing_is_cancelled() -> None:
    world, ticks = FakeSandbox(), []

    class Watch(trio.abc.Instrument):
        def before_task_step(self, task) -> None:
            if task.name.startswith("fence"):
                ticks.append(task.name)

    async with TurnFence(cancel_on=anyio.Event()) as fence:
        box = fence.bind_sandbox(world)
        await start(fence, box, world, tty=True)
        await trio.testing.wait_all_tasks_blocked()
        watch = Watch()
        trio.lowlevel.add_instrument(watch)
        try:
            await anyio.sleep(3600)
        finally:
            trio.lowlevel.remove_instrument(watch)
        assert ticks == []
        assert len(world.runs) == 1
