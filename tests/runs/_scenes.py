"""Whole Runner runs on the real UnixLocal sandbox, brought to a chosen moment and then stopped.

A scene is the same with and without a fence. Its first tool call leaves a process of its own
session behind; what comes next depends on the moment in which the run is to be stopped.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agents import RunConfig, RunHooks, Runner
from agents.items import TResponseStreamEvent
from agents.sandbox import SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import Capability, Filesystem, Shell
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient
from agents.sandbox.session import SandboxSession
from agents.testing import ModelCall, ModelStep, ScriptedModel, assistant_message, function_call
from openai.types.responses import Response, ResponseCompletedEvent, ResponseCustomToolCall

from fence import TurnFence
from tests.support import procs

Moment = Literal[
    "model-streaming",
    "exec-waiting",
    "stdin-polling",
    "apply-patch",
    "two-tools",
    "between-tools",
]
MOMENTS: tuple[Moment, ...] = (
    "model-streaming",
    "exec-waiting",
    "stdin-polling",
    "apply-patch",
    "two-tools",
    "between-tools",
)

BIG = 40_000
"""Lines of the file that apply_patch is busy with when it is stopped."""


class _Hooks(RunHooks[Any]):
    """Says when a tool call of a name has begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    async def on_tool_start(self, context: Any, agent: Any, tool: Any) -> None:
        self.begun.append(tool.name)


@dataclass
class Scene:
    """One run and the gates to watch it by."""

    moment: Moment
    outside: Path
    """A file outside the sandbox that the refused tool would make."""
    token: str = field(default_factory=procs.new_token)
    model_waits: asyncio.Event = field(default_factory=asyncio.Event)
    model_goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    hooks: _Hooks = field(default_factory=_Hooks)

    def model(self) -> ScriptedModel:
        left_behind = _shell("first", f"setsid sleep {self.token} >/dev/null 2>&1 & echo up")
        return ScriptedModel([[left_behind], *self._rest()])

    def _rest(self) -> list[Any]:
        done = [assistant_message("done")]
        if self.moment == "model-streaming":
            return [ModelStep(responder=self._silent), done]
        if self.moment == "exec-waiting":
            return [[_shell("wait", f"setsid sleep {self.token} & wait")], done]
        if self.moment == "stdin-polling":
            running = _shell("pty", f"trap '' INT; sleep {self.token}", tty=True, yield_time_ms=250)
            return [[running], ModelStep(responder=self._poll), done]
        if self.moment == "apply-patch":
            return [ModelStep(responder=_ask_for_patch), done]
        if self.moment == "two-tools":
            both = [_shell(f"two-{n}", f"setsid sleep {self.token} & wait") for n in (1, 2)]
            return [both, done]
        return [ModelStep(responder=self._then_another), done]

    async def _silent(self, call: ModelCall) -> Any:
        """A model that says something and then nothing more."""
        if not call.streamed:
            self.model_waits.set()
            await self.model_goes_on.wait()
        return ModelStep.stream(self._stream)

    async def _stream(self, call: ModelCall) -> AsyncIterator[TResponseStreamEvent]:
        self.model_waits.set()
        await self.model_goes_on.wait()
        return
        yield

    async def _poll(self, call: ModelCall) -> Any:
        numbers = re.findall(r"running with session ID (\d+)", repr(call.input))
        arguments = {"session_id": int(numbers[-1]), "chars": "", "yield_time_ms": 30_000}
        return [function_call("write_stdin", arguments, call_id="poll")]

    async def _then_another(self, call: ModelCall) -> Any:
        self.model_waits.set()
        await self.model_goes_on.wait()
        return [_shell("second", f"touch {self.outside}; setsid sleep {self.token} & wait")]

    def is_reached(self) -> bool:
        """Whether the run is in the moment in which it is to be stopped."""
        sleeping = [process.name for process in procs.find(self.token)].count("sleep")
        if self.moment in ("model-streaming", "between-tools"):
            return sleeping == 1 and self.model_waits.is_set()
        if self.moment == "apply-patch":
            return sleeping == 1 and "apply_patch" in self.hooks.begun
        if self.moment == "stdin-polling":
            return sleeping == 2 and "write_stdin" in self.hooks.begun
        return sleeping == (3 if self.moment == "two-tools" else 2)

    def start(
        self, fence: TurnFence | None, session: SandboxSession | None, *, streamed: bool
    ) -> Run:
        """Start the run; it owns its sandbox where no session is given."""
        capabilities: list[Capability] = [Shell(), Filesystem()]
        if fence is not None:
            capabilities = fence.wrap_capabilities(capabilities)
        agent = SandboxAgent(name="scene", model=self.model(), capabilities=capabilities)
        sandbox = (
            SandboxRunConfig(client=UnixLocalSandboxClient())
            if session is None
            else SandboxRunConfig(session=session)
        )
        config = RunConfig(sandbox=sandbox, tracing_disabled=True)
        if not streamed:
            coroutine = Runner.run(agent, "go", run_config=config, hooks=self.hooks)
            return Run(asyncio.ensure_future(coroutine), None)
        result = Runner.run_streamed(agent, "go", run_config=config, hooks=self.hooks)

        async def consume() -> None:
            async for _event in result.stream_events():
                pass

        return Run(asyncio.ensure_future(consume()), result)


@dataclass
class Run:
    """A run in flight; `stop()` does what the SDK offers for that."""

    task: asyncio.Task[Any]
    streamed: Any

    def stop(self) -> None:
        if self.streamed is not None:
            self.streamed.cancel()
        else:
            self.task.cancel()

    async def ended(self) -> BaseException | None:
        """Wait for the end of the run and return what it raised."""
        (end,) = await asyncio.gather(self.task, return_exceptions=True)
        return end if isinstance(end, BaseException) else None


def _shell(call_id: str, cmd: str, **arguments: Any) -> Any:
    arguments = {"cmd": cmd, "yield_time_ms": 30_000, **arguments}
    return function_call("exec_command", arguments, call_id=call_id)


def _ask_for_patch(call: ModelCall) -> Any:
    lines = "\n".join(f"+line {n}" for n in range(BIG))
    patch = f"*** Begin Patch\n*** Add File: big.txt\n{lines}\n*** End Patch\n"
    item = ResponseCustomToolCall(
        type="custom_tool_call", name="apply_patch", call_id="patch", id="patch", input=patch
    )
    if not call.streamed:
        return [item]
    # ScriptedModel makes no events for a custom tool's call by itself.
    response = Response(
        id="patch-response",
        created_at=0,
        model="scripted-model",
        object="response",
        output=[item],
        tool_choice="none",
        tools=[],
        parallel_tool_calls=False,
    )
    event = ResponseCompletedEvent(type="response.completed", response=response, sequence_number=0)
    return ModelStep.stream([event])
