"""TurnFence: one turn's scope. Thin: it validates, admits calls, and waits for the drain.

All times are seconds (float).
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import math
import warnings
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, Protocol, Self, TypeVar, get_args, runtime_checkable

import anyio

from fence import ledger as books
from fence.control import SandboxCommandResult, SandboxControl
from fence.drain import Call, Drain, Sandbox
from fence.errors import ExtraMissing, FenceUsageError, QuiescenceTimeout, TurnCancelled
from fence.escalation import EscalationPolicy
from fence.events import EventSink
from fence.ledger import CommandState, OperationKind
from fence.lineage.marks import CommandMark, Exit, preamble_argv, turn_key
from fence.lineage.report import Containment, ProcessReport
from fence.receipt import QuiescenceReceipt
from fence.tasks import Home, Latch, OwnedTask, is_cancellation

__all__ = ["CommandOutcome", "OperationKind", "Sandbox", "TurnFence", "quiesce_turn"]

T = TypeVar("T")

log = logging.getLogger("fence")


@runtime_checkable
class WaitableEvent(Protocol):
    """What asyncio, anyio and trio events have in common."""

    async def wait(self) -> Any: ...


AwaitableOrEvent = Awaitable[Any] | WaitableEvent


@dataclass(frozen=True)
class CommandOutcome:
    """What a provider's call said of a command."""

    session_id: int | None
    """The provider's session id while the command runs."""
    exit_code: int | None
    """Set when the command ended."""


@dataclass(frozen=True)
class _Request:
    """A cancel: the first one counts."""

    at: float
    reason: str | None
    policy: EscalationPolicy | None


class TurnFence:
    """Everything that one agent turn starts, and the proof that it has stopped.

    Use it as an async context manager: leaving the block cancels and waits for quiescence. It may
    be left in another task than it was entered in, and used without the block. Calls belong to one
    running event loop at a time; `cancel()` may come from any thread or signal handler.

    Args:
        turn_id: the app's name for the turn; another process can name it by this. A random one for
            None. Not secret, but who knows it can stop the turn.
        cancel_on: an event (asyncio, anyio, trio) or an awaitable; the turn is cancelled when it is
            set, returns or raises. Watched from the first use on an event loop.
        policy: durations and caps of the stop.
        end_policy: the same for a turn that ends by itself; `policy` where it is None.
        require: refuse a sandbox with weaker containment before its first command.
        accept_sampled: whether a clear report over a merely sampled snapshot is a proof.
        brand: whether commands carry the CPU-limit mark; False gives a weaker containment.
        on_event: called with each FenceEvent, on the event loop; must not block. Errors are logged.

    Raises:
        FenceUsageError: a value of the wrong type or out of its range.
    """

    def __init__(
        self,
        *,
        turn_id: str | None = None,
        cancel_on: AwaitableOrEvent | None = None,
        policy: EscalationPolicy | None = None,
        end_policy: EscalationPolicy | None = None,
        require: Containment | None = None,
        accept_sampled: bool = True,
        brand: bool = True,
        on_event: EventSink | None = None,
    ) -> None:
        _check_policy("policy", policy)
        _check_policy("end_policy", end_policy)
        _check_bool("accept_sampled", accept_sampled)
        _check_bool("brand", brand)
        if require is not None and require not in get_args(Containment):
            raise FenceUsageError("require", require, "None or one of " + _CONTAINMENTS)
        if on_event is not None and not callable(on_event):
            raise FenceUsageError("on_event", on_event, "None or a callable")
        if cancel_on is not None and not _can_be_waited_for(cancel_on):
            raise FenceUsageError(
                "cancel_on",
                cancel_on,
                "an awaitable, or an asyncio, anyio or trio event (its wait() is async); from a "
                "thread call cancel()",
            )
        self.turn = turn_key(turn_id)
        self.turn_id = self.turn if turn_id is None else turn_id
        self._end_policy = end_policy
        self._cancel_on = cancel_on
        self._watcher: OwnedTask[None] | None = None
        # A list, not a lock: cancel() may interrupt us anywhere, as a signal handler does.
        self._requests: list[_Request] = []
        self._on_cancel: list[Callable[[], object]] = []
        self._drain = Drain(
            turn_id=self.turn_id,
            turn=self.turn,
            policy=policy or EscalationPolicy(),
            require=require,
            accept_sampled=accept_sampled,
            brand=brand,
            on_event=on_event,
        )

    # State.

    @property
    def cancelled(self) -> bool:
        """Whether the turn is cancelled: a request, not the fact that it is quiet."""
        return bool(self._requests)

    @property
    def reason(self) -> str | None:
        """The first cancel's reason."""
        return self._requests[0].reason if self._requests else None

    @property
    def receipt(self) -> QuiescenceReceipt | None:
        """The proof, once the turn is proven quiet."""
        return self._drain.receipt

    def __repr__(self) -> str:
        ledger = self._drain.ledger
        if self.receipt is not None:
            word = "quiet"
        elif self.cancelled:
            word = "closing"
        else:
            word = "open"
        counts = {
            "running": ledger.count(CommandState.RUNNING),
            "starting": ledger.count(CommandState.STARTING),
            "stopping": ledger.count(CommandState.STOPPING),
            "unknown": ledger.count(CommandState.UNKNOWN),
            "in flight": sum(op.kind not in ("start",) for op in ledger.open_operations()),
        }
        if self.cancelled:
            counts["unproven"] = len(ledger.open_sandboxes())
        parts = [word, *(f"{n} {what}" for what, n in counts.items() if n)]
        return f"<TurnFence turn={self.turn[:8]} {', '.join(parts)}>"

    def __del__(self) -> None:
        drain = getattr(self, "_drain", None)
        if drain is not None and drain.ledger.operations and drain.receipt is None:
            message = (
                f"{self!r} was dropped before its turn was proven quiet; "
                f"use `async with` or await wait_for_quiescence()"
            )
            # Python hides ResourceWarning by default, and somebody has to act.
            log.warning(message)
            warnings.warn(message, ResourceWarning, stacklevel=1, source=self)

    # Stopping.

    def cancel(self, reason: str | None = None) -> bool:
        """Refuse new calls from now on and start to stop the turn in the background.

        Synchronous, idempotent, from any thread or signal handler. Says nothing about whether
        anything has stopped: that is what `wait_for_quiescence()` returns.

        Returns:
            True for the first cancel, whose reason counts.
        """
        if reason is not None and not isinstance(reason, str):
            raise FenceUsageError("reason", reason, "None or a str")
        return self._request(reason, None)

    def _request(self, reason: str | None, policy: EscalationPolicy | None) -> bool:
        if self._requests:
            return False
        request = _Request(self._drain.now(), reason, policy)
        self._requests.append(request)
        if self._requests[0] is not request:
            return False
        home = self._drain.home
        if home is not None:
            home.call_soon(self._apply_cancel)
        return True

    def _apply_cancel(self) -> None:
        """Bring a cancel into the ledger; on the home loop."""
        if not self._requests or self._drain.ledger.cancelled:
            return
        request = self._requests[0]
        if request.policy is not None:
            self._drain.policy = request.policy
        self._drain.cancel(request.at, request.reason)
        callbacks, self._on_cancel = self._on_cancel, []
        for callback in callbacks:
            _call(callback)
        if self._watcher is not None:
            self._watcher.cancel()

    async def wait_for_quiescence(self, timeout: float | None = None) -> QuiescenceReceipt:
        """Return the receipt once nothing of the turn runs and nothing can start; cancels first.

        Any number of tasks may wait. Cancelling one ends only its wait: the drain goes on. After
        QuiescenceTimeout it may be awaited again, also on a new event loop when the old is over.

        Args:
            timeout: seconds from now, 0 or more; the policy's deadline for None.

        Raises:
            QuiescenceTimeout: not proven in time. The fence stays closed.
            FenceUsageError: `timeout` is no such number; nothing was cancelled.
        """
        if timeout is not None:
            _check_timeout("timeout", timeout)
        self.cancel()
        if self.receipt is not None:
            return self.receipt
        home = self._drain.home
        if home is None or home.is_current() or not home.is_alive():
            self._settle_down()
            return await self._wait(timeout)
        return await self._wait_from_afar(home, timeout)

    async def _wait(self, timeout: float | None) -> QuiescenceReceipt:
        self._apply_cancel()
        return await self._drain.wait(self._drain.policy.deadline if timeout is None else timeout)

    async def _wait_from_afar(self, home: Home, timeout: float | None) -> QuiescenceReceipt:
        """Wait from another running event loop: the drain stays on the home loop."""
        policy = self._drain.policy
        give_up = anyio.current_time() + (policy.deadline if timeout is None else timeout)
        answer: list[OwnedTask[QuiescenceReceipt]] = []
        done = Latch()

        def start() -> None:
            task = home.spawn(lambda: self._wait(timeout), name=f"fence {self.turn[:8]} wait")
            answer.append(task)
            task.on_done(done.set)

        if home.call_soon(start):
            # A home that stops in the middle answers nothing.
            with anyio.CancelScope(deadline=give_up + 2 * policy.call_grace):
                await done.wait()
        if answer and answer[0].done and not answer[0].cancelled:
            return answer[0].result()
        left = max(0.0, give_up - anyio.current_time())
        if left == 0 and home.is_alive():
            raise QuiescenceTimeout(self._drain.assemble(proven=False))
        # The home is going down: look again in a moment whether it is over.
        await anyio.sleep(min(left, policy.retry_first))
        return await self.wait_for_quiescence(left)

    async def running(self) -> tuple[ProcessReport, ...]:
        """Return the turn's processes that are alive or could not be looked at, as of now.

        One look-only control run per sandbox that the turn has used; sends no signal.

        Raises:
            ControlError: a sandbox could not be asked.
            InvalidReport: it answered something that is not our protocol.
        """
        self._settle_down()
        return await self._drain.look()

    def on_quiesce(
        self, callback: Callable[[], Awaitable[None]], *, name: str | None = None
    ) -> None:
        """Register the app's own stop-and-prove step for what no sweep can see.

        It is called when the turn is cancelled, beside the sweeps; the turn is quiet only after it
        has returned. One that raises is called again, with a backoff, until the deadline: make it
        safe to repeat. `name` stands in the receipt.

        Raises:
            TurnCancelled: the turn is cancelled already.
            FenceUsageError: `callback` is not callable.
        """
        self.check_open()
        if not callable(callback):
            raise FenceUsageError("callback", callback, "a callable that returns an awaitable")
        self._drain.hooks.append(callback)
        shown = name or str(getattr(callback, "__qualname__", type(callback).__name__))
        self._drain.feed(books.HookAdded(self._drain.now(), shown))

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Call `callback` once, on the event loop, as soon as the turn is cancelled.

        The fence stops what the turn started, not who drives it: give it the run's own cancel,
        `fence.on_cancel(result.cancel)` or `fence.on_cancel(task.cancel)`. At once where the turn
        is cancelled already. It must not block; its error is logged.

        Raises:
            FenceUsageError: `callback` is not callable.
        """
        if not callable(callback):
            raise FenceUsageError("callback", callback, "a callable without arguments")
        self._settle_down()
        if self._drain.ledger.cancelled:
            _call(callback)
        else:
            self._on_cancel.append(callback)

    async def __aenter__(self) -> Self:
        if self.receipt is not None:
            self.check_open()
        self._settle_down()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None:
            self._request("turn ended", self._end_policy)
        else:
            self._request(f"turn ended by {type(exc).__name__}", None)
        if isinstance(exc, GeneratorExit):
            return  # the coroutine is being thrown away: it may not await any more
        interruption, failure = await self._wait_through_cancellation()
        if failure is not None and (exc is not None or interruption is not None):
            log.error("%s", failure)
            # The body's exception wins; the missing proof travels with it.
            (exc or interruption or failure).add_note(str(failure))
        if exc is not None:
            return
        if interruption is not None:
            raise interruption
        if failure is not None:
            raise failure

    async def _wait_through_cancellation(
        self,
    ) -> tuple[BaseException | None, QuiescenceTimeout | None]:
        """Wait for the drain, bounded by the deadline; return the first cancel that came."""
        interruption: BaseException | None = None
        give_up = anyio.current_time() + self._deadline()
        while True:
            left = max(0.0, give_up - anyio.current_time())
            try:
                # The shield holds trio and anyio scopes off; asyncio's Task.cancel() gets through.
                with anyio.CancelScope(shield=True):
                    await self.wait_for_quiescence(left)
                return interruption, None
            except QuiescenceTimeout as failure:
                return interruption, failure
            except BaseException as error:
                if not is_cancellation(error):
                    raise
                interruption = interruption or error

    def _deadline(self) -> float:
        return (self._requests[0].policy or self._drain.policy).deadline

    # For adapters.

    def check_open(self) -> None:
        """Do nothing while the turn goes on.

        Raises:
            TurnCancelled: it is cancelled.
        """
        if self.cancelled:
            raise TurnCancelled(self.turn_id, self.reason)

    def bind_sandbox(
        self,
        control: SandboxControl,
        *,
        interrupt: Callable[[int], Awaitable[None]] | None = None,
        probe: Callable[[int], Awaitable[int | None]] | None = None,
    ) -> Sandbox:
        """Make a sandbox known to the turn; the same value for equal (provider, sandbox_id).

        Args:
            control: how scripts run in it; it must go on working after the session is closed.
            interrupt: writes Ctrl-C to the PTY of a provider session id.
            probe: the exit code of a session once it ended, else None. The newest callbacks win.

        Raises:
            TurnCancelled: the turn is cancelled.
            FenceUsageError: `control` does not fulfil SandboxControl.
        """
        self.check_open()
        # The protocol's names are there on the class, too.
        if isinstance(control, type) or not isinstance(control, SandboxControl):
            raise FenceUsageError("control", control, "a SandboxControl")
        key = (control.provider, control.sandbox_id)
        sandbox = self._drain.sandboxes.get(key)
        if sandbox is None:
            sandbox = self._drain.sandboxes[key] = Sandbox(key, control)
        sandbox.control = control
        sandbox.interrupt = interrupt or sandbox.interrupt
        sandbox.probe = probe or sandbox.probe
        self._bound(sandbox)
        return sandbox

    def _bound(self, sandbox: Sandbox) -> None:
        able = sandbox.interrupt is not None
        self._drain.feed(books.SandboxBound(self._drain.now(), sandbox.key, able))

    async def session_closed(self, sandbox: Sandbox) -> None:
        """Note that the provider's session object is closed; its control must go on working.

        From now on its callbacks are not called; an adopted session can no longer be proved ended.
        """
        sandbox.interrupt = None
        sandbox.probe = None
        self._bound(sandbox)

    async def start_command(
        self,
        sandbox: Sandbox,
        argv: Sequence[str],
        start: Callable[[list[str]], Awaitable[T]],
        outcome: Callable[[T], CommandOutcome],
        *,
        call_id: str | None = None,
        tty: bool = False,
    ) -> T:
        """Start `argv` as a marked command of the turn and return what `start` returned.

        `start` gets the argument vector to run and is called in a task of the fence's. A caller
        that is cancelled before the return gets its cancellation at once; the command, which
        nobody can name any more, is then stopped at once.

        Raises:
            TurnCancelled: the turn is, or was meanwhile, cancelled. Before `start` is called there
                is no side effect.
            SandboxNotReady, ContainmentTooWeak, SandboxGone: nothing was started.
        """
        if isinstance(argv, str) or not argv or not all(isinstance(word, str) for word in argv):
            raise FenceUsageError("argv", argv, "a non-empty sequence of str")
        drain = self._drain

        async def body(op: int) -> T:
            report = await drain.prepared(sandbox)
            self._apply_cancel()
            number = None
            for work in drain.feed(books.StartReady(drain.now(), op, tty)):
                if isinstance(work, books.BeginStart):
                    number = work.number
            if number is None:
                raise TurnCancelled(self.turn_id, self.reason)
            mark = CommandMark(
                turn=self.turn,
                number=number,
                directory=report.directory,
                uid=report.uid,
                namespace=report.namespace,
                branded=report.brand and drain.brand,
            )
            words = preamble_argv(mark, argv)
            drain.emit(
                "command_starting", command=number, call_id=call_id, sandbox=sandbox.key, tty=tty
            )
            result = await start(words)
            self._start_returned(op, number, call_id, sandbox, outcome, result)
            return result

        return await self._run("start", "start", body, call_id, sandbox)

    def _start_returned(
        self,
        op: int,
        number: int,
        call_id: str | None,
        sandbox: Sandbox,
        outcome: Callable[[T], CommandOutcome],
        result: T,
    ) -> None:
        drain = self._drain
        said = _read_outcome(outcome, result)
        if said.exit_code == Exit.PREAMBLE_FAILED:
            # Perhaps the directory of markers is gone (or it is the command's own 125): look anew.
            sandbox.prepared = None
        if drain.receipt is not None and said.exit_code not in (
            Exit.REFUSED,
            Exit.PREAMBLE_FAILED,
        ):
            log.error(
                "turn %s: command %d was started after the turn was proven quiet: somebody removed "
                "its tombstone; stop it with quiesce_turn()",
                self.turn_id,
                number,
            )
        drain.feed(books.StartReturned(drain.now(), op, said.session_id, said.exit_code))
        if said.exit_code is not None:
            drain.emit(
                "command_exited",
                command=number,
                call_id=call_id,
                sandbox=sandbox.key,
                exit_code=said.exit_code,
            )
        elif said.session_id is not None:
            drain.emit(
                "command_running",
                command=number,
                call_id=call_id,
                sandbox=sandbox.key,
                session=said.session_id,
            )

    async def write_stdin(
        self,
        sandbox: Sandbox,
        session_id: int,
        call: Callable[[], Awaitable[T]],
        outcome: Callable[[T], CommandOutcome],
        *,
        call_id: str | None = None,
    ) -> T:
        """Run a write to, or a poll of, a command's session.

        A session id that the fence did not start is adopted: on cancel it is sent Ctrl-C and asked
        until the provider says that it ended.

        Raises:
            TurnCancelled: the turn is, or was meanwhile, cancelled.
        """
        drain = self._drain

        async def body(_op: int) -> T:
            result = await call()
            said = _read_outcome(outcome, result)
            if said.exit_code is not None:
                command = drain.ledger.command_of(sandbox.key, session_id)
                news = command is None or command.exit_code is None
                drain.feed(
                    books.StdinReturned(drain.now(), sandbox.key, session_id, said.exit_code)
                )
                if news:
                    drain.emit(
                        "command_exited",
                        command=command.number if command is not None else None,
                        call_id=call_id,
                        sandbox=sandbox.key,
                        session=session_id,
                        exit_code=said.exit_code,
                    )
            return result

        return await self._run("write_stdin", "stdin", body, call_id, sandbox, session_id)

    async def run_operation(
        self,
        name: str,
        kind: OperationKind,
        call: Callable[[], Awaitable[T]],
        *,
        call_id: str | None = None,
        sandbox: Sandbox | None = None,
    ) -> T:
        """Run any other capability call in a task of the fence's and return what it returned.

        A caller that is cancelled gets its cancellation at once. It is passed on to the call,
        except for the kinds `file` and `thread`, which go on and are waited for when the turn ends.

        Raises:
            TurnCancelled: the turn is cancelled, or the call was ended because it was.
        """
        if kind not in get_args(OperationKind) or kind in ("start", "stdin"):
            raise FenceUsageError("kind", kind, "an OperationKind other than start and stdin")
        return await self._run(name, kind, lambda _op: call(), call_id, sandbox)

    async def _run(
        self,
        name: str,
        kind: OperationKind,
        body: Callable[[int], Awaitable[T]],
        call_id: str | None,
        sandbox: Sandbox | None,
        session: int | None = None,
    ) -> T:
        call = self._admit(name, kind, body, call_id, sandbox, session)
        drain = self._drain
        try:
            await call.released.wait()
        except BaseException:
            if drain.home is None or not drain.home.is_current():
                raise  # thrown away with its closed loop
            drain.emit(
                "caller_lost",
                command=drain.ledger.operations[call.op].command,
                call_id=call_id,
                name=name,
            )
            drain.feed(books.CallerLost(drain.now(), call.op))
            raise
        task: OwnedTask[T] = call.task
        ended_by_us = not task.done or (task.cancelled and task.cancel_called)
        if self.cancelled and (ended_by_us or kind in ("start", "stdin")):
            raise TurnCancelled(self.turn_id, self.reason) from task.error
        return task.result()

    def _admit(
        self,
        name: str,
        kind: OperationKind,
        body: Callable[[int], Awaitable[T]],
        call_id: str | None,
        sandbox: Sandbox | None,
        session: int | None,
    ) -> Call:
        drain = self._drain
        self._settle_down()
        self._apply_cancel()
        work = drain.feed(
            books.CallArrived(
                drain.now(),
                name,
                kind,
                call_id,
                sandbox.key if sandbox is not None else None,
                session,
            )
        )
        begin = work[0]
        if not isinstance(begin, books.BeginCall):
            drain.emit("operation_refused", call_id=call_id, name=name, operation=kind)
            raise TurnCancelled(self.turn_id, self.reason)
        op = begin.op
        drain.emit("operation_admitted", call_id=call_id, name=name, operation=kind)
        return drain.own_call(op, name, kind, lambda: body(op))

    def _settle_down(self) -> None:
        """Make the running loop the home; on the first one, look after what waited for a loop."""
        drain = self._drain
        before = drain.home
        here = Home.current()
        if before is not None and before != here and before.is_alive():
            raise FenceUsageError(
                "event loop", here, "the one on which the fence was first used, while it runs"
            )
        drain.settle_down()
        if drain.home != before:
            self._watcher = None
            self._watch()
            self._apply_cancel()

    def _watch(self) -> None:
        if self._cancel_on is None or self.cancelled or self._drain.home is None:
            return
        target, fence = self._cancel_on, weakref.ref(self)

        async def watch() -> None:
            reason = await _wait_for(target)
            if (alive := fence()) is not None and reason is not None:
                alive.cancel(reason)

        self._watcher = self._drain.home.spawn(watch, name=f"fence {self.turn[:8]} cancel_on")

    # Adapters, loaded when they are used: the core has no SDK.

    def wrap_tools(self, tools: Sequence[Any], session: Any = None) -> list[Any]:
        """Return the tools, each as a copy that passes through the fence.

        Objects that are no tool of the SDK, and hosted tools, are returned as they are.

        Raises:
            TurnCancelled: the turn is cancelled.
            ExtraMissing: openai-agents is not installed.
        """
        wrapped: list[Any] = self._adapter().wrap_tools(self, tools, session)
        return wrapped

    def wrap_capability(self, capability: T) -> T:
        """Return the capability as a copy whose tools and session pass through the fence.

        Raises:
            TurnCancelled, ExtraMissing: as `wrap_tools`.
        """
        wrapped: T = self._adapter().wrap_capability(self, capability)
        return wrapped

    def wrap_capabilities(self, capabilities: Sequence[Any]) -> list[Any]:
        """Return each capability as `wrap_capability` does.

        Raises:
            TurnCancelled, ExtraMissing: as `wrap_tools`.
        """
        wrapped: list[Any] = self._adapter().wrap_capabilities(self, capabilities)
        return wrapped

    def wrap_mcp_server(self, server: T) -> T:
        """Return an MCP server whose tool calls pass through the fence.

        Raises:
            TurnCancelled, ExtraMissing: as `wrap_tools`.
        """
        wrapped: T = self._adapter().wrap_mcp_server(self, server)
        return wrapped

    def wrap_session(self, session: Any) -> Any:
        """Return a sandbox session whose operations pass through the fence.

        Raises:
            TurnCancelled, ExtraMissing: as `wrap_tools`.
        """
        return self._adapter().wrap_session(self, session)

    async def run_sandbox_command(
        self,
        session: Any,
        cmd: str | Sequence[str],
        *,
        shell: bool = True,
        user: Any = None,
        timeout: float | None = None,
    ) -> SandboxCommandResult:
        """Run a command of the app's own (set-up, checks) inside the turn and return its result.

        Args:
            session: a sandbox session of the SDK, wrapped or not.
            cmd: shell text, or a sequence of words.
            shell: as for the SDK's `exec`.
            user: as for the SDK's `exec`.
            timeout: seconds until the command is stopped; none for None.

        Raises:
            TurnCancelled: the turn is, or was meanwhile, cancelled.
            ExtraMissing: openai-agents is not installed.
        """
        if timeout is not None:
            _check_timeout("timeout", timeout)
        result: SandboxCommandResult = await self._adapter().run_sandbox_command(
            self, session, cmd, shell=shell, user=user, timeout=timeout
        )
        return result

    def _adapter(self) -> ModuleType:
        self.check_open()
        return _load_adapter()


async def quiesce_turn(
    session_or_control: Any,
    turn_id: str,
    *,
    policy: EscalationPolicy | None = None,
    timeout: float | None = None,
    accept_sampled: bool = True,
    on_event: EventSink | None = None,
) -> QuiescenceReceipt:
    """Stop a turn that another process started, and prove it; only its id is needed.

    For a new worker that takes over from a dead one, or a supervisor. Leaves a tombstone, so a
    start that is still under way somewhere is refused. The receipt's `origin` is `other-process`:
    it proves the sandbox, not the calls that the other process had in flight.

    Args:
        session_or_control: a SandboxControl, or a sandbox session of the OpenAI Agents SDK.
        turn_id: as it was given to TurnFence, or its `turn`.
        policy: as for TurnFence.
        timeout: seconds, 0 or more; the policy's deadline for None.
        accept_sampled: as for TurnFence.
        on_event: as for TurnFence.

    Raises:
        QuiescenceTimeout: not proven in time; nothing goes on in the background then.
        FenceUsageError: a bad value, or a session for which there is no control channel.
        ExtraMissing: a session was passed and openai-agents is not installed.
    """
    if not isinstance(turn_id, str) or not turn_id:
        raise FenceUsageError("turn_id", turn_id, "a non-empty str")
    if timeout is not None:
        _check_timeout("timeout", timeout)
    fence = TurnFence(
        turn_id=turn_id, policy=policy, accept_sampled=accept_sampled, on_event=on_event
    )
    control = session_or_control
    if not isinstance(control, SandboxControl):
        control = _load_adapter().control_for(session_or_control)
    sandbox = fence.bind_sandbox(control)
    drain = fence._drain
    drain.origin = "other-process"
    drain.feed(books.LeftoversAssumed(drain.now(), sandbox.key))
    fence.cancel("quiesced from another process")
    try:
        return await fence.wait_for_quiescence(timeout)
    finally:
        drain.stop_early()  # nobody else can wait for this one


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception:
        log.exception("an on_cancel callback raised")


_CONTAINMENTS = ", ".join(get_args(Containment))


def _load_adapter() -> ModuleType:
    try:
        return importlib.import_module("fence.openai_agents")
    except ImportError as error:
        # The adapter may say it in words of its own; the module that is absent is in the cause.
        for e in (error, error.__cause__):
            if isinstance(e, ImportError) and (e.name or "").partition(".")[0] == "agents":
                raise ExtraMissing("openai-agents") from error
        raise


def _read_outcome(outcome: Callable[[T], CommandOutcome], result: T) -> CommandOutcome:
    # The command may well run: a result that cannot be read means unknown, not an error.
    try:
        return outcome(result)
    except Exception:
        log.debug("the outcome of a provider call could not be read", exc_info=True)
        return CommandOutcome(None, None)


async def _wait_for(target: AwaitableOrEvent) -> str | None:
    """Wait for a `cancel_on` and return the reason to cancel; None where we were told to stop."""
    try:
        if isinstance(target, asyncio.Future):
            # Awaiting it would cancel the app's own future together with us.
            await asyncio.wait({target})
            target.result()
        elif inspect.isawaitable(target):
            await target
        else:
            await target.wait()
    except Exception as error:  # noqa: BLE001 - whatever it is, the turn has to stop
        log.warning("cancel_on raised %s, so the turn is cancelled", type(error).__name__)
        return f"cancel_on raised {type(error).__name__}"
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return "cancel_on raised CancelledError"
    return "cancel_on was set"


def _can_be_waited_for(value: object) -> bool:
    if inspect.isawaitable(value):
        return True
    wait = getattr(value, "wait", None)
    # threading.Event has a wait(), too: it would hold the event loop.
    return not isinstance(value, type) and inspect.iscoroutinefunction(wait)


def _check_policy(name: str, value: object) -> None:
    if value is not None and not isinstance(value, EscalationPolicy):
        raise FenceUsageError(name, value, "None or an EscalationPolicy")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise FenceUsageError(name, value, "True or False")


def _check_timeout(name: str, value: object) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value < 0
    ):
        raise FenceUsageError(name, value, "a number of seconds, 0 or more")
