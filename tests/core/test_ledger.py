"""The ledger under a state machine, against an independent model, and the machine against bugs.

The model knows what G1 to G5 of the design promise and nothing of how the ledger keeps its books:
what was admitted, what settled, in which sandbox a start began, and what a look there would find.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fence import ledger as books
from fence.errors import FenceInternalError
from fence.ledger import (
    COMMAND_TABLE,
    FINAL,
    OPERATION_TABLE,
    SANDBOX_TABLE,
    STEP_TABLE,
    CommandState,
    Ledger,
    OperationState,
    SandboxState,
    Work,
)
from fence.lineage.report import ProcessReport, SweepReport

KEYS = [("fake", "a"), ("fake", "b")]
CANCELLABLE = ["function", "custom", "computer", "shell", "patch", "mcp"]
TURN = "0" * 32


def report(verdict: str = "clear", snapshot: str = "consistent", processes=(), **more):
    return SweepReport(
        turn=TURN,
        run="r",
        verdict=verdict,
        containment=more.pop("containment", "lineage"),
        snapshot=snapshot,
        scans=2,
        unseen=0,
        elapsed_ms=1,
        processes=tuple(processes),
        **more,
    )


def process(pid: int, look: str = "alive", command: int | None = 1) -> ProcessReport:
    return ProcessReport(
        pid, 7, 1, pid, pid, 0, command, "environ", look, "S", "fake", signals=(("TERM", 1),)
    )


class LedgerMachine(RuleBasedStateMachine):
    """Drives a ledger as the drain does, in every order that the outside world can produce."""

    ledger_class: type[Ledger] = Ledger

    @initialize(
        accept_sampled=st.booleans(),
        running=st.integers(0, 2),
        yielded=st.booleans(),
        waiting=st.booleans(),
        stdin=st.booleans(),
    )
    def begin(
        self, accept_sampled: bool, running: int, yielded: bool, waiting: bool, stdin: bool
    ) -> None:
        self.ledger = self.ledger_class(accept_sampled=accept_sampled)
        self.accept_sampled = accept_sampled
        self.time = 1.0
        self.cancelled = False
        self.was_quiet = False
        self.kinds: dict[int, str] = {}
        self.box_of: dict[int, tuple[str, str]] = {}
        self.pending: set[int] = set()  # admitted, not settled
        self.begun: dict[int, int] = {}  # start op -> command number
        self.answered: set[int] = set()
        self.lost: set[int] = set()
        self.asked_to_stop: set[int] = set()  # ops with a CancelTask
        self.released: set[int] = set()
        self.used: set[tuple[str, str]] = set()
        self.proved: set[tuple[str, str]] = set()
        self.sweeping: set[tuple[str, str]] = set()
        self.hooks_open: set[int] = set()
        self.adopted: set[tuple[tuple[str, str], int]] = set()
        self.adopted_open: set[tuple[tuple[str, str], int]] = set()
        self.rejected = 0
        self.final: dict[object, object] = {}
        for key in KEYS:
            self.feed(books.SandboxBound(self.tick(), key, interruptible=True))
        # A turn is most often cancelled with something going on.
        for n in range(running):
            self.call("start", KEYS[n], 1)
            self.begin_start(n + 1, tty=True)
            if yielded:
                self.start_returned(n + 1, session=1)
        if waiting:
            self.call("start", KEYS[1], 1)
        if stdin:
            self.call("stdin", KEYS[1], 3)

    def tick(self) -> float:
        self.time += 1
        return self.time

    def feed(self, event: books.Event) -> tuple[Work, ...]:
        work = self.ledger.apply(event)
        for item in work:
            match item:
                case books.BeginStart():
                    assert not self.cancelled, "G3: a start began after the cancel"
                case books.BeginCall():
                    assert not self.cancelled, "G4: a call was admitted after the cancel"
                case books.CancelTask():
                    assert self.kinds[item.op] not in ("file", "thread"), "never cancelled"
                    assert item.op in self.pending
                    self.asked_to_stop.add(item.op)
                case books.ReleaseCaller():
                    assert self.kinds[item.op] == "start"
                    assert self.box_of[item.op] in self.proved, "given up without a proof"
                    self.released.add(item.op)
                case books.SweepSandbox():
                    assert self.cancelled, "a sweep before the cancel"
                    assert item.key not in self.proved, "swept after the proof"
                    self.sweeping.add(item.key)
                case books.StopCommand():
                    assert not self.cancelled, "the turn's sweep covers it"
        return work

    # Calls.

    @rule(
        kind=st.sampled_from(["start", "start", "stdin", "file", "thread", *CANCELLABLE]),
        key=st.sampled_from(KEYS),
        session=st.integers(1, 3),
    )
    def call(self, kind: str, key, session: int) -> None:
        before = len(self.ledger.operations)
        known = self.ledger.command_of(key, session) is not None
        work = self.feed(
            books.CallArrived(
                self.tick(), kind, kind, None, key, session if kind == "stdin" else None
            )
        )
        if self.cancelled:
            assert work == (books.RefuseCall(),)
            assert len(self.ledger.operations) == before
            self.rejected += 1
            return
        (begin,) = work
        assert isinstance(begin, books.BeginCall)
        self.kinds[begin.op] = kind
        self.box_of[begin.op] = key
        self.pending.add(begin.op)
        if kind == "stdin" and not known and (key, session) not in self.adopted:
            self.adopted.add((key, session))
            self.adopted_open.add((key, session))

    def _starts(self, *, begun: bool) -> list[int]:
        return [
            op
            for op in sorted(self.pending)
            if self.kinds[op] == "start" and (op in self.begun) == begun
        ]

    @precondition(lambda self: self._starts(begun=False))
    @rule(data=st.data())
    def sandbox_ready(self, data) -> None:
        self.begin_start(data.draw(st.sampled_from(self._starts(begun=False))))

    def begin_start(self, op: int, *, tty: bool = False) -> None:
        work = self.feed(books.StartReady(self.tick(), op, tty))
        if self.cancelled or op in self.lost:
            assert work == (books.RefuseCall(),), "G3"
            return
        (begin,) = work
        assert isinstance(begin, books.BeginStart)
        self.begun[op] = begin.number
        self.used.add(self.box_of[op])

    @precondition(lambda self: [o for o in self._starts(begun=True) if o not in self.answered])
    @rule(data=st.data(), session=st.integers(1, 3), how=st.sampled_from("senn"))
    def start_answers(self, data, session: int, how: str) -> None:
        op = data.draw(
            st.sampled_from([o for o in self._starts(begun=True) if o not in self.answered])
        )
        self.start_returned(
            op, session=session if how == "s" else None, exit_code=0 if how == "e" else None
        )

    def start_returned(
        self, op: int, *, session: int | None = None, exit_code: int | None = None
    ) -> None:
        self.answered.add(op)
        self.feed(books.StartReturned(self.tick(), op, session, exit_code))
        if session is not None:
            # The provider gave the id to a command of ours: it names that one from now on.
            self.adopted.discard((self.box_of[op], session))
            self.adopted_open.discard((self.box_of[op], session))

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), how=st.sampled_from(["returned", "raised", "cancelled"]))
    def settles(self, data, how: str) -> None:
        op = data.draw(st.sampled_from(sorted(self.pending)))
        self.pending.discard(op)
        self.feed(books.OperationSettled(self.tick(), op, how))

    @precondition(lambda self: [o for o in self.pending if o not in self.lost])
    @rule(data=st.data())
    def caller_leaves(self, data) -> None:
        op = data.draw(st.sampled_from(sorted(o for o in self.pending if o not in self.lost)))
        self.lost.add(op)
        work = self.feed(books.CallerLost(self.tick(), op))
        if self.kinds[op] in ("file", "thread", "stdin"):
            assert work == ()
        elif self.kinds[op] in CANCELLABLE:
            assert op in self.asked_to_stop

    @rule(key=st.sampled_from(KEYS), session=st.integers(1, 3), code=st.none() | st.just(0))
    def stdin_answers(self, key, session: int, code) -> None:
        known = self.ledger.command_of(key, session) is not None
        if not known and (key, session) not in self.adopted:
            return
        self.feed(books.StdinReturned(self.tick(), key, session, code))
        if code is not None and not known:
            self.adopted_open.discard((key, session))

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), verdict=st.sampled_from(["clear", "alive", "unknown", "failed"]))
    def command_is_swept(self, data, verdict: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.begun.values())))
        if verdict == "failed":
            self.feed(books.CommandSweepFailed(self.tick(), number, "lost"))
        else:
            seen = [process(number, "gone" if verdict == "clear" else verdict)]
            self.feed(books.CommandSwept(self.tick(), number, report(verdict, processes=seen)))

    # The end of the turn.

    @precondition(lambda self: not self.cancelled)
    @rule()
    def hook_is_added(self) -> None:
        self.feed(books.HookAdded(self.tick(), "hook"))
        self.hooks_open.add(len(self.ledger.hooks) - 1)

    @precondition(lambda self: not self.cancelled)
    @rule()
    def cancel(self) -> None:
        self.cancelled = True
        self.feed(books.CancelRequested(self.tick(), "stop"))
        self.feed(books.DrainBegun(self.tick()))

    @precondition(lambda self: self.cancelled and self.sweeping)
    @rule()
    def drain_begins_again(self) -> None:
        self.feed(books.DrainBegun(self.tick()))

    @precondition(lambda self: self.sweeping)
    @rule(
        data=st.data(),
        answer=st.sampled_from(["clear", "clear", "alive", "unknown", "failed", "gone"]),
        snapshot=st.sampled_from(["consistent", "sampled"]),
    )
    def sandbox_is_swept(self, data, answer: str, snapshot: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.sweeping)))
        self.sweeping.discard(key)
        self.feed(books.SweepBegun(self.tick(), key))
        proof = answer == "gone" or (
            answer == "clear" and (self.accept_sampled or snapshot == "consistent")
        )
        if proof:
            self.proved.add(key)
        if answer == "failed":
            self.feed(books.SweepFailed(self.tick(), key, "lost"))
        elif answer == "gone":
            self.feed(books.SandboxVanished(self.tick(), key, "absent"))
            self.adopted_open = {a for a in self.adopted_open if a[0] != key}
        else:
            seen = [process(900, "gone" if answer == "clear" else answer)]
            self.feed(
                books.SweepAnswered(self.tick(), key, report(answer, snapshot, processes=seen))
            )
        if not proof:
            assert key in self.sweeping, "a failed sweep is repeated"

    @precondition(lambda self: self.cancelled)
    @rule(key=st.none() | st.sampled_from(KEYS))
    def grace_is_over(self, key) -> None:
        if key is None or key in self.proved:
            self.feed(books.GraceOver(self.tick(), key))

    @precondition(lambda self: self.proved)
    @rule(data=st.data())
    def cancel_grace_is_over(self, data) -> None:
        self.feed(
            books.CancelGraceOver(self.tick(), data.draw(st.sampled_from(sorted(self.proved))))
        )

    @precondition(lambda self: self.cancelled and self.adopted_open)
    @rule(data=st.data(), code=st.none() | st.just(0))
    def adopted_is_asked(self, data, code) -> None:
        key, session = data.draw(st.sampled_from(sorted(self.adopted_open)))
        self.feed(books.AdoptedTried(self.tick(), key, session, code))
        if code is not None:
            self.adopted_open.discard((key, session))

    @precondition(lambda self: self.cancelled and self.hooks_open)
    @rule(data=st.data(), error=st.none() | st.just("OSError"))
    def hook_ends(self, data, error) -> None:
        index = data.draw(st.sampled_from(sorted(self.hooks_open)))
        self.feed(books.HookTried(self.tick(), index, 1, error))
        if error is None:
            self.hooks_open.discard(index)

    # What the design promises.

    @invariant()
    def quiet_means_quiet(self) -> None:
        if not hasattr(self, "ledger"):
            return
        given_up = {op for op in self.pending if op in self.released}
        quiet = (
            self.cancelled
            and self.used <= self.proved  # G2
            and self.pending <= given_up  # G1
            and not self.adopted_open
            and not self.hooks_open
        )
        assert self.ledger.quiet == quiet
        unsettled = {self.begun[op] for op in given_up}
        assert set(self.ledger.unsettled_starts()) == unsettled  # G3: listed
        assert self.was_quiet <= quiet, "a receipt was taken back"
        self.was_quiet = quiet

    @invariant()
    def quiet_leaves_nothing_undecided(self) -> None:
        if not hasattr(self, "ledger") or not self.ledger.quiet:
            return
        final = (CommandState.EXITED, CommandState.GONE)
        assert all(c.state in final for c in self.ledger.commands.values())
        assert {box.key for box in self.ledger.used_sandboxes()} == self.used  # G5
        for box in self.ledger.used_sandboxes():
            assert all(p.look == "gone" for p in box.processes.values())

    @invariant()
    def final_states_are_final(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for name, item in _states(self.ledger):
            if name in self.final:
                assert item is self.final[name], f"{name} left a final state"
            elif item in FINAL:
                self.final[name] = item

    @invariant()
    def the_books_agree_with_the_model(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.rejected == self.rejected
        open_ = {op.id for op in self.ledger.open_operations()}
        assert open_ == self.pending - self.released
        assert {box.key for box in self.ledger.open_sandboxes()} == self.used - self.proved
        assert set(self.ledger.commands) == set(self.begun.values())


def _states(ledger: Ledger) -> Iterator[tuple[object, object]]:
    for number, command in ledger.commands.items():
        yield f"command {number}", command.state
    for op in ledger.operations.values():
        yield f"operation {op.id}", op.state
    for key, box in ledger.sandboxes.items():
        yield f"sandbox {key}", box.state
    for hook in ledger.hooks:
        yield f"hook {hook.index}", hook.state


def test_the_ledger_keeps_its_promises_in_any_order() -> None:
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=200,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# Planted bugs: the machine has to find each of them.


class AdmitsAfterTheCancel(Ledger):
    def _call_arrived(self, event):
        at, self.cancelled_at = self.cancelled_at, None
        yield from super()._call_arrived(event)
        self.cancelled_at = at


class StartsAfterTheCancel(Ledger):
    def _start_ready(self, event):
        at, self.cancelled_at = self.cancelled_at, None
        op = self.operations[event.op]
        if op.state is OperationState.CANCELLING:
            op.state = OperationState.WAITING
        yield from super()._start_ready(event)
        self.cancelled_at = at


class TakesUnknownForClear(Ledger):
    def is_proof(self, report):
        return report.verdict != "alive"


class TakesAnyClearReport(Ledger):
    def is_proof(self, report):
        return report.verdict == "clear"


class TakesAFailedRunForClear(Ledger):
    def _sweep_failed(self, key, error):
        box = self._sandbox(key)
        box.state = SandboxState.CLEAR
        yield from self._cleared(box, 0.0)


class ForgetsCallsInFlight(Ledger):
    def _open(self):
        yield from self.open_sandboxes()
        yield from self.open_adopted()
        yield from self.open_hooks()


class ForgetsHooks(Ledger):
    def _open(self):
        yield from self.open_sandboxes()
        yield from self.open_operations()
        yield from self.open_adopted()


class ForgetsAdoptedSessions(Ledger):
    def open_adopted(self):
        return []


class GivesUpTooEarly(Ledger):
    def _grace_over(self, event):
        yield from super()._grace_over(event)
        for op in self.open_operations():
            if op.command is not None:
                self._move_operation(op, books.OperationFact.CANCEL)
                self._move_operation(op, books.OperationFact.GIVE_UP)
                yield books.ReleaseCaller(op.id)


class SweepsOnlyWhatRuns(Ledger):
    """Takes a sandbox whose commands have all exited for clean: background children live on."""

    def used_sandboxes(self):
        return [
            box
            for box in super().used_sandboxes()
            if any(
                c.sandbox == box.key and c.state is not CommandState.EXITED
                for c in self.commands.values()
            )
        ]


class CancelsFileOperations(Ledger):
    def _grace_over(self, event):
        for op in self.open_operations():
            if op.state is OperationState.ACTIVE:
                self._move_operation(op, books.OperationFact.CANCEL)
                yield books.CancelTask(op.id)


class RevivesCommands(Ledger):
    def _stdin_returned(self, event):
        yield from super()._stdin_returned(event)
        command = self.command_of(event.key, event.session)
        if command is not None:
            command.state = CommandState.RUNNING


BUGS = [
    AdmitsAfterTheCancel,
    StartsAfterTheCancel,
    TakesUnknownForClear,
    TakesAnyClearReport,
    TakesAFailedRunForClear,
    ForgetsCallsInFlight,
    ForgetsHooks,
    ForgetsAdoptedSessions,
    GivesUpTooEarly,
    SweepsOnlyWhatRuns,
    CancelsFileOperations,
    RevivesCommands,
]


@pytest.mark.parametrize("bug", BUGS)
def test_the_machine_finds_a_planted_bug(bug: type[Ledger]) -> None:
    class Machine(LedgerMachine):
        ledger_class = bug

    found = (AssertionError, FenceInternalError)
    with pytest.raises(found):
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=500,
                stateful_step_count=40,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )


# The tables.


def test_final_states_have_no_way_out() -> None:
    for table in (COMMAND_TABLE, OPERATION_TABLE, SANDBOX_TABLE, STEP_TABLE):
        for (state, fact), after in table.items():
            assert state not in FINAL or after is state, (state, fact)


def test_every_state_can_be_reached_and_left_for_a_final_one() -> None:
    for table in (COMMAND_TABLE, OPERATION_TABLE, SANDBOX_TABLE, STEP_TABLE):
        states = set(type(next(iter(table))[0]))
        reached = {next(iter(type(next(iter(table))[0])))}
        reached |= set(table.values())
        assert states == reached
        for state in states - FINAL:
            seen, todo = {state}, [state]
            while todo:
                at = todo.pop()
                new = {after for (s, _), after in table.items() if s is at} - seen
                seen |= new
                todo += new
            assert seen & FINAL, state


@pytest.mark.parametrize(
    "event",
    [
        books.StartReady(1.0, 9),
        books.StartReturned(1.0, 9, None, None),
        books.OperationSettled(1.0, 9, "returned"),
        books.CallerLost(1.0, 9),
        books.CommandSwept(1.0, 9, report()),
        books.CommandSweepFailed(1.0, 9, "x"),
        books.CallArrived(1.0, "x", "file", None, ("no", "box")),
        books.StdinReturned(1.0, KEYS[0], 5, 0),
        books.AdoptedTried(1.0, KEYS[0], 5, 0),
        books.HookTried(1.0, 0, 1, None),
        books.HookTried(1.0, -1, 1, None),
        books.DrainBegun(1.0),
        books.SweepBegun(1.0, KEYS[0]),
        books.SweepBegun(1.0, ("no", "box")),
        books.SweepAnswered(1.0, KEYS[0], report()),
        books.SweepFailed(1.0, KEYS[0], "x"),
        books.SandboxVanished(1.0, KEYS[0], "x"),
        books.CancelGraceOver(1.0, KEYS[0]),
        books.SandboxPrepared(1.0, ("no", "box"), False),
        books.Event(1.0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_impossible_event_is_an_internal_error(event: books.Event) -> None:
    ledger = Ledger()
    ledger.apply(books.SandboxBound(0.0, KEYS[0]))
    with pytest.raises(FenceInternalError):
        ledger.apply(event)


def test_a_turn_is_cancelled_once_and_a_call_settles_once() -> None:
    ledger = Ledger()
    ledger.apply(books.CallArrived(1.0, "tool", "function"))
    ledger.apply(books.OperationSettled(2.0, 1, "returned"))
    with pytest.raises(FenceInternalError):
        ledger.apply(books.OperationSettled(3.0, 1, "returned"))
    ledger.apply(books.CancelRequested(4.0, None))
    with pytest.raises(FenceInternalError):
        ledger.apply(books.CancelRequested(5.0, None))
    with suppress(FenceInternalError):
        ledger.apply(books.StartReady(6.0, 1))
    assert ledger.commands == {}


def test_the_work_of_a_drain_comes_in_order() -> None:
    """Ctrl-C before the sweep; an adopted session and a hook at the same time."""
    ledger = Ledger()
    ledger.apply(books.SandboxBound(0.0, KEYS[0], interruptible=True))
    ledger.apply(books.CallArrived(1.0, "start", "start", "c", KEYS[0]))
    ledger.apply(books.StartReady(1.0, 1, tty=True))
    ledger.apply(books.StartReturned(1.0, 1, 55, None))
    ledger.apply(books.OperationSettled(1.0, 1, "returned"))
    ledger.apply(books.CallArrived(1.0, "write", "stdin", "c", KEYS[0], 77))
    ledger.apply(books.OperationSettled(1.0, 2, "returned"))
    ledger.apply(books.HookAdded(1.0, "hook"))
    assert ledger.apply(books.CancelRequested(2.0, "stop")) == ()
    assert ledger.apply(books.DrainBegun(2.0)) == (
        books.InterruptPty(1, 55),
        books.SweepSandbox(KEYS[0], frozenset({1}), 0),
        books.TryAdopted(KEYS[0], 77, interrupt=True),
        books.RunHook(0),
    )


def test_what_an_earlier_sweep_missed_is_not_held_against_the_one_that_proves() -> None:
    """`unseen` and `snapshot` are of the same sweep: a consistent one has missed nothing."""
    key = ("box", "1")
    ledger = books.Ledger()
    ledger.apply(books.SandboxBound(0.0, key))
    ledger.apply(books.CallArrived(0.0, "start", "start", None, key))
    ledger.apply(books.StartReady(0.0, 1))
    ledger.apply(books.StartReturned(0.0, 1, None, 0))
    ledger.apply(books.OperationSettled(0.0, 1, "returned"))
    ledger.apply(books.CancelRequested(1.0, None))
    ledger.apply(books.DrainBegun(1.0))
    for verdict, snapshot, unseen in (("unknown", "sampled", 5), ("clear", "consistent", 0)):
        ledger.apply(books.SweepBegun(1.0, key))
        answer = SweepReport(
            turn="t",
            run="r",
            verdict=verdict,  # type: ignore[arg-type]
            containment="lineage",
            snapshot=snapshot,  # type: ignore[arg-type]
            scans=2,
            unseen=unseen,
            elapsed_ms=1,
        )
        ledger.apply(books.SweepAnswered(1.0, key, answer))
    box = ledger.sandboxes[key]
    assert (box.snapshot, box.unseen, box.scans) == ("consistent", 0, 4)
