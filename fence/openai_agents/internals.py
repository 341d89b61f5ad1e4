"""The only file that touches private names of the OpenAI Agents SDK.

Each name used here is held by a test in tests/openai_agents/test_internals.py that says what
changed when a new SDK version moves it. Written against openai-agents 0.24.
"""

from __future__ import annotations

import asyncio
import inspect
import shlex
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Self, TypeGuard, TypeVar, cast

from agents.sandbox.errors import ExecFailureError
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.sandbox_session import (
    SandboxSession,
    _exec_finish_data,
    _exec_start_data,
    instrumented_op,
)
from agents.sandbox.types import ExecResult, User
from agents.tool import (
    _SYNC_FUNCTION_TOOL_MARKER,
    ComputerTool,
    FunctionTool,
    _FailureHandlingFunctionToolInvoker,
    _get_computer_initializer,
    _is_computer_provider,
)
from agents.tool_context import ToolContext

T = TypeVar("T")
Around = Callable[[Any, str, Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""Runs a tool call: gets the SDK's context of the call, its raw input and the call itself."""

LIFECYCLE = frozenset(
    {
        "__aenter__",
        "__aexit__",
        "_aclose_dependencies",
        "_aclose_impl",
        "_resolve_exposed_port",
        "_run_pre_stop_hooks",
        "_terminate_ambiguous_mount_transition",
        "_validate_manifest_application",
        "aclose",
        "pty_terminate_all",
        "resolve_exposed_port",
        "run_pre_stop_hooks",
        "running",
        "shutdown",
        "start",
        "stop",
    }
)
"""Coroutine methods of a session that end, start or only look: allowed after the cancel."""

_NOT_FORWARDED = frozenset({"_inner", "_instrumentation", "_seq", "state"})


def innermost(session: BaseSandboxSession) -> BaseSandboxSession:
    """Return the provider's own session under all wrappers."""
    seen: set[int] = set()
    while isinstance(session, SandboxSession) and id(session) not in seen:
        seen.add(id(session))
        session = session._inner
    return session


class DelegatingSession(SandboxSession):
    """A session that forwards every name to another one, which does its own instrumentation.

    `_inner` is the provider's session, as the SDK's clients expect (they delete by it);
    `wrapped` is the session that the calls go to. `SandboxSession.__init__` is not called: it
    would replace the dependencies and bind the audit sinks a second time.
    """

    def __init__(self, wrapped: BaseSandboxSession) -> None:
        self.wrapped = wrapped
        self._inner = innermost(wrapped)

    def __getattr__(self, name: str) -> Any:
        # Only for names that no session class knows, e.g. a provider's `container_id`.
        if name.startswith("__") or name in ("wrapped", "_inner"):
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    async def __aenter__(self) -> Self:
        await self.wrapped.__aenter__()
        return self

    async def _annotate(self, *, run: Callable[[], Coroutine[object, object, T]], **_: Any) -> T:
        # The wrapped session emits the events and spans of what `run` does.
        return await run()

    async def _read(self, path: Path, *, user: str | User | None = None, **expected: Any) -> Any:
        if isinstance(self.wrapped, SandboxSession):
            return await self.wrapped._read(path, user=user, **expected)
        return await self.wrapped.read(path, user=user)

    async def _exec_checked_nonzero(self, *command: str | Path) -> ExecResult:
        # Built on this session's own `exec`, not on the wrapped one's.
        return await BaseSandboxSession._exec_checked_nonzero(self, *command)


def _forward_async(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def forward(self: DelegatingSession, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.wrapped, name)(*args, **kwargs)

    forward.__name__ = name
    forward.__qualname__ = f"DelegatingSession.{name}"
    return forward


def _forward_sync(name: str) -> Callable[..., Any]:
    def forward(self: DelegatingSession, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.wrapped, name)(*args, **kwargs)

    forward.__name__ = name
    forward.__qualname__ = f"DelegatingSession.{name}"
    return forward


def _forward_value(name: str) -> property:
    def get(self: DelegatingSession) -> Any:
        return getattr(self.wrapped, name)

    def put(self: DelegatingSession, value: Any) -> None:
        setattr(self.wrapped, name, value)

    return property(get, put)


def session_names() -> dict[str, str]:
    """Return each name of the SDK's session classes with its kind: async, sync, value, static."""
    kinds: dict[str, str] = {}
    for owner in (BaseSandboxSession, SandboxSession):
        for name, value in vars(owner).items():
            if name in _NOT_FORWARDED or (name.startswith("__") and name not in LIFECYCLE):
                continue
            if name.startswith("_abc_"):
                continue
            if isinstance(value, staticmethod | classmethod):
                kinds[name] = "static"
            elif inspect.iscoroutinefunction(value):
                kinds[name] = "async"
            elif inspect.isfunction(value):
                kinds[name] = "sync"
            else:
                kinds[name] = "value"
    return kinds


def _install_forwarders() -> None:
    makers = {"async": _forward_async, "sync": _forward_sync, "value": _forward_value}
    own = set(vars(DelegatingSession))
    for name, kind in session_names().items():
        if name not in own and kind in makers:
            setattr(DelegatingSession, name, makers[kind](name))


_install_forwarders()


def operation_names() -> tuple[str, ...]:
    """Return the coroutine methods of a session that act on the sandbox's files.

    Everything that is not known as lifecycle or command counts, so that a method which a new SDK
    version adds is admitted by the fence before anybody has looked at it.
    """
    commands = {"exec", "pty_exec_start", "pty_write_stdin", "_exec_checked_nonzero"}
    inside = {"_annotate", "_emit_start_event", "_emit_finish_event", "_exec_internal"}
    return tuple(
        name
        for name, kind in session_names().items()
        if kind == "async" and name not in LIFECYCLE | commands | inside
    )


def prepare_command(
    session: BaseSandboxSession,
    command: Sequence[str | Path],
    shell: bool | list[str],
) -> list[str]:
    """Return the argument vector that the provider would run, without its user switch."""
    provider = innermost(session)
    argv = provider._prepare_exec_command(*command, shell=shell, user=None)
    # UnixLocal makes absolute words under the workspace relative, all but the first: behind our
    # preamble the program is no longer the first, so hand it over inside a text.
    relative = getattr(provider, "_workspace_relative_command_parts", None)
    if relative is None or not argv[0].startswith("/"):
        return argv
    root = Path(provider.state.manifest.root).resolve()
    if relative(["sh", argv[0]], root)[1] == argv[0]:
        return argv
    return ["/bin/sh", "-c", f'exec {shlex.quote(argv[0])} "$@"', "sh", *argv[1:]]


async def exec_marked(
    session: BaseSandboxSession,
    marked: Sequence[str],
    command: Sequence[str | Path],
    *,
    timeout: float | None,
    shell: bool | list[str],
    user: str | User | None,
) -> ExecResult:
    """Run `marked` with `session.exec`, reported to audit sinks and traces as `command`."""
    if type(session).exec is not SandboxSession.exec:
        return await session.exec(*marked, timeout=timeout, shell=False, user=user)

    async def run(
        self: SandboxSession,
        *_command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,  # noqa: ARG001 - reported, not used
        user: str | User | None = None,
    ) -> ExecResult:
        return await self._inner.exec(*marked, timeout=timeout, shell=False, user=user)

    reported = instrumented_op(
        "exec",
        data=_exec_start_data,
        finish_data=_exec_finish_data,
        ok=lambda result: cast(ExecResult, result).ok(),
        outputs=lambda result: (cast(ExecResult, result).stdout, cast(ExecResult, result).stderr),
    )(run)
    return await reported(
        cast(SandboxSession, session), *command, timeout=timeout, shell=shell, user=user
    )


def restore_command(error: BaseException, marked: Sequence[str], command: Sequence[str]) -> None:
    """Make an SDK error name the user's command instead of our preamble."""
    if not isinstance(error, ExecFailureError):
        return
    seen = [str(word) for word in error.command]
    if seen[-len(marked) :] != list(marked):
        return
    original = (*seen[: len(seen) - len(marked)], *command)
    error.command = original
    if "command" in error.context:
        error.context["command"] = original
    if "command_str" in error.context:
        error.context["command_str"] = " ".join(original)


def peek_session(session: BaseSandboxSession, session_id: int) -> tuple[bool, int | None] | None:
    """Look at a provider's own table of sessions: (ended, exit code), None where it has none.

    No I/O and no wait: an empty `pty_write_stdin` would block for five seconds.
    """
    table = getattr(innermost(session), "_pty_processes", None)
    if not isinstance(table, dict):
        return None
    entry = table.get(session_id)
    if entry is None:
        return (True, None)
    process = getattr(entry, "process", None)
    if not isinstance(process, asyncio.subprocess.Process):
        return None
    return (process.returncode is not None, process.returncode)


class FencedInvoker(_FailureHandlingFunctionToolInvoker):
    """The invoker of a decorated function tool, with a fence around it.

    A subclass, so that approval policies still see prepared arguments, `tool.__wrapped__` still
    answers, and a copied tool still binds its own error handling.
    """

    def __init__(
        self,
        inner: _FailureHandlingFunctionToolInvoker,
        around: Around,
        function_tool: FunctionTool,
    ) -> None:
        super().__init__(
            inner._invoke_tool_impl, inner._on_handled_error, function_tool=function_tool
        )
        self._fenced_inner = inner
        self._fenced_around = around
        if is_sync_invoker(inner):
            setattr(self, _SYNC_FUNCTION_TOOL_MARKER, True)

    def __agents_bind_function_tool__(self, function_tool: FunctionTool) -> FencedInvoker:
        if self._function_tool is function_tool:
            return self
        return FencedInvoker(
            self._fenced_inner.__agents_bind_function_tool__(function_tool),
            self._fenced_around,
            function_tool,
        )

    async def __call__(self, ctx: ToolContext[Any], input: str) -> Any:  # noqa: A002 - the SDK's
        """Run the tool's call inside what is around it."""
        return await self._fenced_around(ctx, input, lambda: self._fenced_inner(ctx, input))


def is_sync_invoker(invoker: object) -> bool:
    """Return whether the tool's function is a plain one that the SDK runs in a thread."""
    return bool(getattr(invoker, _SYNC_FUNCTION_TOOL_MARKER, False))


def has_failure_handling(invoker: object) -> TypeGuard[_FailureHandlingFunctionToolInvoker]:
    """Return whether the invoker is the SDK's own one of a decorated function tool."""
    return isinstance(invoker, _FailureHandlingFunctionToolInvoker)


def forget_prepared_arguments(context: object) -> None:
    """Drop the arguments that the SDK parsed for an approval: the call gets changed ones."""
    if getattr(context, "_function_tool_arguments", None) is not None:
        context._function_tool_arguments = None  # type: ignore[attr-defined]


def computer_config(tool: ComputerTool[Any]) -> Any:
    """Return what the tool was made with: an instance, a factory or a provider."""
    return _get_computer_initializer(tool) or tool.computer


def is_computer_provider(config: object) -> bool:
    """Return whether `config` has create and dispose hooks."""
    return _is_computer_provider(config)
