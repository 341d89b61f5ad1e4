"""Puts a fence around the tools of an agent, whatever kind they are.

Tools that hold a sandbox session get a shallow copy bound to a fenced session: the session's
operations are what the fence owns. Other tools that run here are owned as a whole. Hosted tools,
which run at the provider of the model, and objects of unknown kinds stay the same objects.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from agents.computer import AsyncComputer
from agents.editor import ApplyPatchOperation, ApplyPatchResult
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.tool import (
    ApplyPatchTool,
    ComputerProvider,
    ComputerTool,
    CustomTool,
    FunctionTool,
    LocalShellTool,
    ShellTool,
)

from fence.openai_agents import internals
from fence.openai_agents.correlation import call_scope
from fence.openai_agents.errors import runner_boundary
from fence.openai_agents.foreign import FOREIGN_NAMES, MARK, ForeignShell
from fence.openai_agents.session import wrap_session

if TYPE_CHECKING:
    from fence.turn import OperationKind, TurnFence

_log = logging.getLogger("fence.openai_agents")
EditorResult = ApplyPatchResult | str | None
_KNOWN = (
    ApplyPatchTool,
    ComputerTool,
    CustomTool,
    FunctionTool,
    LocalShellTool,
    ShellTool,
)


def wrap_tools(
    fence: TurnFence, tools: Iterable[Any], session: BaseSandboxSession | None = None
) -> list[Any]:
    """Return the tools with the fence around each that runs here.

    Approval settings, guardrails, `is_enabled`, timeouts and metadata stay. The given objects are
    not changed. Wrapping with the same fence twice gives the same object.

    Args:
        fence: the turn's fence.
        tools: SDK tools; others pass through untouched.
        session: the session behind tools that are only named `exec_command` or `write_stdin`,
            so that their commands can be marked. Tools of the SDK know their own.

    Raises:
        TurnCancelled: the turn is cancelled already.
        FenceUsageError: `session` is given and is no sandbox session of the SDK.
    """
    fence.check_open()
    given = list(tools)
    foreign = None if session is None else ForeignShell(fence, wrap_session(fence, session))
    wrapped = [_wrap_tool(fence, tool, foreign) for tool in given]
    if foreign is not None:
        foreign.learn(given)
    return wrapped


def _wrap_tool(fence: TurnFence, tool: Any, foreign: ForeignShell | None) -> Any:
    # Nothing of an unknown object is looked at.
    if not isinstance(tool, _KNOWN) or fence in getattr(tool, MARK, ()):
        return tool
    wrapped = _copy_of(fence, tool, foreign)
    if wrapped is not tool:
        marks = (*getattr(tool, MARK, ()), fence)
        # Past __setattr__ of frozen classes; every wrapped kind has a __dict__.
        wrapped.__dict__[MARK] = marks
    return wrapped


def _copy_of(fence: TurnFence, tool: Any, foreign: ForeignShell | None) -> Any:
    if isinstance(tool, FunctionTool | CustomTool) and isinstance(
        getattr(tool, "session", None), BaseSandboxSession
    ):
        return _session_tool(fence, tool)
    if isinstance(tool, FunctionTool):
        if tool.name in FOREIGN_NAMES:
            if foreign is not None:
                return _with_invoker(tool, foreign.around(tool))
            _log.warning(
                "tool %r is not the SDK's own: its calls are owned by the fence, but its commands "
                "are not marked and may outlive the turn; pass wrap_tools(tools, session=...) so "
                "that they are",
                tool.name,
            )
        return _with_invoker(tool, _owned_function(fence, tool))
    if isinstance(tool, CustomTool):
        return _custom_tool(fence, tool)
    if isinstance(tool, ApplyPatchTool):
        patched = copy.copy(tool)
        patched.editor = _fenced_editor(fence, tool.editor)
        return patched
    if isinstance(tool, ComputerTool):
        return _computer_tool(fence, tool)
    if isinstance(tool, LocalShellTool):
        local = copy.copy(tool)
        local.executor = _owned_executor(fence, tool.name, tool.executor)
        return local
    if isinstance(tool, ShellTool) and tool.executor is not None:
        shell = copy.copy(tool)
        shell.executor = _owned_executor(fence, tool.name, tool.executor)
        return shell
    return tool


# Function tools


def _owned_function(fence: TurnFence, tool: FunctionTool) -> internals.Around:
    kind: OperationKind = "thread" if internals.is_sync_invoker(tool.on_invoke_tool) else "function"

    async def around(context: Any, _raw: str, call: Callable[[], Awaitable[Any]]) -> Any:
        call_id = getattr(context, "tool_call_id", None)
        with runner_boundary(), call_scope(call_id):
            return await fence.run_operation(tool.name, kind, call, call_id=call_id)

    return around


def _guarded(fence: TurnFence) -> internals.Around:
    """Only refuse after the cancel: the session's operations are owned one by one."""

    async def around(context: Any, _raw: str, call: Callable[[], Awaitable[Any]]) -> Any:
        with runner_boundary(), call_scope(getattr(context, "tool_call_id", None)):
            fence.check_open()
            return await call()

    return around


def _with_invoker(tool: FunctionTool, around: internals.Around) -> FunctionTool:
    copied = copy.copy(tool)
    inner = copied.on_invoke_tool
    if internals.has_failure_handling(inner):
        copied.on_invoke_tool = internals.FencedInvoker(inner, around, copied)
    else:
        copied.on_invoke_tool = _plain_invoker(inner, around)
    return copied


def _plain_invoker(
    inner: Callable[[Any, str], Awaitable[Any]], around: internals.Around
) -> Callable[[Any, str], Awaitable[Any]]:
    # `wraps` keeps the signature: the SDK chooses the context object by its annotations.
    @functools.wraps(inner)
    async def invoke(context: Any, raw_input: str) -> Any:
        return await around(context, raw_input, lambda: _settle(inner(context, raw_input)))

    return invoke


async def _settle(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


# Tools that hold a session


def _session_tool(fence: TurnFence, tool: Any) -> Any:
    copied = copy.copy(tool)
    copied.session = wrap_session(fence, tool.session)
    editor = getattr(tool, "editor", None)
    if editor is not None:
        copied.editor = _fenced_editor(fence, editor)
    inner, bound = _rebind(tool, copied, copied.on_invoke_tool)
    around = _guarded(fence)
    if not bound:
        # The invoker reaches the session by a way of its own: own the call as a whole, too.
        _log.warning(
            "tool %r holds a session, but its invoker is no method of the tool: its calls are "
            "owned by the fence, its commands may run unmarked; make the invoker a method, or "
            "build the tool on a session from fence.wrap_session()",
            tool.name,
        )
        around = _owned_function(fence, tool) if isinstance(tool, FunctionTool) else around
    if isinstance(copied, FunctionTool) and internals.has_failure_handling(inner):
        copied.on_invoke_tool = internals.FencedInvoker(inner, around, copied)
    else:
        copied.on_invoke_tool = _plain_invoker(inner, around)
    return copied


def _rebind(tool: Any, copied: Any, invoker: Any) -> tuple[Any, bool]:
    """Return the invoker bound to the copy, and whether it could be told that it is."""
    if inspect.ismethod(invoker):
        if invoker.__self__ is tool:
            return invoker.__func__.__get__(copied, type(copied)), True
        return invoker, invoker.__self__ is copied
    if isinstance(invoker, functools.partial):
        inner, bound = _rebind(tool, copied, invoker.func)
        args = tuple(copied if word is tool else word for word in invoker.args)
        # By identity: a tool and its copy compare equal.
        bound = bound or any(word is tool for word in invoker.args)
        return functools.partial(inner, *args, **invoker.keywords), bound
    # The fence of an outer turn: its wrapper was made for a tool whose session it fenced.
    return invoker, bool(getattr(tool, MARK, ()))


# Custom tools and apply_patch


def _custom_tool(fence: TurnFence, tool: CustomTool) -> CustomTool:
    copied = copy.copy(tool)
    inner, _bound = _rebind(tool, copied, tool.on_invoke_tool)

    async def around(context: Any, _raw: str, call: Callable[[], Awaitable[Any]]) -> Any:
        call_id = getattr(context, "tool_call_id", None)
        with runner_boundary(), call_scope(call_id):
            return await fence.run_operation(tool.name, "custom", call, call_id=call_id)

    copied.on_invoke_tool = _plain_invoker(inner, around)
    return copied


def _fenced_editor(fence: TurnFence, editor: Any) -> Any:
    """Return the editor bound to a fenced session where it has one, else owned as a whole."""
    if isinstance(editor, FencedEditor) and editor.fence is fence:
        return editor
    if isinstance(getattr(editor, "session", None), BaseSandboxSession):
        copied = copy.copy(editor)
        copied.session = wrap_session(fence, editor.session)
        return copied
    return FencedEditor(fence, editor)


class FencedEditor:
    """An apply_patch editor whose operations pass through a fence."""

    def __init__(self, fence: TurnFence, editor: Any) -> None:
        self.fence = fence
        self.editor = editor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "editor":
            raise AttributeError(name)
        return getattr(self.editor, name)

    async def create_file(self, operation: ApplyPatchOperation) -> EditorResult:
        """Create a file; see ApplyPatchEditor."""
        return await self._run("create_file", operation)

    async def update_file(self, operation: ApplyPatchOperation) -> EditorResult:
        """Update a file; see ApplyPatchEditor."""
        return await self._run("update_file", operation)

    async def delete_file(self, operation: ApplyPatchOperation) -> EditorResult:
        """Delete a file; see ApplyPatchEditor."""
        return await self._run("delete_file", operation)

    async def _run(self, name: str, operation: ApplyPatchOperation) -> EditorResult:
        method = getattr(self.editor, name)
        call_id = getattr(operation.ctx_wrapper, "tool_call_id", None)
        with call_scope(call_id):
            result: EditorResult = await self.fence.run_operation(
                f"apply_patch.{name}", "patch", _calling(method, operation), call_id=call_id
            )
        return result


def _calling(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Callable[[], Awaitable[Any]]:
    """Return a coroutine function that calls `function`, plain or async, when it is run."""

    async def call() -> Any:
        return await _settle(function(*args, **kwargs))

    return call


# Shell executors


def _owned_executor(
    fence: TurnFence, name: str, executor: Callable[[Any], Any]
) -> Callable[[Any], Awaitable[Any]]:
    async def execute(request: Any) -> Any:
        call_id = getattr(getattr(request, "data", None), "call_id", None)
        with runner_boundary(), call_scope(call_id):
            return await fence.run_operation(
                name, "shell", _calling(executor, request), call_id=call_id
            )

    return execute


# Computers


class FencedComputer(AsyncComputer):
    """A computer, sync or async, whose actions pass through a fence.

    Always async: the SDK awaits what an action returns. Names of the real computer that
    AsyncComputer does not know are forwarded.
    """

    ACTIONS = (
        "screenshot",
        "click",
        "double_click",
        "scroll",
        "type",
        "wait",
        "move",
        "keypress",
        "drag",
    )

    def __init__(self, fence: TurnFence, computer: Any) -> None:
        self.fence = fence
        self.computer = computer
        for name in self.ACTIONS:
            # On the instance, with the real signature: the SDK asks it whether `keys` is taken.
            setattr(self, name, self._action(name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "computer":
            raise AttributeError(name)
        return getattr(self.computer, name)

    @property
    def environment(self) -> Any:
        """The real computer's environment."""
        return self.computer.environment

    @property
    def dimensions(self) -> Any:
        """The real computer's display size."""
        return self.computer.dimensions

    def _action(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self.computer, name)

        @functools.wraps(method)
        async def act(*args: Any, **kwargs: Any) -> Any:
            with runner_boundary():
                return await self.fence.run_operation(
                    f"computer.{name}", "computer", _calling(method, *args, **kwargs)
                )

        return act


# The actions are attributes of each instance, so nothing is left abstract.
FencedComputer.__abstractmethods__ = frozenset()


def _fenced_computer(fence: TurnFence, computer: Any) -> FencedComputer:
    if isinstance(computer, FencedComputer) and computer.fence is fence:
        return computer
    make: Any = FencedComputer
    return cast(FencedComputer, make(fence, computer))


def _computer_tool(fence: TurnFence, tool: ComputerTool[Any]) -> ComputerTool[Any]:
    config = internals.computer_config(tool)
    copied = copy.copy(tool)
    if internals.is_computer_provider(config):
        copied.computer = _fenced_provider(fence, config)
    elif callable(config):
        copied.computer = _fenced_factory(fence, config)
    else:
        copied.computer = _fenced_computer(fence, config)
    # The SDK remembers a tool's factory by the tool object; the copy is another object.
    copied.__post_init__()
    return copied


def _fenced_factory(fence: TurnFence, create: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def make(*, run_context: Any) -> FencedComputer:
        with runner_boundary():
            computer = await fence.run_operation(
                "computer.create", "computer", _calling(create, run_context=run_context)
            )
        return _fenced_computer(fence, computer)

    return make


def _fenced_provider(fence: TurnFence, provider: Any) -> ComputerProvider[Any]:
    dispose = getattr(provider, "dispose", None)

    def dispose_original(*, run_context: Any, computer: Any) -> Any:
        # Clean-up stays allowed after the cancel, and gets the computer that `create` made.
        original = computer.computer if isinstance(computer, FencedComputer) else computer
        assert dispose is not None
        return dispose(run_context=run_context, computer=original)

    return ComputerProvider(
        create=_fenced_factory(fence, provider.create),
        dispose=None if dispose is None else dispose_original,
    )


__all__ = ["FencedComputer", "FencedEditor", "wrap_tools"]
