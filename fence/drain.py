"""Does the work that the ledger returns, and writes the receipt.

Decides nothing by itself. Every foreign call (a control run, a callback of the app or of an
adapter) runs in an owned task and is waited for with a bound, so one that hangs or swallows its
cancellation cannot hold the drain. Nothing here wakes up while nothing is cancelled. All times are
seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import anyio

from fence import ledger as books
from fence.control import ControlOutput, SandboxControl
from fence.errors import (
    ContainmentTooWeak,
    ControlError,
    FenceError,
    FenceInternalError,
    InvalidReport,
    QuiescenceTimeout,
    SandboxGone,
    SandboxNotReady,
)
from fence.escalation import EscalationPolicy
from fence.events import EventKind, EventSink, FenceEvent
from fence.ledger import Key, Ledger, Operation, OperationKind, SandboxEntry, Work
from fence.lineage import marks
from fence.lineage import report as wire
from fence.lineage.report import Containment, PrepareReport, ProcessReport, SweepReport
from fence.receipt import (
    CONTAINMENT_ORDER,
    CommandRecord,
    HookResult,
    OpenOperation,
    OperationCounts,
    QuiescenceReceipt,
    SandboxProof,
    StoppedProcess,
    weakest,
)
from fence.tasks import Home, Latch, OwnedTask

T = TypeVar("T")

log = logging.getLogger("fence")

# Longest error text kept in a receipt.
_ERROR_CHARS = 400


@dataclass(eq=False)
class Sandbox:
    """One bound sandbox of the turn; made by `TurnFence.bind_sandbox`."""

    key: Key
    control: SandboxControl
    interrupt: Callable[[int], Awaitable[None]] | None = None
    """Writes Ctrl-C to the PTY of a provider session id."""
    probe: Callable[[int], Awaitable[int | None]] | None = None
    """Exit code of an adopted session once it ended, else None."""
    prepared: PrepareReport | None = None
    preparing: OwnedTask[PrepareReport] | None = field(default=None, repr=False)


@dataclass(eq=False)
class Call:
    """An admitted call in the fence's hands. `released` is set when its caller may go on."""

    op: int
    kind: OperationKind
    task: OwnedTask[Any]
    released: Latch = field(default_factory=Latch)


class Drain:
    """The async side of one turn. Every method runs on `home`, except where it says otherwise."""

    def __init__(
        self,
        *,
        turn_id: str,
        turn: str,
        policy: EscalationPolicy,
        require: Containment | None,
        accept_sampled: bool,
        brand: bool,
        on_event: EventSink | None,
        origin: Literal["turn", "other-process"] = "turn",
    ) -> None:
        self.turn_id = turn_id
        self.turn = turn
        self.policy = policy
        self.require = require
        self.brand = brand
        self.on_event = on_event
        self.origin: Literal["turn", "other-process"] = origin
        self.ledger = Ledger(accept_sampled=accept_sampled)
        self.home: Home | None = None
        self.sandboxes: dict[Key, Sandbox] = {}
        self.calls: dict[int, Call] = {}
        self.hooks: list[Callable[[], Awaitable[None]]] = []
        self.receipt: QuiescenceReceipt | None = None
        self.deadline = 0.0
        self._clock = _EpochClock()
        self.started_at = self.now()
        self._owned: set[OwnedTask[Any]] = set()
        self._driver: OwnedTask[None] | None = None
        self._stop_until: dict[int, float] = {}
        self._changed = Latch()

    def now(self) -> float:
        """Seconds since the epoch; never goes back. Any thread."""
        return self._clock.now()

    def feed(self, event: books.Event) -> tuple[Work, ...]:
        """Take an event to the ledger and start the work that comes out."""
        work = self.ledger.apply(event)
        for item in work:
            self._perform(item)
        changed, self._changed = self._changed, Latch()
        changed.set()
        return work

    def emit(
        self,
        kind: EventKind,
        *,
        command: int | None = None,
        call_id: str | None = None,
        sandbox: Key | None = None,
        at: float | None = None,
        **data: str | float | bool | None,
    ) -> None:
        """Tell the app's sink; an error of the sink is logged and changes nothing."""
        if log.isEnabledFor(logging.DEBUG):
            log.debug("turn %s: %s command=%s %s", self.turn[:8], kind, command, data)
        if self.on_event is None:
            return
        event = FenceEvent(
            kind=kind,
            at=self.now() if at is None else at,
            turn=self.turn,
            command=command,
            call_id=call_id,
            sandbox=_label(sandbox) if sandbox is not None else None,
            data=data,
        )
        try:
            self.on_event(event)
        except Exception:
            log.exception("on_event raised for %s; the event is dropped", kind)

    # Where it runs.

    def settle_down(self) -> Home:
        """Make the running event loop the home, also in place of one that is over.

        Raises:
            FenceInternalError: the home is another event loop that is still running.
        """
        here = Home.current()
        if self.home == here:
            return here
        if self.home is not None:
            if self.home.is_alive():
                raise FenceInternalError("the fence lives on another running event loop")
            self.home = here
            self._move_out()
        self.home = here
        return here

    def _move_out(self) -> None:
        """Let go of what ran on a loop that is over: it can neither go on nor report."""
        self._owned.clear()
        self._driver = None
        for sandbox in self.sandboxes.values():
            sandbox.preparing = None
        for call in list(self.calls.values()):
            # A thread may still run without its loop; only its own end settles it.
            if call.kind != "thread":
                self._call_done(call, "cancelled")

    @property
    def _here(self) -> Home:
        assert self.home is not None
        return self.home

    def _own(self, name: str, call: Callable[[], Awaitable[T]]) -> OwnedTask[T]:
        task = self._here.spawn(call, name=f"fence {self.turn[:8]} {name}")
        self._owned.add(task)
        task.on_done(lambda: self._owned.discard(task))
        return task

    def _chore(self, name: str, call: Callable[[], Awaitable[None]]) -> OwnedTask[None]:
        task = self._own(name, call)

        def report() -> None:
            if task.error is not None and not task.cancelled:
                log.error("turn %s: %s failed", self.turn_id, name, exc_info=task.error)

        task.on_done(report)
        return task

    # Calls.

    def own_call(
        self, op: int, name: str, kind: OperationKind, body: Callable[[], Awaitable[Any]]
    ) -> Call:
        """Run an admitted call in a task of ours."""
        task = self._here.spawn(body, name=f"fence {self.turn[:8]} {name}")
        call = Call(op, kind, task)
        self.calls[op] = call
        task.on_done(lambda: self._task_ended(call))
        return call

    def _task_ended(self, call: Call) -> None:
        if call.task.cancelled:
            self._call_done(call, "cancelled")
        else:
            self._call_done(call, "raised" if call.task.error is not None else "returned")

    def _call_done(self, call: Call, how: Literal["returned", "raised", "cancelled"]) -> None:
        # None where the call went down with its loop and its task ends after all.
        if self.calls.pop(call.op, None) is None:
            return
        operation = self.ledger.operations[call.op]
        try:
            self.feed(books.OperationSettled(self.now(), call.op, how))
        finally:
            call.released.set()
        self.emit(
            "operation_settled",
            command=operation.command,
            call_id=operation.call_id,
            name=operation.name,
            operation=operation.kind,
            how=how,
        )

    # Preparing a sandbox.

    async def prepared(self, sandbox: Sandbox) -> PrepareReport:
        """Return what the sandbox offers; the first caller's prepare run serves all.

        Raises:
            SandboxNotReady: no valid answer in `policy.control_overhead` seconds.
            SandboxGone: the sandbox no longer exists.
            ContainmentTooWeak: less than `require`.
        """
        if sandbox.prepared is None:
            task = sandbox.preparing
            if task is None or task.done:
                task = self._own("prepare", lambda: self._prepare(sandbox))
                sandbox.preparing = task
            await task.wait()
            if task.cancelled:
                raise SandboxNotReady(_label(sandbox.key), "the prepare run was cancelled")
            sandbox.prepared = task.result()
        self._hold_against_require(sandbox, sandbox.prepared)
        return sandbox.prepared

    async def _prepare(self, sandbox: Sandbox) -> PrepareReport:
        give_up = anyio.current_time() + self.policy.control_overhead
        failures = 0
        while True:
            run = marks.new_run_token()
            try:
                output = await self._control_run(
                    sandbox, marks.prepare_argv(self.turn, run), self.policy.control_overhead
                )
                report = wire.parse_prepare(output, self.turn, run)
            except (ControlError, InvalidReport) as error:
                failures += 1
                pause = self._backoff(failures)
                if anyio.current_time() + pause >= give_up:
                    raise SandboxNotReady(_label(sandbox.key), str(error)) from error
                await anyio.sleep(pause)
                continue
            self.feed(
                books.SandboxPrepared(
                    self.now(), sandbox.key, not (self.brand and report.brand), report.notes
                )
            )
            self.emit(
                "sandbox_prepared",
                sandbox=sandbox.key,
                containment=self._offered(report),
                attempts=failures + 1,
            )
            return report

    def _offered(self, report: PrepareReport) -> Containment:
        if report.containment == "lineage" and not (self.brand and report.brand):
            return "lineage-unbranded"
        return report.containment

    def _hold_against_require(self, sandbox: Sandbox, report: PrepareReport) -> None:
        have = self._offered(report)
        if self.require is not None and CONTAINMENT_ORDER.index(have) < CONTAINMENT_ORDER.index(
            self.require
        ):
            raise ContainmentTooWeak(_label(sandbox.key), have, self.require, report.notes)

    # Looking, at any time.

    async def look(self) -> tuple[ProcessReport, ...]:
        """Return the turn's processes that are alive or could not be looked at."""
        found: list[ProcessReport] = []
        for box in self.ledger.used_sandboxes():
            if self.ledger.is_proven(box):
                continue
            run = marks.new_run_token()
            argv = marks.sweep_argv(self.turn, run, self.policy, look=True, branded=self.brand)
            try:
                output = await self._control_run(self.sandboxes[box.key], argv, self._sweep_time)
            except SandboxGone:
                continue
            report = wire.parse_sweep(output, self.turn, run)
            found += [p for p in report.processes if p.look != "gone"]
        return tuple(found)

    # The drain.

    def cancel(self, at: float, reason: str | None) -> None:
        """Close the ledger and start the drain in the background."""
        if not self.ledger.cancelled:
            self.feed(books.CancelRequested(at, reason))
            self.emit("cancelled", at=at, reason=reason)
            for sandbox in self.sandboxes.values():
                if sandbox.preparing is not None:
                    sandbox.preparing.cancel()
            self.keep_draining(self.policy.deadline)

    def keep_draining(self, timeout: float) -> OwnedTask[None] | None:
        """Let the drain run for at least `timeout` seconds from now; None once it is over."""
        if self.receipt is not None:
            return None
        self.deadline = max(self.deadline, self._here.now() + timeout)
        if self._driver is None or self._driver.done:
            self._driver = self._chore("drain", self._drive)
        return self._driver

    def stop_early(self) -> None:
        """Let a drain that is under way end as if its deadline were now."""
        self.deadline = 0.0
        self._changed.set()

    async def wait(self, timeout: float) -> QuiescenceReceipt:
        """Return the receipt once the turn is proven quiet; cancelling ends only the waiter.

        Raises:
            QuiescenceTimeout: not proven within `timeout` seconds.
        """
        give_up = anyio.current_time() + timeout
        while True:
            left = max(0.0, give_up - anyio.current_time())
            driver = self.keep_draining(left)
            if self.receipt is not None or driver is None:
                break
            with anyio.move_on_after(left):
                await driver.wait()
            if driver.done and driver.error is not None and not driver.cancelled:
                raise FenceInternalError("the drain failed") from driver.error
            if anyio.current_time() >= give_up:
                if self.deadline <= give_up + 0.001 and not driver.done:
                    # It is ending: let it cancel and collect what it started.
                    with anyio.move_on_after(self.policy.call_grace):
                        await driver.wait()
                break
        if self.receipt is not None:
            return self.receipt
        raise QuiescenceTimeout(self.assemble(proven=False))

    async def _drive(self) -> None:
        # A waiter may move the deadline at any await in here.
        while not self.ledger.quiet and self._here.now() < self.deadline:
            self.feed(books.DrainBegun(self.now()))
            self._chore("call grace", self._call_grace)
            while not self.ledger.quiet and (left := self.deadline - self._here.now()) > 0:
                changed = self._changed
                with anyio.move_on_after(left):
                    await changed.wait()
            quiesced_at = self.now()
            await self._end_chores()
            if self.ledger.quiet:
                self.receipt = self.assemble(proven=True, quiesced_at=quiesced_at)
        if self.receipt is None and self.ledger.quiet:
            self.receipt = self.assemble(proven=True, quiesced_at=self.now())
        if self.receipt is not None:
            self.emit(
                "quiesced",
                elapsed_ms=self.receipt.elapsed_ms,
                containment=self.receipt.containment,
                control_runs=sum(box.control_runs for box in self.receipt.sandboxes),
                unsettled=len(self.receipt.unsettled_starts),
            )
        else:
            partial = self.assemble(proven=False)
            self.emit(
                "deadline_missed", elapsed_ms=partial.elapsed_ms, open=partial.describe_open()
            )

    async def _end_chores(self) -> None:
        rest = [task for task in self._owned if task is not self._driver]
        for task in rest:
            task.cancel()
        with anyio.move_on_after(self.policy.call_grace):
            for task in rest:
                await task.wait()
        for task in rest:
            if not task.done:
                log.debug("turn %s: %s did not end when cancelled", self.turn_id, task.name)

    def _perform(self, work: Work) -> None:
        match work:
            case books.CancelTask():
                if work.op in self.calls:
                    self.calls[work.op].task.cancel()
            case books.ReleaseCaller():
                self.calls[work.op].released.set()
            case books.StopCommand():
                command = self.ledger.commands[work.number]
                if work.failures == 0:
                    self._stop_until[work.number] = self._here.now() + self.policy.deadline
                    self.emit("command_stopping", command=work.number, call_id=command.call_id)
                self._chore("stop command", lambda: self._stop_command(work))
            case books.InterruptPty():
                self._interrupt_pty(work)
            case books.SweepSandbox():
                self._chore("sweep", lambda: self._sweep(work))
            case books.StartGrace():
                self._chore("start grace", lambda: self._start_grace(work.key))
            case books.TryAdopted():
                self._chore("adopted session", lambda: self._try_adopted(work))
            case books.RunHook():
                self._chore("hook", lambda: self._run_hook(work))
            case books.BeginCall() | books.RefuseCall() | books.BeginStart():
                pass  # answers to whoever fed the event
            case _:
                raise FenceInternalError(f"unknown work {type(work).__name__}")

    # One sandbox.

    @property
    def _sweep_time(self) -> float:
        return self.policy.sweep + self.policy.control_overhead

    async def _sweep(self, work: books.SweepSandbox) -> None:
        if work.failures:
            await anyio.sleep(self._backoff(work.failures))
        sandbox = self.sandboxes[work.key]
        self.feed(books.SweepBegun(self.now(), work.key))
        attempt = self.ledger.sandboxes[work.key].control_runs
        run = marks.new_run_token()
        argv = marks.sweep_argv(self.turn, run, self.policy, no_int=work.no_int, branded=self.brand)
        self.emit("sweep_started", sandbox=work.key, attempt=attempt)
        try:
            output = await self._control_run(sandbox, argv, self._sweep_time)
            report = wire.parse_sweep(output, self.turn, run)
        except SandboxGone as error:
            self.emit(
                "sweep_reported",
                sandbox=work.key,
                attempt=attempt,
                verdict="gone",
                containment="gone",
            )
            self.feed(books.SandboxVanished(self.now(), work.key, error.evidence))
        except (ControlError, InvalidReport) as error:
            text = _text(error)
            self.emit("sweep_failed", sandbox=work.key, attempt=attempt, error=text)
            self.feed(books.SweepFailed(self.now(), work.key, text))
        else:
            self._tell(report, work.key, attempt)
            self.feed(books.SweepAnswered(self.now(), work.key, report))

    async def _stop_command(self, work: books.StopCommand) -> None:
        if work.failures:
            await anyio.sleep(self._backoff(work.failures))
            if self.ledger.cancelled:
                return  # the turn's sweep covers it
        command = self.ledger.commands[work.number]
        run = marks.new_run_token()
        argv = marks.sweep_argv(
            self.turn,
            run,
            self.policy,
            command=work.number,
            no_int=(work.number,) if work.failures else (),
            branded=self.brand,
            brands_unique=self.ledger.brands_unique,
        )
        self.emit("sweep_started", sandbox=command.sandbox, command=work.number)
        try:
            output = await self._control_run(
                self.sandboxes[command.sandbox], argv, self._sweep_time
            )
            report = wire.parse_sweep(output, self.turn, run)
        except SandboxGone as error:
            # The turn's own drain asks again and takes the proof; nothing is left to stop here.
            log.debug("turn %s: command %d: %s", self.turn_id, work.number, error)
        except (ControlError, InvalidReport) as error:
            text = _text(error)
            self.emit("sweep_failed", sandbox=command.sandbox, command=work.number, error=text)
            if self._stop_gave_up(work, text):
                return
            self.feed(books.CommandSweepFailed(self.now(), work.number, text))
        else:
            self._tell(report, command.sandbox, work.failures + 1, command=work.number)
            proof = self.ledger.is_proof(report)
            if not proof and self._stop_gave_up(work, f"{report.verdict}, {report.snapshot}"):
                return
            self.feed(books.CommandSwept(self.now(), work.number, report))

    def _stop_gave_up(self, work: books.StopCommand, why: str) -> bool:
        if self.ledger.cancelled or self._here.now() < self._stop_until[work.number]:
            return False
        log.warning(
            "turn %s: command %d of a cancelled call could not be stopped (%s); "
            "it goes on until the turn is cancelled",
            self.turn_id,
            work.number,
            why,
        )
        return True

    def _tell(
        self, report: SweepReport, key: Key, attempt: int, *, command: int | None = None
    ) -> None:
        for process in report.processes:
            if not process.signals:
                continue
            self.emit(
                "process_stopped",
                sandbox=key,
                command=process.command,
                pid=process.pid,
                name=process.name,
                look=process.look,
                signals=" ".join(f"{name}@{at}" for name, at in process.signals),
                gone_at=process.gone_at,
                problem=process.problem,
            )
        self.emit(
            "sweep_reported",
            sandbox=key,
            command=command,
            attempt=attempt,
            verdict=report.verdict,
            containment=report.containment,
            snapshot=report.snapshot,
            scans=report.scans,
            unseen=report.unseen,
            elapsed_ms=report.elapsed_ms,
            processes=len(report.processes),
        )

    def _interrupt_pty(self, work: books.InterruptPty) -> None:
        command = self.ledger.commands[work.number]
        interrupt = self.sandboxes[command.sandbox].interrupt
        if interrupt is None:
            return
        self.emit(
            "pty_interrupted",
            command=work.number,
            call_id=command.call_id,
            sandbox=command.sandbox,
            session=work.session_id,
        )
        self._careless("Ctrl-C", lambda: interrupt(work.session_id))

    def _careless(self, name: str, call: Callable[[], Awaitable[Any]]) -> OwnedTask[Any]:
        """Own a call whose outcome decides nothing; its error is only logged."""
        task = self._own(name, call)

        def report() -> None:
            if task.error is not None and not task.cancelled:
                log.debug("turn %s: %s failed: %s", self.turn_id, name, _text(task.error))

        task.on_done(report)
        return task

    async def _control_run(
        self, sandbox: Sandbox, argv: Sequence[str], timeout: float
    ) -> ControlOutput:
        """Run a script over the control channel, bounded by `timeout` whatever the channel does.

        Raises:
            ControlError: it failed, for whatever reason, or did not answer in time.
            SandboxGone: as the channel says.
        """
        task = self._own("control run", lambda: sandbox.control.run(argv, timeout=timeout))
        output = await self._bounded(task, timeout, ControlError(f"no answer in {timeout:g} s"))
        if not isinstance(output, ControlOutput):
            raise ControlError(f"the channel returned {type(output).__name__}")
        return output

    async def _bounded(self, task: OwnedTask[T], timeout: float, late: FenceError) -> T:
        try:
            with anyio.move_on_after(timeout):
                await task.wait()
        finally:
            # Also when we are cancelled; `_owned` keeps it until it has really ended.
            if not task.done:
                task.cancel()
        if not task.done:
            raise late
        if task.error is None:
            return task.result()
        if isinstance(task.error, FenceError):
            raise task.error
        if task.cancelled:
            raise ControlError("the run was cancelled")
        raise ControlError(_text(task.error)) from task.error

    # Calls, adopted sessions, hooks.

    async def _call_grace(self) -> None:
        await anyio.sleep(self.policy.call_grace)
        self.feed(books.GraceOver(self.now()))

    async def _start_grace(self, key: Key) -> None:
        await anyio.sleep(self.policy.call_grace)
        self.feed(books.GraceOver(self.now(), key))
        await anyio.sleep(self.policy.call_grace)
        self.feed(books.CancelGraceOver(self.now(), key))

    async def _try_adopted(self, work: books.TryAdopted) -> None:
        if work.failures:
            await anyio.sleep(self._backoff(work.failures))
        sandbox = self.sandboxes[work.key]
        session = work.session_id
        if work.interrupt and (interrupt := sandbox.interrupt) is not None:
            self.emit("pty_interrupted", sandbox=work.key, session=session, adopted=True)
            self._careless("Ctrl-C", lambda: interrupt(session))
        exit_code = None
        if (probe := sandbox.probe) is not None:
            bound = self.policy.control_overhead
            task = self._own("probe", lambda: probe(session))
            try:
                answer = await self._bounded(task, bound, ControlError("no answer"))
                exit_code = answer if isinstance(answer, int) else None
            except FenceError as error:
                log.debug("turn %s: probe of session %d: %s", self.turn_id, session, error)
        self.feed(books.AdoptedTried(self.now(), work.key, session, exit_code))

    async def _run_hook(self, work: books.RunHook) -> None:
        if work.failures:
            await anyio.sleep(self._backoff(work.failures))
        name = self.ledger.hooks[work.index].name
        callback = self.hooks[work.index]
        self.emit("hook_started", name=name)
        begun = time.monotonic()

        async def run() -> None:
            await callback()

        task = self._own(f"hook {name}", run)
        try:
            await task.wait()
        finally:
            if not task.done:
                task.cancel()
        error = None if task.error is None else type(task.error).__name__
        elapsed = round((time.monotonic() - begun) * 1000)
        self.emit("hook_finished", name=name, elapsed_ms=elapsed, error=error)
        self.feed(books.HookTried(self.now(), work.index, elapsed, error))

    def _backoff(self, failures: int) -> float:
        if failures == 0:
            return 0.0
        # The exponent is capped: 2.0 ** 1024 overflows.
        return min(self.policy.retry_max, self.policy.retry_first * 2.0 ** min(failures - 1, 64))

    # The proof.

    def assemble(self, *, proven: bool, quiesced_at: float | None = None) -> QuiescenceReceipt:
        """Write down what the ledger knows."""
        books_ = self.ledger
        now = self.now()
        cancelled_at = books_.cancelled_at if books_.cancelled_at is not None else now
        boxes = [self._proof(box) for box in books_.used_sandboxes()]
        operations = books_.operations.values()
        return QuiescenceReceipt(
            turn_id=self.turn_id,
            turn=self.turn,
            proven=proven,
            reason=books_.reason,
            started_at=self.started_at,
            cancelled_at=cancelled_at,
            quiesced_at=quiesced_at,
            elapsed_ms=_ms((quiesced_at or now) - cancelled_at),
            containment=weakest([box.containment for box in boxes]),
            sandboxes=tuple(boxes),
            commands=tuple(_record(command) for command in books_.commands.values()),
            operations=OperationCounts(
                admitted=len(operations),
                settled=sum(op.state is books.OperationState.SETTLED for op in operations),
                cancelled=sum(op.ended_by_cancel for op in operations),
                rejected=books_.rejected,
            ),
            unsettled_starts=tuple(books_.unsettled_starts()),
            open_operations=tuple(_open(op, now) for op in books_.open_operations()),
            adopted=_sessions(books_, ended=True),
            adopted_open=_sessions(books_, ended=False),
            hooks=tuple(
                HookResult(h.name, h.state is books.StepState.DONE, h.elapsed_ms, h.error)
                for h in books_.hooks
            ),
            origin=self.origin,
        )

    def _proof(self, box: SandboxEntry) -> SandboxProof:
        notes = list(box.notes)
        containment = box.containment
        unmarked = [
            command.number
            for command in self.ledger.commands.values()
            if command.sandbox == box.key
            and command.marker is None
            and (command.session is not None or command.exit_code is not None)
        ]
        if unmarked and box.state is books.SandboxState.CLEAR:
            shown = ", ".join(str(n) for n in unmarked[:10])
            notes.append(
                f"no marker of command {shown}: removed, or the command saw another directory"
            )
            # Only its marker could have said that it bore the brand.
            if containment == "lineage":
                containment = "lineage-unbranded"
        if box.foreign and not box.processes and not self.ledger.commands:
            notes.append("no command of this turn was found here: is it the right id and sandbox?")
        return SandboxProof(
            provider=box.key[0],
            sandbox_id=box.key[1],
            proven=self.ledger.is_proven(box),
            containment=containment,
            snapshot=box.snapshot,
            scans=box.scans,
            unseen=box.unseen,
            control_runs=box.control_runs,
            stopped=tuple(_stopped(p) for p in box.processes.values()),
            errors=tuple(box.errors),
            notes=tuple(notes),
            evidence=box.evidence,
        )


class _EpochClock:
    """Time of day that does not jump when the system clock is set."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset + time.monotonic()


def _stopped(process: ProcessReport) -> StoppedProcess:
    return StoppedProcess(
        pid=process.pid,
        start=process.start,
        command=process.command,
        name=process.name,
        look=process.look,
        state=process.state,
        last_signal=process.signals[-1][0] if process.signals else None,
        signals=process.signals,
        gone_at=process.gone_at,
        problem=process.problem,
    )


_OUTCOMES: dict[
    books.CommandState, Literal["exited", "stopped", "unknown", "running", "starting"]
] = {
    books.CommandState.STARTING: "starting",
    books.CommandState.RUNNING: "running",
    books.CommandState.STOPPING: "running",
    books.CommandState.UNKNOWN: "unknown",
    books.CommandState.EXITED: "exited",
    books.CommandState.GONE: "stopped",
}


def _record(command: books.Command) -> CommandRecord:
    outcome: Literal["exited", "stopped", "refused", "failed", "unknown", "running", "starting"] = (
        _OUTCOMES[command.state]
    )
    marker = command.marker
    ran = marker is not None and marker.outcome == "run"
    if marker is not None and marker.outcome == "refused":
        outcome = "refused"
    elif (
        outcome in ("exited", "stopped")
        and not ran
        # Without a marker that says "run", 125 is the preamble's own word, not the command's.
        and (command.start_failed or command.exit_code == marks.Exit.PREAMBLE_FAILED)
    ):
        outcome = "failed"
    return CommandRecord(
        number=command.number,
        call_id=command.call_id,
        sandbox=_label(command.sandbox),
        pid=marker.pid if marker is not None else None,
        pgid=command.pgid,
        outcome=outcome,
        started_at=command.started_at if command.operation else None,
        ended_at=command.ended_at,
        exit_code=command.exit_code,
        tty=command.tty,
    )


def _open(op: Operation, now: float) -> OpenOperation:
    return OpenOperation(op.name, op.kind, op.call_id, _ms(now - op.admitted_at))


def _sessions(ledger: Ledger, *, ended: bool) -> tuple[int, ...]:
    return tuple(
        a.session for a in ledger.adopted.values() if (a.state is books.StepState.DONE) == ended
    )


def _label(key: Key) -> str:
    return f"{key[0]}:{key[1]}"


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))


def _text(error: BaseException) -> str:
    text = str(error)
    kind = "" if isinstance(error, FenceError) else f"{type(error).__name__}: "
    return f"{kind}{text}"[:_ERROR_CHARS]
