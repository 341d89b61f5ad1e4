"""What a turn has admitted, what of it is still open, and what must be done next.

Pure bookkeeping: an event goes in, the work to do comes out. No awaits, clock (times come with the
events, seconds since the epoch), I/O or randomness. Each command, operation, sandbox, adopted
session and hook has exactly one state; everything else is derived from those. An event that cannot
happen in a state raises FenceInternalError; so does one about something unknown.

The rules that make the receipt true:
- after CancelRequested nothing is admitted and no start begins;
- a sandbox in which a start began is clear only by a sweep that began after the cancel and whose
  report says so, or by evidence that the sandbox is gone; anything else leaves it open;
- an operation is over when it settled; only a start in a proven sandbox may be given up, by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Literal, TypeVar

from fence.errors import FenceInternalError
from fence.lineage.marks import BRANDS_PER_TURN
from fence.lineage.report import Containment, MarkerReport, ProcessReport, Snapshot, SweepReport

Key = tuple[str, str]
"""A sandbox: (provider, sandbox id)."""

OperationKind = Literal[
    "start", "stdin", "file", "function", "thread", "custom", "computer", "shell", "patch", "mcp"
]

# Ending these early could leave half a file, or cannot be done: they are waited for and named.
NEVER_CANCELLED: frozenset[str] = frozenset({"file", "thread"})
# These return because their command is stopped, so they get their grace after the sweep.
RETURN_BY_SWEEP: frozenset[str] = frozenset({"start", "stdin"})


# States, facts, and the only transitions there are.


class CommandState(Enum):
    """Of one shell command."""

    STARTING = auto()
    """The provider was asked to start it and has not answered."""
    RUNNING = auto()
    UNKNOWN = auto()
    """The start ended without saying whether anything runs."""
    STOPPING = auto()
    EXITED = auto()
    """Its first process ended by itself; what it left behind falls to the sweep."""
    GONE = auto()
    """A sweep, or the end of the sandbox, proved that nothing of it runs."""


class CommandFact(Enum):
    """What can become known of a command: a session id, its exit, a start without an answer, ..."""

    YIELDED = auto()
    ENDED = auto()
    LOST = auto()
    STOP = auto()
    CLEARED = auto()


class OperationState(Enum):
    """Of one admitted call."""

    WAITING = auto()
    """Admitted, no side effect yet: a start whose sandbox is being prepared."""
    ACTIVE = auto()
    CANCELLING = auto()
    UNSETTLED = auto()
    """A start we gave up on; the tombstone refuses its late effect."""
    SETTLED = auto()


class OperationFact(Enum):
    """What can happen to a call."""

    BEGIN = auto()
    CANCEL = auto()
    GIVE_UP = auto()
    SETTLE = auto()


class SandboxState(Enum):
    """Of one bound sandbox."""

    IDLE = auto()
    """No start ever began in it: nothing to prove."""
    USED = auto()
    SWEEPING = auto()
    UNPROVEN = auto()
    CLEAR = auto()
    GONE = auto()


class SandboxFact(Enum):
    """What can become known of a sandbox."""

    USE = auto()
    SWEEP = auto()
    FAIL = auto()
    CLEAR = auto()
    VANISH = auto()


class StepState(Enum):
    """Of an adopted session and of a hook."""

    OPEN = auto()
    TRYING = auto()
    DONE = auto()


class StepFact(Enum):
    """What can come of an attempt."""

    TRY = auto()
    FAIL = auto()
    SUCCEED = auto()


_C, _CF = CommandState, CommandFact
COMMAND_TABLE: dict[tuple[CommandState, CommandFact], CommandState] = {
    (_C.STARTING, _CF.YIELDED): _C.RUNNING,
    (_C.STARTING, _CF.ENDED): _C.EXITED,
    (_C.STARTING, _CF.LOST): _C.UNKNOWN,
    (_C.STARTING, _CF.STOP): _C.STOPPING,
    (_C.STARTING, _CF.CLEARED): _C.GONE,
    (_C.RUNNING, _CF.ENDED): _C.EXITED,
    (_C.RUNNING, _CF.STOP): _C.STOPPING,
    (_C.RUNNING, _CF.CLEARED): _C.GONE,
    (_C.UNKNOWN, _CF.ENDED): _C.EXITED,
    (_C.UNKNOWN, _CF.STOP): _C.STOPPING,
    (_C.UNKNOWN, _CF.CLEARED): _C.GONE,
    # While it is being stopped the provider's answers are remembered, but prove nothing.
    (_C.STOPPING, _CF.YIELDED): _C.STOPPING,
    (_C.STOPPING, _CF.ENDED): _C.STOPPING,
    (_C.STOPPING, _CF.LOST): _C.STOPPING,
    (_C.STOPPING, _CF.STOP): _C.STOPPING,
    (_C.STOPPING, _CF.CLEARED): _C.GONE,
    # Final. A late answer of the provider changes nothing.
    (_C.EXITED, _CF.ENDED): _C.EXITED,
    (_C.EXITED, _CF.STOP): _C.EXITED,
    (_C.EXITED, _CF.CLEARED): _C.EXITED,
    (_C.GONE, _CF.YIELDED): _C.GONE,
    (_C.GONE, _CF.ENDED): _C.GONE,
    (_C.GONE, _CF.LOST): _C.GONE,
    (_C.GONE, _CF.STOP): _C.GONE,
    (_C.GONE, _CF.CLEARED): _C.GONE,
}

_O, _OF = OperationState, OperationFact
OPERATION_TABLE: dict[tuple[OperationState, OperationFact], OperationState] = {
    (_O.WAITING, _OF.BEGIN): _O.ACTIVE,
    (_O.WAITING, _OF.CANCEL): _O.CANCELLING,
    (_O.WAITING, _OF.SETTLE): _O.SETTLED,
    (_O.ACTIVE, _OF.CANCEL): _O.CANCELLING,
    (_O.ACTIVE, _OF.SETTLE): _O.SETTLED,
    (_O.CANCELLING, _OF.CANCEL): _O.CANCELLING,
    (_O.CANCELLING, _OF.GIVE_UP): _O.UNSETTLED,
    (_O.CANCELLING, _OF.SETTLE): _O.SETTLED,
    (_O.UNSETTLED, _OF.SETTLE): _O.SETTLED,
}

_S, _SF = SandboxState, SandboxFact
SANDBOX_TABLE: dict[tuple[SandboxState, SandboxFact], SandboxState] = {
    (_S.IDLE, _SF.USE): _S.USED,
    (_S.USED, _SF.USE): _S.USED,
    (_S.USED, _SF.SWEEP): _S.SWEEPING,
    (_S.UNPROVEN, _SF.SWEEP): _S.SWEEPING,
    # A drain that was interrupted starts over; the answer of its last run is lost.
    (_S.SWEEPING, _SF.SWEEP): _S.SWEEPING,
    (_S.SWEEPING, _SF.FAIL): _S.UNPROVEN,
    (_S.SWEEPING, _SF.CLEAR): _S.CLEAR,
    (_S.SWEEPING, _SF.VANISH): _S.GONE,
}

_P, _PF = StepState, StepFact
STEP_TABLE: dict[tuple[StepState, StepFact], StepState] = {
    (_P.OPEN, _PF.TRY): _P.TRYING,
    (_P.OPEN, _PF.SUCCEED): _P.DONE,
    (_P.TRYING, _PF.TRY): _P.TRYING,
    (_P.TRYING, _PF.FAIL): _P.OPEN,
    (_P.TRYING, _PF.SUCCEED): _P.DONE,
    (_P.DONE, _PF.SUCCEED): _P.DONE,
    # The provider said that a session ended while a look at it was under way.
    (_P.DONE, _PF.FAIL): _P.DONE,
}

FINAL: frozenset[Enum] = frozenset({_C.EXITED, _C.GONE, _O.SETTLED, _S.CLEAR, _S.GONE, _P.DONE})


# What the ledger holds.


@dataclass
class Operation:
    """One admitted call."""

    id: int
    name: str
    kind: OperationKind
    call_id: str | None
    sandbox: Key | None
    admitted_at: float
    state: OperationState
    command: int | None = None
    caller_lost: bool = False
    ended_by_cancel: bool = False


@dataclass
class Command:
    """One shell command."""

    number: int
    operation: int
    sandbox: Key
    call_id: str | None
    tty: bool
    started_at: float
    state: CommandState = CommandState.STARTING
    session: int | None = None
    exit_code: int | None = None
    ended_at: float | None = None
    interrupted: bool = False
    """Whether Ctrl-C has been written to its PTY, or a sweep of its own has sent INT."""
    stop_failures: int = 0
    start_failed: bool = False
    marker: MarkerReport | None = None
    pgid: int | None = None


@dataclass
class SandboxEntry:
    """One bound sandbox and what its sweeps said."""

    key: Key
    interruptible: bool = False
    unbranded: bool = False
    foreign: bool = False
    """Whether another process may have started the turn's commands in it."""
    state: SandboxState = SandboxState.IDLE
    control_runs: int = 0
    failures: int = 0
    """Sweeps without a proof since the drain began; sets the pause before the next one."""
    swept: bool = False
    containment: Containment = "group"
    snapshot: Snapshot = "sampled"
    scans: int = 0
    unseen: int = 0
    evidence: str | None = None
    processes: dict[tuple[int, int], ProcessReport] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Adopted:
    """A provider session that the turn wrote to but did not start."""

    sandbox: Key
    session: int
    state: StepState = StepState.OPEN
    failures: int = 0
    interrupted: bool = False


@dataclass
class Hook:
    """A stop-and-prove step of the app."""

    index: int
    name: str
    state: StepState = StepState.OPEN
    failures: int = 0
    elapsed_ms: int = 0
    error: str | None = None


# Events. `at` is seconds since the epoch.


@dataclass(frozen=True)
class Event:
    """Something that happened."""

    at: float


@dataclass(frozen=True)
class SandboxBound(Event):
    """A sandbox became known, or what is known of it changed.

    `interruptible`: Ctrl-C can be written to the PTYs of its commands.
    """

    key: Key
    interruptible: bool = False


@dataclass(frozen=True)
class SandboxPrepared(Event):
    """The prepare run answered. `unbranded`: commands will not carry the CPU-limit mark."""

    key: Key
    unbranded: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallArrived(Event):
    """A call wants to be admitted; answered by BeginCall or RefuseCall."""

    name: str
    kind: OperationKind
    call_id: str | None = None
    sandbox: Key | None = None
    session: int | None = None
    """The provider's session id that a stdin call is for."""


@dataclass(frozen=True)
class StartReady(Event):
    """The sandbox of a waiting start is prepared; the next step has a side effect."""

    op: int
    tty: bool = False


@dataclass(frozen=True)
class StartReturned(Event):
    """The provider answered a start: a session id, an exit code, or neither (unknown)."""

    op: int
    session: int | None
    exit_code: int | None


@dataclass(frozen=True)
class StdinReturned(Event):
    """The provider answered a write or a poll."""

    key: Key
    session: int
    exit_code: int | None
    """None while the command runs on."""


@dataclass(frozen=True)
class OperationSettled(Event):
    """The task of a call has ended."""

    op: int
    how: Literal["returned", "raised", "cancelled"]


@dataclass(frozen=True)
class CallerLost(Event):
    """Whoever waited for the operation was cancelled and will not see its result."""

    op: int


@dataclass(frozen=True)
class CommandSwept(Event):
    """A sweep for one command answered."""

    number: int
    report: SweepReport


@dataclass(frozen=True)
class CommandSweepFailed(Event):
    """A sweep for one command could not be made or read."""

    number: int
    error: str


@dataclass(frozen=True)
class CancelRequested(Event):
    """The turn is over."""

    reason: str | None


@dataclass(frozen=True)
class LeftoversAssumed(Event):
    """Another process may have started commands of this turn in the sandbox."""

    key: Key


@dataclass(frozen=True)
class DrainBegun(Event):
    """A drain starts, for the first time or again after a deadline or an interruption."""


@dataclass(frozen=True)
class SweepBegun(Event):
    """A sweep of the whole turn is about to be sent."""

    key: Key


@dataclass(frozen=True)
class SweepAnswered(Event):
    """It answered a well-formed report."""

    key: Key
    report: SweepReport


@dataclass(frozen=True)
class SweepFailed(Event):
    """It could not be made or read: could not tell."""

    key: Key
    error: str


@dataclass(frozen=True)
class SandboxVanished(Event):
    """There is positive evidence that the sandbox is gone."""

    key: Key
    evidence: str


@dataclass(frozen=True)
class GraceOver(Event):
    """In-flight calls have had their time: all that no sweep ends, or those of one sandbox."""

    key: Key | None = None


@dataclass(frozen=True)
class CancelGraceOver(Event):
    """Cancelled starts of a proven sandbox have had their time to end."""

    key: Key


@dataclass(frozen=True)
class AdoptedTried(Event):
    """The provider was asked for an adopted session."""

    key: Key
    session: int
    exit_code: int | None
    """None: no word that it ended."""


@dataclass(frozen=True)
class HookAdded(Event):
    """The app registered a hook."""

    name: str


@dataclass(frozen=True)
class HookTried(Event):
    """A hook ended; `error` names the type of what it raised."""

    index: int
    elapsed_ms: int
    error: str | None


# Work.


@dataclass(frozen=True)
class Work:
    """Something to do."""


@dataclass(frozen=True)
class BeginCall(Work):
    """The call is admitted under this number."""

    op: int


@dataclass(frozen=True)
class RefuseCall(Work):
    """The turn is cancelled: the call must not have a side effect."""


@dataclass(frozen=True)
class BeginStart(Work):
    """Start the command under this number now."""

    op: int
    number: int


@dataclass(frozen=True)
class CancelTask(Work):
    """Cancel the task of a call."""

    op: int


@dataclass(frozen=True)
class ReleaseCaller(Work):
    """Let the caller of a start go that we gave up on."""

    op: int


@dataclass(frozen=True)
class StopCommand(Work):
    """Sweep one command; nobody can name it any more. Waits for `failures` backoff steps first."""

    number: int
    failures: int = 0


@dataclass(frozen=True)
class InterruptPty(Work):
    """Write Ctrl-C to the command's PTY: started, not waited for."""

    number: int
    session_id: int


@dataclass(frozen=True)
class SweepSandbox(Work):
    """Sweep the whole turn, after `failures` backoff steps; `no_int` had their Ctrl-C."""

    key: Key
    no_int: frozenset[int] = frozenset()
    failures: int = 0


@dataclass(frozen=True)
class StartGrace(Work):
    """Give the calls that a sweep ends their time, then report GraceOver and CancelGraceOver."""

    key: Key


@dataclass(frozen=True)
class TryAdopted(Work):
    """Ask whether the session ended; write Ctrl-C first where `interrupt`."""

    key: Key
    session_id: int
    interrupt: bool
    failures: int = 0


@dataclass(frozen=True)
class RunHook(Work):
    """Call a hook, after `failures` backoff steps."""

    index: int
    failures: int = 0


State = TypeVar("State", bound=Enum)
Fact = TypeVar("Fact", bound=Enum)


class Ledger:
    """The books of one turn.

    Args:
        accept_sampled: whether a clear report over a snapshot that was only sampled is a proof.
    """

    def __init__(self, *, accept_sampled: bool = True) -> None:
        self.accept_sampled = accept_sampled
        self.cancelled_at: float | None = None
        self.reason: str | None = None
        self.rejected = 0
        self.operations: dict[int, Operation] = {}
        self.commands: dict[int, Command] = {}
        self.sandboxes: dict[Key, SandboxEntry] = {}
        self.adopted: dict[tuple[Key, int], Adopted] = {}
        self.hooks: list[Hook] = []

    # What is derived from the states.

    @property
    def cancelled(self) -> bool:
        """Whether the turn is cancelled."""
        return self.cancelled_at is not None

    @property
    def quiet(self) -> bool:
        """Whether the turn is proven quiet. Once true it stays true."""
        return self.cancelled and not any(self._open())

    @property
    def brands_unique(self) -> bool:
        """Whether each brand still stands for one command only."""
        return len(self.commands) <= BRANDS_PER_TURN

    def open_operations(self) -> list[Operation]:
        """Calls that are neither settled nor given up."""
        done = (OperationState.SETTLED, OperationState.UNSETTLED)
        return [op for op in self.operations.values() if op.state not in done]

    def unsettled_starts(self) -> list[int]:
        """Numbers of the commands whose start we gave up on."""
        return [
            op.command
            for op in self.operations.values()
            if op.state is OperationState.UNSETTLED and op.command is not None
        ]

    def used_sandboxes(self) -> list[SandboxEntry]:
        """Sandboxes in which a command was, or may have been, started."""
        return [box for box in self.sandboxes.values() if box.state is not SandboxState.IDLE]

    def open_sandboxes(self) -> list[SandboxEntry]:
        """Return the used sandboxes without a proof."""
        return [box for box in self.used_sandboxes() if not self.is_proven(box)]

    def open_adopted(self) -> list[Adopted]:
        """Return the adopted sessions without word of their end."""
        return [a for a in self.adopted.values() if a.state is not StepState.DONE]

    def open_hooks(self) -> list[Hook]:
        """Return the hooks that have not succeeded."""
        return [hook for hook in self.hooks if hook.state is not StepState.DONE]

    def is_proven(self, box: SandboxEntry) -> bool:
        """Whether nothing of the turn runs in the sandbox."""
        return box.state in (SandboxState.CLEAR, SandboxState.GONE)

    def count(self, *states: CommandState) -> int:
        """Return how many commands are in one of these states."""
        return sum(command.state in states for command in self.commands.values())

    def command_of(self, key: Key, session: int) -> Command | None:
        """Return the newest command that the provider calls by this session id."""
        for command in reversed(self.commands.values()):
            if command.sandbox == key and command.session == session:
                return command
        return None

    def _open(self) -> Iterator[object]:
        yield from self.open_sandboxes()
        yield from self.open_operations()
        yield from self.open_adopted()
        yield from self.open_hooks()

    # Events.

    def apply(self, event: Event) -> tuple[Work, ...]:
        """Take an event in and return what must be done, in this order.

        Raises:
            FenceInternalError: the event cannot happen now, or names something unknown.
        """
        work: Iterator[Work] | None
        match event:
            case SandboxBound():
                box = self.sandboxes.setdefault(event.key, SandboxEntry(event.key))
                box.interruptible = event.interruptible
                work = None
            case SandboxPrepared():
                box = self._sandbox(event.key)
                box.unbranded = event.unbranded
                _extend_new(box.notes, event.notes)
                work = None
            case CallArrived():
                work = self._call_arrived(event)
            case StartReady():
                work = self._start_ready(event)
            case StartReturned():
                work = self._start_returned(event)
            case StdinReturned():
                work = self._stdin_returned(event)
            case OperationSettled():
                work = self._operation_settled(event)
            case CallerLost():
                work = self._caller_lost(event)
            case CommandSwept():
                work = self._command_swept(event)
            case CommandSweepFailed():
                work = self._command_sweep_failed(event)
            case CancelRequested():
                work = self._cancel_requested(event)
            case LeftoversAssumed():
                box = self._sandbox(event.key)
                box.foreign = True
                self._move_sandbox(box, SandboxFact.USE)
                work = None
            case DrainBegun():
                work = self._drain_begun()
            case SweepBegun():
                work = self._sweep_begun(event)
            case SweepAnswered():
                work = self._sweep_answered(event)
            case SweepFailed():
                work = self._sweep_failed(event.key, event.error)
            case SandboxVanished():
                work = self._sandbox_vanished(event)
            case GraceOver():
                work = self._grace_over(event)
            case CancelGraceOver():
                work = self._cancel_grace_over(event)
            case AdoptedTried():
                work = self._adopted_tried(event)
            case HookAdded():
                work = self._hook_added(event)
            case HookTried():
                work = self._hook_tried(event)
            case _:
                raise FenceInternalError(f"unknown event {type(event).__name__}")
        return tuple(work or ())

    def _call_arrived(self, event: CallArrived) -> Iterator[Work]:
        if self.cancelled:
            self.rejected += 1
            yield RefuseCall()
            return
        op = Operation(
            id=len(self.operations) + 1,
            name=event.name,
            kind=event.kind,
            call_id=event.call_id,
            sandbox=event.sandbox,
            admitted_at=event.at,
            state=OperationState.WAITING if event.kind == "start" else OperationState.ACTIVE,
        )
        if event.sandbox is not None:
            self._sandbox(event.sandbox)
        self.operations[op.id] = op
        if event.kind == "stdin" and event.sandbox is not None and event.session is not None:
            key, session = event.sandbox, event.session
            if self.command_of(key, session) is None:
                self.adopted.setdefault((key, session), Adopted(key, session))
        yield BeginCall(op.id)

    def _start_ready(self, event: StartReady) -> Iterator[Work]:
        op = self._operation(event.op)
        if op.kind != "start" or op.sandbox is None:
            raise FenceInternalError(f"operation {op.id} ({op.kind}) cannot start a command")
        if self.cancelled or op.caller_lost or op.state is OperationState.CANCELLING:
            yield RefuseCall()
            return
        self._move_operation(op, OperationFact.BEGIN)
        self._move_sandbox(self._sandbox(op.sandbox), SandboxFact.USE)
        command = Command(
            number=len(self.commands) + 1,
            operation=op.id,
            sandbox=op.sandbox,
            call_id=op.call_id,
            tty=event.tty,
            started_at=event.at,
        )
        op.command = command.number
        self.commands[command.number] = command
        yield BeginStart(op.id, command.number)

    def _start_returned(self, event: StartReturned) -> Iterator[Work]:
        op = self._operation(event.op)
        command = self._command(op.command)
        if event.exit_code is not None:
            self._command_ended(command, event.at, event.exit_code)
        elif event.session is not None:
            command.session = event.session
            # A session id that is used again names the new command from now on.
            self.adopted.pop((command.sandbox, event.session), None)
            self._move_command(command, CommandFact.YIELDED)
        else:
            self._move_command(command, CommandFact.LOST)
        yield from ()

    def _stdin_returned(self, event: StdinReturned) -> Iterator[Work]:
        if event.exit_code is None:
            return
        command = self.command_of(event.key, event.session)
        if command is not None:
            self._command_ended(command, event.at, event.exit_code)
            return
        adopted = self.adopted.get((event.key, event.session))
        if adopted is None:
            raise FenceInternalError(f"session {event.session} is neither ours nor adopted")
        self._move_step(adopted, StepFact.SUCCEED)
        yield from ()

    def _operation_settled(self, event: OperationSettled) -> Iterator[Work]:
        op = self._operation(event.op)
        self._move_operation(op, OperationFact.SETTLE)
        op.ended_by_cancel = event.how == "cancelled"
        if op.command is None:
            return
        command = self._command(op.command)
        if command.state is CommandState.STARTING or (
            event.how != "returned" and command.state in (CommandState.STOPPING, CommandState.GONE)
        ):
            command.start_failed = event.how != "returned"
            self._move_command(command, CommandFact.LOST)
        if op.caller_lost:
            yield from self._stop_unnamed(command)

    def _caller_lost(self, event: CallerLost) -> Iterator[Work]:
        op = self._operation(event.op)
        op.caller_lost = True
        if op.kind == "start":
            if op.state is OperationState.WAITING:
                self._move_operation(op, OperationFact.CANCEL)
                yield CancelTask(op.id)
            elif op.command is not None:
                yield from self._stop_unnamed(self._command(op.command))
        elif op.kind not in RETURN_BY_SWEEP | NEVER_CANCELLED and op.state is OperationState.ACTIVE:
            self._move_operation(op, OperationFact.CANCEL)
            yield CancelTask(op.id)

    def _stop_unnamed(self, command: Command) -> Iterator[Work]:
        if self.cancelled or command.state in (
            CommandState.EXITED,
            CommandState.GONE,
            CommandState.STOPPING,
        ):
            return
        self._move_command(command, CommandFact.STOP)
        command.interrupted = True
        yield StopCommand(command.number)

    def _command_swept(self, event: CommandSwept) -> Iterator[Work]:
        command = self._command(event.number)
        box = self._sandbox(command.sandbox)
        self._record_look(box, event.report, event.at)
        if self.is_proof(event.report):
            command.ended_at = command.ended_at or event.at
            self._move_command(command, CommandFact.CLEARED)
        elif not self.cancelled:
            command.stop_failures += 1
            yield StopCommand(command.number, command.stop_failures)

    def _command_sweep_failed(self, event: CommandSweepFailed) -> Iterator[Work]:
        command = self._command(event.number)
        self._sandbox(command.sandbox).errors.append(
            f"stop of command {command.number}: {event.error}"
        )
        if not self.cancelled:
            command.stop_failures += 1
            yield StopCommand(command.number, command.stop_failures)

    def _cancel_requested(self, event: CancelRequested) -> Iterator[Work]:
        if self.cancelled:
            raise FenceInternalError("the turn is cancelled already")
        self.cancelled_at = event.at
        self.reason = event.reason
        for op in self.operations.values():
            if op.state is OperationState.WAITING:
                self._move_operation(op, OperationFact.CANCEL)
                yield CancelTask(op.id)

    def _drain_begun(self) -> Iterator[Work]:
        if not self.cancelled:
            raise FenceInternalError("a drain began before the cancel")
        # Ctrl-C to the terminals first, then the sweeps: a raw-mode program expects the byte.
        for command in self.commands.values():
            box = self._sandbox(command.sandbox)
            if (
                command.tty
                and command.state is CommandState.RUNNING
                and command.session is not None
                and box.interruptible
                and not self.is_proven(box)
            ):
                command.interrupted = True
                yield InterruptPty(command.number, command.session)
        for box in self.open_sandboxes():
            box.failures = 0
            yield self._sweep(box)
        for adopted in self.open_adopted():
            adopted.failures = 0
            yield self._try_adopted(adopted)
        for hook in self.open_hooks():
            hook.failures = 0
            self._move_step(hook, StepFact.TRY)
            yield RunHook(hook.index)
        for box in self.used_sandboxes():
            if self.is_proven(box) and self._returning_by(box.key):
                yield StartGrace(box.key)

    def _sweep(self, box: SandboxEntry) -> SweepSandbox:
        ours = [c for c in self.commands.values() if c.sandbox == box.key]
        # A lost reply does not undo a signal: after the first sweep nobody gets a second INT.
        spared = frozenset(c.number for c in ours if box.swept or c.interrupted)
        return SweepSandbox(box.key, spared, box.failures)

    def _sweep_begun(self, event: SweepBegun) -> Iterator[Work]:
        if not self.cancelled:
            raise FenceInternalError("a sweep of the turn began before the cancel")
        box = self._sandbox(event.key)
        self._move_sandbox(box, SandboxFact.SWEEP)
        box.control_runs += 1
        box.swept = True
        for command in self.commands.values():
            if command.sandbox == box.key:
                self._move_command(command, CommandFact.STOP)
        yield from ()

    def _sweep_answered(self, event: SweepAnswered) -> Iterator[Work]:
        box = self._sandbox(event.key)
        report = event.report
        self._record_look(box, report, event.at)
        box.containment = report.containment
        if box.unbranded and report.containment == "lineage":
            box.containment = "lineage-unbranded"
        # Of this sweep alone: what an earlier one missed says nothing about this one's snapshot.
        box.snapshot = report.snapshot
        box.unseen = report.unseen
        box.scans += report.scans
        if not self.is_proof(report):
            yield from self._sweep_failed(event.key, _why_no_proof(report))
            return
        self._move_sandbox(box, SandboxFact.CLEAR)
        yield from self._cleared(box, event.at)

    def _sweep_failed(self, key: Key, error: str) -> Iterator[Work]:
        box = self._sandbox(key)
        self._move_sandbox(box, SandboxFact.FAIL)
        box.errors.append(error)
        box.failures += 1
        yield self._sweep(box)

    def _sandbox_vanished(self, event: SandboxVanished) -> Iterator[Work]:
        box = self._sandbox(event.key)
        self._move_sandbox(box, SandboxFact.VANISH)
        box.containment = "gone"
        box.snapshot = "consistent"
        box.evidence = event.evidence
        for adopted in self.open_adopted():
            if adopted.sandbox == box.key:
                self._move_step(adopted, StepFact.SUCCEED)
        yield from self._cleared(box, event.at)

    def _cleared(self, box: SandboxEntry, at: float) -> Iterator[Work]:
        for ident, process in box.processes.items():
            if process.look != "gone":
                # Seen alive by an earlier sweep, not there in the one that proved the sandbox.
                box.processes[ident] = replace(process, look="gone", problem=None)
        for command in self.commands.values():
            if command.sandbox == box.key:
                command.ended_at = command.ended_at or at
                self._move_command(command, CommandFact.CLEARED)
        if self._returning_by(box.key):
            yield StartGrace(box.key)

    def _grace_over(self, event: GraceOver) -> Iterator[Work]:
        for op in self.open_operations():
            if op.state is not OperationState.ACTIVE or op.kind in NEVER_CANCELLED:
                continue
            box = self.sandboxes.get(op.sandbox) if op.sandbox is not None else None
            if op.kind in RETURN_BY_SWEEP and box is not None:
                if box.state is not SandboxState.IDLE and not self.is_proven(box):
                    continue
                if self.is_proven(box) and event.key != box.key:
                    continue
            self._move_operation(op, OperationFact.CANCEL)
            yield CancelTask(op.id)

    def _cancel_grace_over(self, event: CancelGraceOver) -> Iterator[Work]:
        if not self.is_proven(self._sandbox(event.key)):
            raise FenceInternalError(f"gave up on starts in the unproven sandbox {event.key[1]}")
        for op in self._returning_by(event.key):
            # One that never reached the provider has nothing to be refused: it will settle.
            if op.command is not None and op.state is OperationState.CANCELLING:
                self._move_operation(op, OperationFact.GIVE_UP)
                yield ReleaseCaller(op.id)

    def _adopted_tried(self, event: AdoptedTried) -> Iterator[Work]:
        adopted = self.adopted.get((event.key, event.session))
        if adopted is None:
            raise FenceInternalError(f"session {event.session} is not adopted")
        if event.exit_code is not None:
            self._move_step(adopted, StepFact.SUCCEED)
            return
        self._move_step(adopted, StepFact.FAIL)
        if adopted.state is not StepState.DONE:
            adopted.failures += 1
            yield self._try_adopted(adopted)

    def _try_adopted(self, adopted: Adopted) -> TryAdopted:
        self._move_step(adopted, StepFact.TRY)
        first, adopted.interrupted = not adopted.interrupted, True
        return TryAdopted(adopted.sandbox, adopted.session, first, adopted.failures)

    def _hook_added(self, event: HookAdded) -> Iterator[Work]:
        hook = Hook(len(self.hooks), event.name)
        self.hooks.append(hook)
        yield from ()

    def _hook_tried(self, event: HookTried) -> Iterator[Work]:
        if not 0 <= event.index < len(self.hooks):
            raise FenceInternalError(f"hook {event.index} is not known")
        hook = self.hooks[event.index]
        hook.elapsed_ms += event.elapsed_ms
        hook.error = event.error
        if event.error is None:
            self._move_step(hook, StepFact.SUCCEED)
            return
        self._move_step(hook, StepFact.FAIL)
        self._move_step(hook, StepFact.TRY)
        hook.failures += 1
        yield RunHook(hook.index, hook.failures)

    # Shared steps.

    def is_proof(self, report: SweepReport) -> bool:
        """Whether a report proves what it was asked about."""
        return report.verdict == "clear" and (
            self.accept_sampled or report.snapshot == "consistent"
        )

    def _returning_by(self, key: Key) -> list[Operation]:
        """Open calls that the sweep of this sandbox ends."""
        return [
            op for op in self.open_operations() if op.sandbox == key and op.kind in RETURN_BY_SWEEP
        ]

    def _record_look(self, box: SandboxEntry, report: SweepReport, at: float) -> None:
        for process in report.processes:
            seen = process
            if process.look != "gone" and self.is_proven(box):
                # A sweep for one command may answer after the turn's, with what it saw before.
                seen = replace(process, look="gone", problem=None)
            box.processes[process.pid, process.start] = seen
        for marker in report.markers:
            command = self.commands.get(marker.command)
            if command is None and box.foreign:
                command = Command(
                    marker.command, 0, box.key, None, False, at, CommandState.STOPPING
                )
                self.commands[marker.command] = command
            if command is None or command.sandbox != box.key:
                continue
            command.marker = marker
            if marker.pid is None or marker.start is None:
                continue
            first = box.processes.get((marker.pid, marker.start))
            if first is not None:
                command.pgid = first.pgid
        _extend_new(box.notes, report.notes)

    def _command_ended(self, command: Command, at: float, exit_code: int) -> None:
        self._move_command(command, CommandFact.ENDED)
        if command.exit_code is None:
            command.exit_code = exit_code
            command.ended_at = command.ended_at or at

    def _move_command(self, command: Command, fact: CommandFact) -> None:
        command.state = _next(COMMAND_TABLE, f"command {command.number}", command.state, fact)

    def _move_operation(self, op: Operation, fact: OperationFact) -> None:
        op.state = _next(OPERATION_TABLE, f"operation {op.id}", op.state, fact)

    def _move_sandbox(self, box: SandboxEntry, fact: SandboxFact) -> None:
        box.state = _next(SANDBOX_TABLE, f"sandbox {box.key[1]}", box.state, fact)

    def _move_step(self, step: Adopted | Hook, fact: StepFact) -> None:
        name = f"hook {step.name}" if isinstance(step, Hook) else f"session {step.session}"
        step.state = _next(STEP_TABLE, name, step.state, fact)

    def _operation(self, op: int) -> Operation:
        if op not in self.operations:
            raise FenceInternalError(f"operation {op} is not known")
        return self.operations[op]

    def _command(self, number: int | None) -> Command:
        if number is None or number not in self.commands:
            raise FenceInternalError(f"command {number} is not known")
        return self.commands[number]

    def _sandbox(self, key: Key) -> SandboxEntry:
        if key not in self.sandboxes:
            raise FenceInternalError(f"sandbox {key[1]} is not bound")
        return self.sandboxes[key]


def _next(table: dict[tuple[State, Fact], State], who: str, state: State, fact: Fact) -> State:
    try:
        return table[state, fact]
    except KeyError:
        raise FenceInternalError(f"{who} is {state.name}, {fact.name} cannot happen") from None


def _why_no_proof(report: SweepReport) -> str:
    if report.verdict == "clear":
        return f"the snapshot was only sampled ({report.unseen} processes came and went unseen)"
    left = [p for p in report.processes if p.look != "gone"]
    named = ", ".join(f"pid {p.pid} ({p.problem or p.look}, state {p.state})" for p in left[:5])
    verdict = "still alive" if report.verdict == "alive" else "could not tell"
    notes = f" ({'; '.join(report.notes)})" if report.notes else ""
    return f"{verdict}{': ' + named if named else ''}{notes}"


def _extend_new(notes: list[str], new: tuple[str, ...]) -> None:
    notes.extend(note for note in new if note not in notes)
