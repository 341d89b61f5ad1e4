"""What the control channel may do, and what the drain makes of it."""

from __future__ import annotations

import logging

import anyio
import pytest

from fence import EscalationPolicy, QuiescenceTimeout, TurnCancelled, TurnFence, quiesce_turn
from fence.errors import ContainmentTooWeak, ControlError, SandboxGone, SandboxNotReady
from tests.core.fakes import FOREVER, QUICK, SHORT, FakeSandbox, Sink, start

FAULTS = [
    "raise",
    "oserror",
    "garbage",
    "half",
    "twice",
    "exit 76",
    "exit 75",
    "exit 1",
    "other turn",
    "late",
    "old protocol",
    "unknown",
    "lost",
    "nothing",
]


async def test_one_cancel_costs_one_control_run() -> None:
    world, sink = FakeSandbox(), Sink()
    async with TurnFence(policy=QUICK, on_event=sink) as fence:
        box = fence.bind_sandbox(world)
        for _ in range(20):
            await start(fence, box, world)
        assert len(world.runs) == 1  # the prepare run
        fence.cancel("stop")
        receipt = await fence.wait_for_quiescence()
    assert world.alive() == []
    assert len(world.runs) == 2
    assert world.turn_sweeps[0].no_int == ()
    assert receipt.proven
    assert receipt.reason == "stop"
    assert receipt.containment == "lineage"
    assert [c.outcome for c in receipt.commands] == ["stopped"] * 20
    assert [c.number for c in receipt.commands] == list(range(1, 21))
    assert {p.last_signal for p in receipt.sandboxes[0].stopped} == {"TERM"}
    assert receipt.sandboxes[0].control_runs == 1
    assert receipt.operations.admitted == receipt.operations.settled == 20
    assert sink.kinds[-1] == "quiesced"


async def test_without_the_fence_the_same_commands_live_on() -> None:
    world = FakeSandbox()
    fence = TurnFence(policy=QUICK)
    box = fence.bind_sandbox(world)
    await start(fence, box, world)
    assert world.alive() != []
    await fence.wait_for_quiescence()


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_never_opens_the_fence_and_is_retried(fault: str) -> None:
    world, sink = FakeSandbox(faults=[fault, fault]), Sink()
    fence = TurnFence(policy=QUICK, on_event=sink)
    await start(fence, fence.bind_sandbox(world), world)
    receipt = await fence.wait_for_quiescence()
    proof = receipt.sandboxes[0]
    assert proof.control_runs == 3
    assert len(proof.errors) == 2
    assert all(proof.errors)
    assert world.alive() == []
    # After the first sweep nobody is sent a second Ctrl-C: the reply may only have been lost.
    assert [run.no_int for run in world.turn_sweeps] == [(), (1,), (1,)]


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_that_stays_is_a_timeout_with_every_error(fault: str) -> None:
    world, sink = FakeSandbox(always=fault), Sink()
    fence = TurnFence(policy=QUICK, on_event=sink)
    await start(fence, fence.bind_sandbox(world), world, lives=FOREVER)
    with pytest.raises(QuiescenceTimeout) as caught:
        await fence.wait_for_quiescence(0.1)
    partial = caught.value.partial
    assert not partial.proven
    assert fence.receipt is None
    assert len(partial.sandboxes[0].errors) >= 2
    assert not partial.sandboxes[0].proven
    with pytest.raises(TurnCancelled):
        await start(fence, fence._drain.sandboxes["fake", "box"], world)
    # Healthy again: the same fence closes with a receipt.
    world.always = None
    for process in world.processes.values():
        process.lives = 0
    receipt = await fence.wait_for_quiescence()
    assert receipt.proven
    assert receipt.operations.rejected == 1


async def test_what_is_alive_is_named_and_counted_gone_only_by_a_later_sweep() -> None:
    world = FakeSandbox()
    fence = TurnFence(policy=QUICK)
    await start(fence, fence.bind_sandbox(world), world, lives=2)
    receipt = await fence.wait_for_quiescence()
    assert receipt.sandboxes[0].control_runs == 3
    assert "still alive: pid" in receipt.sandboxes[0].errors[0]
    assert [p.look for p in receipt.sandboxes[0].stopped] == ["gone"]


async def test_unknown_is_never_gone() -> None:
    world = FakeSandbox()
    fence = TurnFence(policy=QUICK)
    await start(fence, fence.bind_sandbox(world), world, lives=FOREVER, look="unknown")
    with pytest.raises(QuiescenceTimeout, match=r"could not tell|unknown"):
        await fence.wait_for_quiescence(0.05)
    world.processes.clear()
    await fence.wait_for_quiescence()


async def test_a_sampled_snapshot_is_a_proof_only_where_it_is_accepted() -> None:
    world = FakeSandbox(snapshot="sampled")
    fence = TurnFence(policy=QUICK)
    await start(fence, fence.bind_sandbox(world), world)
    assert (await fence.wait_for_quiescence()).sandboxes[0].snapshot == "sampled"
    strict = TurnFence(policy=QUICK, accept_sampled=False)
    await start(strict, strict.bind_sandbox(world), world)
    with pytest.raises(QuiescenceTimeout, match="only sampled"):
        await strict.wait_for_quiescence(0.05)
    world.snapshot = "consistent"
    assert (await strict.wait_for_quiescence()).proven


async def test_a_sandbox_that_is_gone_is_a_proof_of_its_own() -> None:
    world = FakeSandbox(faults=["gone"])
    fence = TurnFence(policy=QUICK)
    await start(fence, fence.bind_sandbox(world), world)
    receipt = await fence.wait_for_quiescence()
    assert receipt.containment == "gone"
    assert receipt.sandboxes[0].evidence == "its container is absent"


async def test_a_channel_that_swallows_its_cancellation_does_not_hold_the_drain() -> None:
    world = FakeSandbox(faults=["deaf"])
    fence = TurnFence(policy=QUICK)
    await start(fence, fence.bind_sandbox(world), world)
    with pytest.raises(QuiescenceTimeout):
        await fence.wait_for_quiescence(0.05)
    world.release_deaf = True
    assert (await fence.wait_for_quiescence()).proven


async def test_a_sandbox_without_a_command_is_not_asked() -> None:
    world = FakeSandbox()
    async with TurnFence(policy=QUICK) as fence:
        fence.bind_sandbox(world)
    assert world.runs == []
    assert fence.receipt is not None
    assert fence.receipt.sandboxes == ()
    assert fence.receipt.containment is None


async def test_equal_controls_are_one_sandbox_and_others_are_not() -> None:
    one, two = FakeSandbox("one"), FakeSandbox("two", containment="group")
    async with TurnFence(policy=QUICK) as fence:
        box = fence.bind_sandbox(one)
        assert fence.bind_sandbox(FakeSandbox("one")) is box
        fence.bind_sandbox(one)
        await start(fence, box, one)
        await start(fence, fence.bind_sandbox(two), two)
    assert fence.receipt is not None
    assert fence.receipt.containment == "group"
    assert [len(world.turn_sweeps) for world in (one, two)] == [1, 1]
    assert [s.containment for s in fence.receipt.sandboxes] == ["lineage", "group"]


async def test_concurrent_starts_share_one_prepare_run() -> None:
    world = FakeSandbox()
    async with TurnFence(policy=QUICK) as fence:
        box = fence.bind_sandbox(world)
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(start, fence, box, world)
        assert [run.script for run in world.runs] == ["fence-prepare"]


async def test_a_prepare_run_is_retried_and_then_named() -> None:
    world = FakeSandbox(prepare_faults=["raise", "garbage", "other turn"])
    async with TurnFence(policy=QUICK) as fence:
        box = fence.bind_sandbox(world)
        await start(fence, box, world)
        assert len(world.runs) == 4
    hopeless = FakeSandbox("two", prepare_faults=["raise"] * 10_000)
    policy = EscalationPolicy(control_overhead=0.05, retry_first=0.01, retry_max=0.01)
    async with TurnFence(policy=policy) as fence:
        box = fence.bind_sandbox(hopeless)
        with pytest.raises(SandboxNotReady, match="transport failed"):
            await start(fence, box, hopeless)
        hopeless.prepare_faults.clear()
        await start(fence, box, hopeless)
    assert hopeless.alive() == []


async def test_a_gone_sandbox_is_told_to_the_first_command() -> None:
    world = FakeSandbox(prepare_faults=["gone"])
    async with TurnFence(policy=QUICK) as fence:
        with pytest.raises(SandboxGone):
            await start(fence, fence.bind_sandbox(world), world)
    assert world.turn_sweeps == []


@pytest.mark.parametrize(
    ("offers", "brand", "require", "fits"),
    [
        ("lineage", True, "lineage", True),
        ("lineage", True, "group", True),
        ("lineage", False, "lineage", False),
        ("lineage-unbranded", True, "lineage", False),
        ("own-uid", True, "lineage-unbranded", False),
        ("group", True, "own-uid", False),
        ("group", True, None, True),
    ],
)
async def test_require_is_held_before_the_first_command(offers, brand, require, fits) -> None:
    world = FakeSandbox(containment=offers)
    async with TurnFence(policy=QUICK, require=require, brand=brand) as fence:
        box = fence.bind_sandbox(world)
        if fits:
            await start(fence, box, world)
        else:
            with pytest.raises(ContainmentTooWeak):
                await start(fence, box, world)
            assert world.alive() == []
    if not fits:
        assert world.turn_sweeps == []


async def test_a_fence_without_a_brand_says_so_in_its_receipt() -> None:
    world = FakeSandbox()
    async with TurnFence(policy=QUICK, brand=False) as fence:
        await start(fence, fence.bind_sandbox(world), world)
    assert fence.receipt is not None
    assert fence.receipt.containment == "lineage-unbranded"


async def test_a_start_stuck_before_the_spawn_is_listed_and_refused_later() -> None:
    world, never, entered = FakeSandbox(), anyio.Event(), anyio.Event()
    fence = TurnFence(policy=QUICK)
    box = fence.bind_sandbox(world)
    await start(fence, box, world, exit_code=0)

    async def stubborn(argv: list[str]):
        entered.set()
        while not never.is_set():  # a transport that does not react to cancellation
            try:
                with anyio.CancelScope(shield=True):
                    await never.wait()
            except BaseException:
                if never.is_set():
                    raise
        return world.spawn(argv)

    async def call() -> None:
        with pytest.raises(TurnCancelled):
            await fence.start_command(box, ["true"], stubborn, lambda r: r)

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await entered.wait()
        receipt = await fence.wait_for_quiescence()
    assert receipt.proven
    assert receipt.unsettled_starts == (2,)
    assert receipt.commands[1].outcome == "stopped"
    never.set()
    await anyio.wait_all_tasks_blocked()
    assert world.refused == [2]
    assert world.alive() == []


async def test_a_start_stuck_after_the_spawn_is_ended_by_the_sweep() -> None:
    world, never, entered = FakeSandbox(), anyio.Event(), anyio.Event()
    fence = TurnFence(policy=QUICK)
    box = fence.bind_sandbox(world)

    async def call() -> None:
        with pytest.raises(TurnCancelled):
            await start(fence, box, world, after=never, entered=entered)

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await entered.wait()
        receipt = await fence.wait_for_quiescence()
    assert receipt.proven
    assert world.alive() == []
    assert receipt.operations.settled == 1


async def test_a_start_that_waits_for_its_sandbox_has_no_side_effect_after_the_cancel() -> None:
    world, sink = FakeSandbox(prepare_faults=["hang"]), Sink()
    fence = TurnFence(policy=QUICK, on_event=sink)
    box = fence.bind_sandbox(world)

    async def call() -> None:
        with pytest.raises(TurnCancelled):
            await start(fence, box, world)

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        assert "1 in flight" not in repr(fence)
        receipt = await fence.wait_for_quiescence()
    assert world.turn_sweeps == []
    assert world.processes == {}
    assert receipt.commands == ()
    assert receipt.sandboxes == ()


async def test_a_start_that_raises_leaves_its_sandbox_to_be_swept() -> None:
    world = FakeSandbox()

    async def fail(argv: list[str]):
        world.spawn(argv)
        raise OSError("the answer was lost")

    async with TurnFence(policy=QUICK) as fence:
        with pytest.raises(OSError, match="the answer was lost"):
            await fence.start_command(fence.bind_sandbox(world), ["true"], fail, lambda r: r)
        assert "1 unknown" in repr(fence)
    assert world.alive() == []


async def test_ctrl_c_goes_to_terminals_first_and_their_commands_get_no_second_int() -> None:
    world, sink, order = FakeSandbox(), Sink(), []
    hang = anyio.Event()

    async def interrupt(session: int) -> None:
        order.append(session)
        await hang.wait()  # started, not waited for

    fence = TurnFence(policy=QUICK, on_event=sink)
    box = fence.bind_sandbox(world, interrupt=interrupt)
    session = await start(fence, box, world, tty=True)
    await start(fence, box, world, tty=False)
    await start(fence, box, world, tty=True, exit_code=0)
    await fence.wait_for_quiescence()
    assert order == [session.session_id]
    assert world.turn_sweeps[0].no_int == (1,)
    assert sink.kinds.index("pty_interrupted") < sink.kinds.index("sweep_started")


async def test_without_a_session_nobody_is_spared_the_sweep_s_int() -> None:
    """Ctrl-C cannot be written any more, so the sweep has to send it."""

    async def interrupt(session: int) -> None:
        raise AssertionError("its session is closed")

    world = FakeSandbox()
    async with TurnFence(policy=QUICK) as fence:
        box = fence.bind_sandbox(world, interrupt=interrupt)
        await start(fence, box, world, tty=True)
        await fence.session_closed(box)
    assert world.turn_sweeps[0].no_int == ()


async def test_an_interrupt_that_fails_changes_nothing() -> None:
    async def interrupt(session: int) -> None:
        raise OSError("no such session")

    world = FakeSandbox()
    async with TurnFence(policy=QUICK) as fence:
        await start(fence, fence.bind_sandbox(world, interrupt=interrupt), world, tty=True)
    assert fence.receipt is not None


async def test_an_adopted_session_is_interrupted_once_and_asked_until_it_ended() -> None:
    world, interrupted, answers = FakeSandbox(), [], [None, OSError("busy"), None, 7]

    async def interrupt(session: int) -> None:
        interrupted.append(session)

    async def probe(session: int) -> int | None:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async with TurnFence(policy=QUICK) as fence:
        box = fence.bind_sandbox(world, interrupt=interrupt, probe=probe)
        await fence.write_stdin(box, 41, _running, lambda r: r)
    assert interrupted == [41]
    assert answers == []
    assert fence.receipt is not None
    assert fence.receipt.adopted == (41,)
    assert world.turn_sweeps == []


async def test_an_adopted_session_without_word_is_named() -> None:
    world = FakeSandbox()
    fence = TurnFence(policy=QUICK)
    box = fence.bind_sandbox(world)
    await fence.write_stdin(box, 41, _running, lambda r: r)
    with pytest.raises(QuiescenceTimeout, match="adopted session 41 has not ended"):
        await fence.wait_for_quiescence(0.05)

    async def probe(session: int) -> int | None:
        return 0

    fence._drain.sandboxes["fake", "box"].probe = probe
    assert (await fence.wait_for_quiescence()).adopted == (41,)


async def test_the_provider_s_word_of_an_exit_is_kept() -> None:
    from fence.turn import CommandOutcome

    world, sink = FakeSandbox(), Sink()

    async def ended() -> CommandOutcome:
        return CommandOutcome(None, 5)

    async with TurnFence(policy=QUICK, on_event=sink) as fence:
        box = fence.bind_sandbox(world)
        session = await start(fence, box, world)
        assert session.session_id is not None
        for _ in range(2):
            await fence.write_stdin(box, session.session_id, ended, lambda r: r)
        await fence.write_stdin(box, 99, ended, lambda r: r)
    assert fence.receipt is not None
    assert fence.receipt.commands[0].outcome == "exited"
    assert fence.receipt.commands[0].exit_code == 5
    assert fence.receipt.adopted == (99,)
    # What the command left behind still fell to the sweep.
    assert world.alive() == []
    assert len(sink.of("command_exited")) == 2


async def test_a_hook_is_awaited_retried_and_named() -> None:
    calls = []

    async def close_browser() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise OSError("not yet")

    async with TurnFence(policy=QUICK) as fence:
        fence.on_quiesce(close_browser, name="browser")
    assert len(calls) == 3
    assert fence.receipt is not None
    assert [(h.name, h.finished, h.error) for h in fence.receipt.hooks] == [("browser", True, None)]


@pytest.mark.parametrize("fault", ["fails", "hangs"])
async def test_a_hook_that_does_not_finish_is_a_timeout_that_names_it(fault: str) -> None:
    healthy = anyio.Event()

    async def hook() -> None:
        if healthy.is_set():
            return
        if fault == "fails":
            raise OSError("no")
        await anyio.sleep_forever()

    fence = TurnFence(policy=SHORT)
    fence.on_quiesce(hook, name="remote")
    with pytest.raises(QuiescenceTimeout, match="hook remote"):
        await fence.wait_for_quiescence()
    healthy.set()
    assert (await fence.wait_for_quiescence()).hooks[0].finished


async def test_running_looks_and_touches_nothing() -> None:
    world = FakeSandbox()
    async with TurnFence(policy=QUICK) as fence:
        box = fence.bind_sandbox(world)
        assert await fence.running() == ()
        await start(fence, box, world)
        assert [p.command for p in await fence.running()] == [1]
        assert world.sweeps == []
        assert world.tombstones == set()
        world.always = "raise"
        with pytest.raises(ControlError):
            await fence.running()
        world.always = "gone"
        assert await fence.running() == ()
        world.always = None
    assert fence.receipt is not None


async def test_another_process_stops_a_turn_by_its_id() -> None:
    world = FakeSandbox()
    dead = TurnFence(turn_id="job-7", policy=QUICK)
    await start(dead, dead.bind_sandbox(world), world)
    other = TurnFence(turn_id="job-70", policy=QUICK)
    await start(other, other.bind_sandbox(world), world)
    receipt = await quiesce_turn(world, "job-7", policy=QUICK)
    assert receipt.origin == "other-process"
    assert receipt.turn_id == "job-7"
    assert receipt.proven
    assert [(c.number, c.outcome) for c in receipt.commands] == [(1, "stopped")]
    assert world.alive(dead.turn) == []
    assert world.alive(other.turn) != []
    assert (await quiesce_turn(world, dead.turn, policy=QUICK)).proven
    for fence in (dead, other):
        await fence.wait_for_quiescence()


async def test_another_process_is_told_when_it_cannot_be_proven() -> None:
    world = FakeSandbox(always="raise")
    with pytest.raises(QuiescenceTimeout):
        await quiesce_turn(world, "job-8", policy=QUICK, timeout=0.05)


async def test_a_broken_sink_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    world, sink = FakeSandbox(), Sink(broken=True)
    with caplog.at_level(logging.ERROR, "fence"):
        async with TurnFence(policy=QUICK, on_event=sink) as fence:
            await start(fence, fence.bind_sandbox(world), world)
    assert fence.receipt is not None
    assert "on_event raised for quiesced" in caplog.text


async def test_a_good_turn_logs_nothing_above_debug(caplog: pytest.LogCaptureFixture) -> None:
    world = FakeSandbox(faults=["raise"])
    with caplog.at_level(logging.DEBUG, "fence"):
        async with TurnFence(policy=QUICK) as fence:
            await start(fence, fence.bind_sandbox(world), world)
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


async def test_the_events_tell_the_whole_story() -> None:
    world, sink = FakeSandbox(faults=["raise"]), Sink()
    async with TurnFence(policy=QUICK, on_event=sink) as fence:
        await start(fence, fence.bind_sandbox(world), world, call_id="call_1")
        fence.cancel("user pressed stop")
    assert sink.kinds == [
        "operation_admitted",
        "sandbox_prepared",
        "command_starting",
        "command_running",
        "operation_settled",
        "cancelled",
        "sweep_started",
        "sweep_failed",
        "sweep_started",
        "process_stopped",
        "sweep_reported",
        "quiesced",
    ]
    stopped = sink.of("process_stopped")[0]
    assert stopped.command == 1
    assert stopped.data["signals"] == "INT@0 TERM@5"
    assert stopped.data["gone_at"] == 9
    report = sink.of("sweep_reported")[0]
    assert (report.data["verdict"], report.data["containment"]) == ("clear", "lineage")
    assert (report.data["elapsed_ms"], report.data["scans"]) == (12, 2)
    assert sink.of("command_starting")[0].call_id == "call_1"
    assert sink.of("cancelled")[0].data["reason"] == "user pressed stop"
    assert {event.turn for event in sink.events} == {fence.turn}


async def _running():
    from fence.turn import CommandOutcome

    return CommandOutcome(41, None)
