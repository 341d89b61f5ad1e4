"""Tools that are not the SDK's, but are named and speak like its exec_command and write_stdin.

Their commands are marked at the JSON arguments; what became of a command is read from the
header of the banner they answer with.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from agents.tool import FunctionTool

from fence.openai_agents.banners import Banner, parse_banner
from fence.openai_agents.correlation import call_scope
from fence.openai_agents.errors import runner_boundary
from fence.openai_agents.internals import forget_prepared_arguments
from fence.openai_agents.session import bind
from fence.turn import CommandOutcome

if TYPE_CHECKING:
    from fence.openai_agents.internals import Around
    from fence.openai_agents.session import FencedSandboxSession
    from fence.turn import TurnFence

EXEC = "exec_command"
WRITE = "write_stdin"
MARK = "_fence_wrapped_by"
"""Attribute of a wrapped tool: the fences around it."""
FOREIGN_NAMES = frozenset({EXEC, WRITE})

# Stands for a word that the outer shell must expand; no command has this as its shell's name.
_SAME_SHELL = "\x00same-shell\x00"
_SAME_SHELL_WORD = '"${BASH:-sh}"'


def split_arguments(
    arguments: dict[str, Any], schema: dict[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Return the argument vector for the user's `cmd`, and the arguments without their own login.

    A login shell that the call names itself is started inside the marked process, and only there:
    its profile runs once, and what the profile starts belongs to the turn. Without a `shell` the
    tool's own choice stays as it is, and our text runs in it.
    """
    shell, cmd = arguments.get("shell"), arguments["cmd"]
    if not isinstance(shell, str) or not shell:
        return [_SAME_SHELL, "-c", cmd], arguments
    declared = schema.get("properties", {}).get("login")
    default = declared.get("default") if isinstance(declared, dict) else None
    login = arguments.get("login", default) is True
    outer = {**arguments, "login": False} if declared or "login" in arguments else arguments
    return [shell, "-lc" if login else "-c", cmd], outer


def shell_text(argv: Sequence[str]) -> str:
    """Return one line for a POSIX shell that replaces itself by `argv`, word for word."""
    words = (_SAME_SHELL_WORD if word == _SAME_SHELL else shlex.quote(word) for word in argv)
    return "exec " + " ".join(words)


class ForeignShell:
    """The pair of foreign tools over one session: what one starts, the other may write to."""

    def __init__(self, fence: TurnFence, session: FencedSandboxSession) -> None:
        self._fence = fence
        self._session = session
        self._write: FunctionTool | None = None

    def learn(self, tools: Iterable[Any]) -> None:
        """Remember the unwrapped write tool: the way to a running command's terminal."""
        for tool in tools:
            # One that this fence has wrapped already would refuse our Ctrl-C after the cancel.
            if (
                isinstance(tool, FunctionTool)
                and tool.name == WRITE
                and self._fence not in getattr(tool, MARK, ())
            ):
                self._write = tool

    def around(self, tool: FunctionTool) -> Around:
        """Return what runs a call of the tool through the fence."""
        raw, schema = tool.on_invoke_tool, tool.params_json_schema

        async def call_through(
            context: Any, raw_input: str, call: Callable[[], Awaitable[Any]]
        ) -> Any:
            call_id = getattr(context, "tool_call_id", None)
            with runner_boundary(), call_scope(call_id):
                self._fence.check_open()
                arguments = _arguments(tool.name, raw_input)
                if arguments is None:
                    # Not arguments we know: the tool says what is wrong with them.
                    return await self._fence.run_operation(
                        tool.name, "function", call, call_id=call_id
                    )
                if tool.name == WRITE:
                    return await self._write_stdin(raw, context, arguments, call_id)
                return await self._exec(raw, schema, context, arguments, call_id)

        return call_through

    async def _exec(
        self,
        raw: Callable[[Any, str], Awaitable[Any]],
        schema: dict[str, Any],
        context: Any,
        arguments: dict[str, Any],
        call_id: str | None,
    ) -> Any:
        sandbox, directory = bind(self._fence, self._session)
        argv, outer = split_arguments(arguments, schema)
        tty = arguments.get("tty") is True and self._write is not None

        async def start(marked: list[str]) -> Any:
            forget_prepared_arguments(context)
            return await raw(context, json.dumps({**outer, "cmd": shell_text(marked)}))

        def outcome(result: Any) -> CommandOutcome:
            banner = parse_banner(result) or Banner(None, None)
            if banner.session_id is None:
                return CommandOutcome(session_id=None, exit_code=banner.exit_code)
            name = directory.started(
                directory.foreign, banner.session_id, *self._callbacks(context, banner.session_id)
            )
            return CommandOutcome(session_id=name, exit_code=None)

        return await self._fence.start_command(
            sandbox, argv, start, outcome, call_id=call_id, tty=tty
        )

    async def _write_stdin(
        self,
        raw: Callable[[Any, str], Awaitable[Any]],
        context: Any,
        arguments: dict[str, Any],
        call_id: str | None,
    ) -> Any:
        sandbox, directory = bind(self._fence, self._session)
        number = arguments["session_id"]
        name = directory.known(directory.foreign, number, *self._callbacks(context, number))

        async def call() -> Any:
            return await raw(context, json.dumps(arguments))

        def outcome(result: Any) -> CommandOutcome:
            banner = parse_banner(result)
            if banner is not None and banner.exit_code is not None:
                return CommandOutcome(session_id=None, exit_code=banner.exit_code)
            return CommandOutcome(session_id=name, exit_code=None)

        return await self._fence.write_stdin(sandbox, name, call, outcome, call_id=call_id)

    def _callbacks(
        self, context: Any, number: int
    ) -> tuple[Callable[[], Awaitable[None]], Callable[[], Awaitable[int | None]]]:
        # Without a reference to the fence: its directory of sessions keeps these.
        write = self._write

        async def interrupt() -> None:
            await _write_raw(write, context, number, "\x03")

        async def probe() -> int | None:
            banner = parse_banner(await _write_raw(write, context, number, ""))
            return None if banner is None else banner.exit_code

        return interrupt, probe


async def _write_raw(write: FunctionTool | None, context: Any, number: int, chars: str) -> Any:
    if write is None:
        return None
    arguments = {"session_id": number, "chars": chars, "yield_time_ms": 0}
    return await write.on_invoke_tool(context, json.dumps(arguments))


def _arguments(name: str, raw_input: str) -> dict[str, Any] | None:
    """Return the arguments where they are what the SDK's tool of that name would take."""
    try:
        value = json.loads(raw_input)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    if name == EXEC:
        cmd = value.get("cmd")
        return value if isinstance(cmd, str) and cmd and "\x00" not in cmd else None
    number = value.get("session_id")
    return value if isinstance(number, int) and not isinstance(number, bool) else None
