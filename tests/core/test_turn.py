"""The surface of TurnFence: inputs, states, and what is refused before any side effect."""

from __future__ import annotations

import asyncio
import gc
import math
import re
import sys
import warnings

import anyio
import pytest

import fence as library
from fence import (
    EscalationPolicy,
    FenceError,
    QuiescenceReceipt,
    TurnCancelled,
    TurnFence,
    quiesce_turn,
)
from fence.errors import ExtraMissing, FenceUsageError
from tests.core.fakes import QUICK, FakeSandbox, Sink, start

NAN = math.nan


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"turn_id": 7}, "turn_id"),
        ({"turn_id": ""}, "turn_id"),
        ({"turn_id": b"job"}, "turn_id"),
        ({"policy": 30.0}, "policy"),
        ({"policy": {"deadline": 3}}, "policy"),
        ({"end_policy": "gentle"}, "end_policy"),
        ({"require": "linage"}, "require"),
        ({"require": 1}, "require"),
        ({"require": ["lineage"]}, "require"),
        ({"accept_sampled": 1}, "accept_sampled"),
        ({"brand": "no"}, "brand"),
        ({"brand": None}, "brand"),
        ({"on_event": "print"}, "on_event"),
        ({"cancel_on": 3}, "cancel_on"),
        ({"cancel_on": lambda: None}, "cancel_on"),
    ],
)
def test_a_bad_value_is_named_at_once(arguments, field) -> None:
    with pytest.raises(FenceUsageError) as caught:
        TurnFence(**arguments)
    assert caught.value.field == field


def test_arguments_are_named() -> None:
    with pytest.raises(TypeError):
        TurnFence("job")  # type: ignore[misc]


@pytest.mark.parametrize("timeout", [-1, -0.001, NAN, math.inf, True, "3", b"", [1]])
async def test_a_bad_timeout_cancels_nothing(timeout) -> None:
    fence = TurnFence()
    with pytest.raises(FenceUsageError):
        await fence.wait_for_quiescence(timeout)
    assert not fence.cancelled
    world = FakeSandbox()
    with pytest.raises(FenceUsageError):
        await quiesce_turn(world, "job", timeout=timeout)
    assert world.runs == []


@pytest.mark.parametrize("turn_id", [None, "", 3])
async def test_another_process_needs_a_turn_s_id(turn_id) -> None:
    world = FakeSandbox()
    with pytest.raises(FenceUsageError):
        await quiesce_turn(world, turn_id)
    assert world.runs == []


async def test_a_bad_call_is_refused_before_any_side_effect() -> None:
    world = FakeSandbox()
    async with TurnFence(policy=QUICK) as fence:
        box = fence.bind_sandbox(world)
        for argv in ([], "ls -l", ["ls", 3], [b"ls"]):
            with pytest.raises(FenceUsageError):
                await fence.start_command(box, argv, None, None)  # type: ignore[arg-type]
        for kind in ("start", "stdin", "magic"):
            with pytest.raises(FenceUsageError):
                await fence.run_operation("x", kind, None)  # type: ignore[arg-type]
        for control in (None, object(), FakeSandbox):
            with pytest.raises(FenceUsageError):
                fence.bind_sandbox(control)  # type: ignore[arg-type]
        with pytest.raises(FenceUsageError):
            fence.on_quiesce("callback")  # type: ignore[arg-type]
        with pytest.raises(FenceUsageError):
            fence.cancel(7)  # type: ignore[arg-type]
        assert not fence.cancelled
    assert world.runs == []
    assert fence.receipt is not None
    assert fence.receipt.operations.admitted == 0


async def test_everything_is_refused_after_the_cancel() -> None:
    world, sink = FakeSandbox(), Sink()
    fence = TurnFence(turn_id="job", policy=QUICK, on_event=sink)
    box = fence.bind_sandbox(world)
    fence.cancel("enough")
    touched = []

    async def call() -> None:
        touched.append(1)

    refused = [
        lambda: fence.run_operation("x", "function", call),
        lambda: fence.write_stdin(box, 3, call, lambda r: r),
        lambda: start(fence, box, world),
        lambda: fence.run_sandbox_command(None, "ls"),
    ]
    for attempt in refused:
        with pytest.raises(TurnCancelled, match="turn job is cancelled: enough"):
            await attempt()
    for wrap in (fence.wrap_tools, fence.wrap_capabilities):
        with pytest.raises(TurnCancelled):
            wrap([])
    for wrap in (fence.wrap_capability, fence.wrap_mcp_server, fence.wrap_session):
        with pytest.raises(TurnCancelled):
            wrap(object())
    with pytest.raises(TurnCancelled):
        fence.bind_sandbox(world)
    with pytest.raises(TurnCancelled):
        fence.on_quiesce(call)
    assert touched == []
    assert world.runs == []
    receipt = await fence.wait_for_quiescence()
    assert receipt.operations.rejected == 3
    assert len(sink.of("operation_refused")) == 3


def test_a_turn_id_stands_for_the_same_key_everywhere() -> None:
    assert TurnFence(turn_id="job-1").turn == TurnFence(turn_id="job-1").turn
    assert TurnFence(turn_id="job-1").turn != TurnFence(turn_id="job-10").turn
    assert TurnFence().turn != TurnFence().turn
    fence = TurnFence()
    assert fence.turn_id == fence.turn
    assert re.fullmatch("[0-9a-f]{32}", fence.turn)
    assert TurnFence(turn_id=fence.turn).turn == fence.turn


async def test_repr_is_a_state_report() -> None:
    turn = "1f2e3d4c" + "0" * 24
    world = FakeSandbox()
    fence = TurnFence(turn_id=turn, policy=QUICK)
    box = fence.bind_sandbox(world)
    assert repr(fence) == "<TurnFence turn=1f2e3d4c open>"
    entered, gate = anyio.Event(), anyio.Event()
    async with anyio.create_task_group() as group:
        await start(fence, box, world)
        await start(fence, box, world)
        await start(fence, box, world, exit_code=0)
        group.start_soon(lambda: start(fence, box, world, after=gate, entered=entered))
        group.start_soon(lambda: fence.run_operation("x", "file", gate.wait))
        await entered.wait()
        await anyio.wait_all_tasks_blocked()
        assert repr(fence) == "<TurnFence turn=1f2e3d4c open, 2 running, 1 starting, 1 in flight>"
        gate.set()
    world.always = "hang"
    with pytest.raises(library.QuiescenceTimeout):
        await fence.wait_for_quiescence(0.02)
    assert repr(fence) == "<TurnFence turn=1f2e3d4c closing, 3 stopping, 1 unproven>"
    world.always = None
    for control_run in fence._drain._owned:
        if control_run.name.endswith("control run"):
            control_run.cancel()  # the channel notices by itself
    await fence.wait_for_quiescence()
    assert repr(fence) == "<TurnFence turn=1f2e3d4c quiet>"


def test_a_fence_dropped_while_open_is_reported() -> None:
    async def main() -> None:
        world = FakeSandbox()
        fence = TurnFence(policy=QUICK)
        await start(fence, fence.bind_sandbox(world), world)

    def drop() -> None:
        anyio.run(main)
        gc.collect()

    with pytest.warns(ResourceWarning, match="dropped before its turn was proven quiet"):
        drop()


def test_a_fence_that_is_unused_or_closed_is_dropped_in_silence() -> None:
    async def main() -> None:
        TurnFence()
        world = FakeSandbox()
        async with TurnFence(policy=QUICK, cancel_on=anyio.Event()) as fence:
            await start(fence, fence.bind_sandbox(world), world)
        with pytest.raises(FenceUsageError):
            TurnFence(turn_id=3)  # type: ignore[arg-type]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        anyio.run(main)
        gc.collect()


async def test_a_turn_that_did_nothing_has_a_receipt() -> None:
    async with TurnFence() as fence:
        pass
    receipt = fence.receipt
    assert receipt is not None
    assert receipt.proven
    assert receipt.reason == "turn ended"
    assert receipt.containment is None
    assert receipt.operations.admitted == 0
    assert receipt.elapsed_ms >= 0


async def test_the_first_reason_wins() -> None:
    fence = TurnFence()
    assert fence.reason is None
    assert fence.cancel("one")
    assert not fence.cancel("two")
    assert fence.reason == "one"
    assert (await fence.wait_for_quiescence()).reason == "one"


async def test_a_receipt_survives_json() -> None:
    world = FakeSandbox(faults=["raise"])
    fence = TurnFence(policy=QUICK)
    box = fence.bind_sandbox(world)
    await start(fence, box, world, tty=True, call_id="call_é")
    await start(fence, box, world, exit_code=3)
    fence.on_quiesce(anyio.wait_all_tasks_blocked, name="hook")
    receipt = await fence.wait_for_quiescence()
    again = QuiescenceReceipt.from_json(receipt.to_json())
    assert again == receipt
    assert QuiescenceReceipt.from_json(receipt.to_json(indent=2).encode()) == receipt


# cancel_on


class _Failing(Exception):
    pass


async def test_an_event_cancels_the_turn() -> None:
    world, event = FakeSandbox(), anyio.Event()
    async with TurnFence(policy=QUICK, cancel_on=event) as fence:
        await start(fence, fence.bind_sandbox(world), world)
        event.set()
        while world.alive():
            await anyio.sleep(0.001)
    assert fence.reason == "cancel_on was set"


async def test_an_event_works_without_the_block() -> None:
    world, event = FakeSandbox(), anyio.Event()
    fence = TurnFence(policy=QUICK, cancel_on=event)
    await start(fence, fence.bind_sandbox(world), world)
    event.set()
    while not fence.cancelled:
        await anyio.sleep(0.001)
    await fence.wait_for_quiescence()


async def test_an_awaitable_cancels_the_turn_by_returning_and_by_raising() -> None:
    async def returns() -> None:
        await anyio.wait_all_tasks_blocked()

    async def raises() -> None:
        await anyio.wait_all_tasks_blocked()
        raise _Failing("secret")

    for awaitable, reason in (
        (returns(), "cancel_on was set"),
        (raises(), "cancel_on raised _Failing"),
    ):
        async with TurnFence(cancel_on=awaitable) as fence:
            while not fence.cancelled:
                await anyio.sleep(0.001)
        assert fence.reason == reason


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_future_of_the_app_is_watched_and_not_cancelled() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    async with TurnFence(cancel_on=future):
        await asyncio.sleep(0)
    assert not future.done()
    async with TurnFence(cancel_on=future) as fence:
        future.cancel()
        while not fence.cancelled:
            await asyncio.sleep(0)
    assert fence.reason == "cancel_on raised CancelledError"

    async def cancelled() -> None:
        raise asyncio.CancelledError

    async with TurnFence(cancel_on=asyncio.Event()):
        await asyncio.sleep(0)
    async with TurnFence(cancel_on=cancelled()) as fence:
        while not fence.cancelled:
            await asyncio.sleep(0)
    assert fence.reason == "cancel_on raised CancelledError"


async def test_an_unset_event_leaves_nothing_behind() -> None:
    event = anyio.Event()
    async with TurnFence(cancel_on=event) as fence:
        pass
    assert fence._watcher is not None
    await fence._watcher.wait()
    assert fence._watcher.done


# The SDK is loaded late.


async def test_a_missing_sdk_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "agents"]:
        monkeypatch.delitem(sys.modules, name)
    for name in [n for n in sys.modules if n.startswith("fence.openai_agents")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "agents", None)
    fence = TurnFence()
    with pytest.raises(ExtraMissing, match=r"pip install .turnfence\[openai-agents\]"):
        fence.wrap_tools([])
    with pytest.raises(FenceError, match="openai-agents"):
        await quiesce_turn(object(), "job")
    with pytest.raises(FenceError, match="openai-agents"):
        await fence.run_sandbox_command(object(), "ls")


def test_the_core_loads_without_an_sdk() -> None:
    import subprocess

    code = (
        "import sys, fence; "
        "bad = {m.partition('.')[0] for m in sys.modules} & "
        "{'agents', 'openai', 'docker', 'modal', 'trio', 'fence_providers'}; "
        "assert not bad, bad; assert 'fence.openai_agents' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_policy_that_does_not_fit_is_refused() -> None:
    with pytest.raises(FenceUsageError):
        EscalationPolicy(deadline=-1)
    with pytest.raises(FenceUsageError):
        EscalationPolicy(int_grace=5, term_grace=5)
