"""A real UnixLocal sandbox, and a way to run an agent with scripted answers in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from agents import RunConfig, Runner
from agents.run_config import SandboxRunConfig
from agents.sandbox import SandboxAgent
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient
from agents.sandbox.session import SandboxSession
from agents.testing import ScriptedModel, assistant_message
from agents.tool_context import ToolContext

from fence import TurnFence
from tests.support import procs


@pytest.fixture
async def session() -> AsyncIterator[SandboxSession]:
    """A started sandbox; nothing of it stays."""
    # Each open terminal of UnixLocal occupies a thread of the default executor.
    executor = ThreadPoolExecutor(32)
    asyncio.get_running_loop().set_default_executor(executor)
    client = UnixLocalSandboxClient()
    session = await client.create()
    await session.start()
    try:
        yield session
    finally:
        await session.aclose()
        await client.delete(session)
        executor.shutdown(wait=True)


@pytest.fixture
def workspace(session: SandboxSession) -> Path:
    return Path(session.state.manifest.root)


@pytest.fixture
async def fence() -> AsyncIterator[TurnFence]:
    """A fence that is proven quiet when the test is over."""
    fence = TurnFence()
    try:
        yield fence
    finally:
        await fence.wait_for_quiescence()


class Tools:
    """Helpers of the tests, as one fixture: `h`."""

    @staticmethod
    def context(name: str = "tool", arguments: str = "{}", call_id: str = "call-1") -> ToolContext:
        return ToolContext(
            context=None, tool_name=name, tool_call_id=call_id, tool_arguments=arguments
        )

    @staticmethod
    async def call(tool: Any, arguments: str, call_id: str = "call-1") -> Any:
        """Invoke a function or custom tool as the runner does."""
        return await tool.on_invoke_tool(
            Tools.context(tool.name, arguments, call_id=call_id), arguments
        )

    @staticmethod
    def agent(*outputs: Any, **settings: Any) -> SandboxAgent:
        """An agent whose model gives these answers in turn, then says "done"."""
        steps = [[output] if not isinstance(output, list) else output for output in outputs]
        model = ScriptedModel([*steps, [assistant_message("done")]])
        return SandboxAgent(**{"name": "agent", "instructions": "x", "model": model, **settings})

    @staticmethod
    def config(session: SandboxSession | None = None) -> RunConfig:
        sandbox = None if session is None else SandboxRunConfig(session=session)
        return RunConfig(sandbox=sandbox, tracing_disabled=True)

    @staticmethod
    async def run(agent: Any, session: SandboxSession | None = None, given: Any = "go") -> Any:
        return await Runner.run(agent, given, run_config=Tools.config(session))

    @staticmethod
    def outputs(result: Any) -> list[Any]:
        return [i.output for i in result.new_items if i.type == "tool_call_output_item"]

    @staticmethod
    async def until(condition: Callable[[], Any], what: str, patience: float = 20.0) -> Any:
        """Wait for something that must come; only a failing test waits that long."""
        deadline = time.monotonic() + patience
        while not (value := condition()):
            assert time.monotonic() < deadline, f"never came: {what}"
            await asyncio.sleep(0.01)
        return value

    @staticmethod
    async def running(token: str, count: int = 1) -> list[procs.Process]:
        """Wait until the `sleep`s of that token run."""

        def look() -> list[procs.Process]:
            found = [p for p in procs.find(token) if p.name == "sleep"]
            return found if len(found) >= count else []

        found: list[procs.Process] = await Tools.until(look, f"{count} sleep {token}")
        return found


@pytest.fixture
def h() -> type[Tools]:
    return Tools
