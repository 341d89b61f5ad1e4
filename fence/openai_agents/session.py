"""A sandbox session whose every operation passes through a fence.

All times are seconds (float).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from agents.sandbox.errors import PtySessionNotFoundError
from agents.sandbox.session import SandboxSession
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.pty_types import PtyExecUpdate
from agents.sandbox.types import ExecResult, User

from fence.errors import FenceUsageError
from fence.openai_agents import internals
from fence.openai_agents.correlation import current_call_id
from fence.providers import control_for_session
from fence.turn import CommandOutcome

if TYPE_CHECKING:
    from fence.control import SandboxControl
    from fence.turn import Sandbox, TurnFence

Interrupt = Callable[[], Awaitable[None]]
Probe = Callable[[], Awaitable[int | None]]

ENDED_WITHOUT_CODE = -1
"""What a probe answers where the provider says only that the command ended."""

_CTRL_C = "\x03"
_SHORTEST_YIELD = 0.0


class SessionDirectory:
    """The provider sessions of one sandbox as one fence names them.

    Two SDK sessions on one host draw their numbers independently and may use the same one for
    two commands; the fence needs a name that stands for one command. It is the provider's number
    wherever that is still free.
    """

    def __init__(self) -> None:
        self.foreign = object()
        """Owner of the sessions that tools of other makers opened in this sandbox."""
        self._names: dict[tuple[int, int], int] = {}
        self._entries: dict[int, tuple[object, Interrupt, Probe]] = {}
        self._fresh = count(1_000_000_000)

    def started(self, owner: object, number: int, interrupt: Interrupt, probe: Probe) -> int:
        """Return a new name for the session that `owner` has just opened as `number`."""
        name = number if number not in self._entries else next(self._fresh)
        self._names[id(owner), number] = name
        # The owner is kept alive with the entry, so that its id() cannot come back as another's.
        self._entries[name] = (owner, interrupt, probe)
        return name

    def known(self, owner: object, number: int, interrupt: Interrupt, probe: Probe) -> int:
        """Return the name of `owner`'s session `number`, a new one where it was never seen."""
        name = self._names.get((id(owner), number))
        return self.started(owner, number, interrupt, probe) if name is None else name

    async def interrupt(self, name: int) -> None:
        """Write Ctrl-C to the session's terminal; quiet where the session is already gone."""
        entry = self._entries.get(name)
        if entry is not None:
            await entry[1]()

    async def probe(self, name: int) -> int | None:
        """Return the session's exit code once it has ended, None while it runs."""
        entry = self._entries.get(name)
        return ENDED_WITHOUT_CODE if entry is None else await entry[2]()


_directories: WeakKeyDictionary[TurnFence, dict[tuple[str, str], SessionDirectory]] = (
    WeakKeyDictionary()
)


def bind(fence: TurnFence, session: BaseSandboxSession) -> tuple[Sandbox, SessionDirectory]:
    """Bind the sandbox under `session` to the fence; the same one twice is the same sandbox.

    Raises:
        TurnCancelled: the turn is cancelled; no control channel was opened.
    """
    fence.check_open()
    control = control_for(session)
    key = (control.provider, control.sandbox_id)
    directory = _directories.setdefault(fence, {}).setdefault(key, SessionDirectory())
    sandbox = fence.bind_sandbox(control, interrupt=directory.interrupt, probe=directory.probe)
    return sandbox, directory


def control_for(session: object) -> SandboxControl:
    """Return the control channel of the sandbox under a session, wrapped or not.

    Raises:
        FenceUsageError: `session` is no sandbox session of the SDK, or no provider knows it.
    """
    control = control_for_session(internals.innermost(_checked(session)))
    if control is None:
        raise FenceUsageError("session", session, "a session that an installed provider knows")
    return control


def provider_callbacks(session: BaseSandboxSession, number: int) -> tuple[Interrupt, Probe]:
    """Return how to interrupt and how to look at the provider's session `number`."""
    # The provider's own session: an outer fence that is closed must not refuse our Ctrl-C.
    provider = internals.innermost(session)

    async def interrupt() -> None:
        try:
            await provider.pty_write_stdin(
                session_id=number, chars=_CTRL_C, yield_time_s=_SHORTEST_YIELD
            )
        except PtySessionNotFoundError:
            return

    async def probe() -> int | None:
        seen = internals.peek_session(provider, number)
        if seen is not None:
            ended, code = seen
            if not ended:
                return None
            return ENDED_WITHOUT_CODE if code is None else code
        try:
            update = await provider.pty_write_stdin(
                session_id=number, chars="", yield_time_s=_SHORTEST_YIELD
            )
        except PtySessionNotFoundError:
            return ENDED_WITHOUT_CODE
        return update.exit_code

    return interrupt, probe


class FencedSandboxSession(internals.DelegatingSession):
    """A session that lets every operation on the sandbox pass through a fence.

    Results, errors, timeouts and audit events are those of the wrapped session. Lifecycle
    methods (start, stop, shutdown, aclose, running, ...) go straight to it and stay allowed
    after the cancel; everything else raises TurnCancelled then, before any side effect.

    A cancelled caller gets its CancelledError at once; the operation stays in the fence's hands,
    and a command that was being started is stopped.
    """

    def __init__(self, fence: TurnFence, wrapped: BaseSandboxSession) -> None:
        super().__init__(wrapped)
        self.fence = fence

    def __repr__(self) -> str:
        return f"<FencedSandboxSession of {type(self._inner).__name__}, {self.fence!r}>"

    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        """Start a command of the turn; terminal and yield time stay what was asked for.

        Raises:
            TurnCancelled: the turn was cancelled before the start, or while it was under way.
        """
        sandbox, directory = bind(self.fence, self)
        argv = internals.prepare_command(self, command, shell)

        async def start(marked: list[str]) -> PtyExecUpdate:
            try:
                return await self.wrapped.pty_exec_start(
                    *marked,
                    timeout=timeout,
                    shell=False,
                    user=user,
                    tty=tty,
                    yield_time_s=yield_time_s,
                    max_output_tokens=max_output_tokens,
                )
            except Exception as error:
                internals.restore_command(error, marked, argv)
                raise

        def outcome(update: PtyExecUpdate) -> CommandOutcome:
            number = update.process_id
            if number is None or update.exit_code is not None:
                return CommandOutcome(session_id=None, exit_code=update.exit_code)
            name = directory.started(self._inner, number, *provider_callbacks(self, number))
            return CommandOutcome(session_id=name, exit_code=None)

        return await self.fence.start_command(
            sandbox, argv, start, outcome, call_id=current_call_id(), tty=tty
        )

    async def exec(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
    ) -> ExecResult:
        """Run a command of the turn to its end; its timeout is the wrapped session's.

        Raises:
            TurnCancelled: the turn was cancelled before the start, or while it ran.
        """
        sandbox, _directory = bind(self.fence, self)
        argv = internals.prepare_command(self, command, shell)

        async def start(marked: list[str]) -> ExecResult:
            try:
                return await internals.exec_marked(
                    self.wrapped, marked, command, timeout=timeout, shell=shell, user=user
                )
            except Exception as error:
                internals.restore_command(error, marked, argv)
                raise

        def outcome(result: ExecResult) -> CommandOutcome:
            return CommandOutcome(session_id=None, exit_code=result.exit_code)

        return await self.fence.start_command(
            sandbox, argv, start, outcome, call_id=current_call_id()
        )

    async def pty_write_stdin(
        self,
        *,
        session_id: int,
        chars: str,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        """Write to a command, or poll it; one that this fence did not start is adopted.

        Raises:
            TurnCancelled: the turn was cancelled before the call, or while it waited.
        """
        sandbox, directory = bind(self.fence, self)
        name = directory.known(self._inner, session_id, *provider_callbacks(self, session_id))

        async def call() -> PtyExecUpdate:
            return await self.wrapped.pty_write_stdin(
                session_id=session_id,
                chars=chars,
                yield_time_s=yield_time_s,
                max_output_tokens=max_output_tokens,
            )

        def outcome(update: PtyExecUpdate) -> CommandOutcome:
            if update.exit_code is not None:
                return CommandOutcome(session_id=None, exit_code=update.exit_code)
            return CommandOutcome(session_id=name, exit_code=None)

        return await self.fence.write_stdin(sandbox, name, call, outcome, call_id=current_call_id())


def _file_operation(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    forward = getattr(internals.DelegatingSession, name)

    async def operation(self: FencedSandboxSession, *args: Any, **kwargs: Any) -> Any:
        return await self.fence.run_operation(
            name, "file", lambda: forward(self, *args, **kwargs), call_id=current_call_id()
        )

    operation.__name__ = name
    operation.__qualname__ = f"FencedSandboxSession.{name}"
    return operation


for _name in internals.operation_names():
    setattr(FencedSandboxSession, _name, _file_operation(_name))


def wrap_session(fence: TurnFence, session: BaseSandboxSession) -> FencedSandboxSession:
    """Return a session bound to the fence; wrapping twice with one fence gives the same object.

    Raises:
        TurnCancelled: the turn is cancelled already.
        FenceUsageError: `session` is no sandbox session of the SDK.
    """
    layer: object = _checked(session)
    fence.check_open()
    while isinstance(layer, internals.DelegatingSession):
        if isinstance(layer, FencedSandboxSession) and layer.fence is fence:
            return cast(FencedSandboxSession, session)
        layer = layer.wrapped
    return FencedSandboxSession(fence, session)


def _checked(session: object) -> BaseSandboxSession:
    if not isinstance(session, BaseSandboxSession):
        raise FenceUsageError("session", session, "a sandbox session of the OpenAI Agents SDK")
    return session


__all__ = ["FencedSandboxSession", "SandboxSession", "control_for", "wrap_session"]
