"""An MCP server behind the fence: a real one over stdio."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import Agent
from agents.mcp import MCPServer, MCPServerStdio
from agents.testing import ScriptedModel, assistant_message

from fence import EscalationPolicy, TurnCancelled, TurnFence
from fence.errors import FenceUsageError
from fence.openai_agents import FencedMCPServer
from tests.openai_agents._calls import function_call

SCRIPT = Path(__file__).with_name("mcp_server.py")


@pytest.fixture
async def server(tmp_path):
    # Connected and cleaned up in one task of its own: anyio's scopes must not change tasks.
    server = MCPServerStdio(
        params={"command": sys.executable, "args": [str(SCRIPT), str(tmp_path)]},
        client_session_timeout_seconds=30,
        require_approval={"add": "always"},
        name="demo",
    )
    ready, over = asyncio.Event(), asyncio.Event()

    async def keep():
        async with server:
            ready.set()
            await over.wait()

    keeper = asyncio.create_task(keep())
    await asyncio.wait({keeper, asyncio.create_task(ready.wait())}, return_when="FIRST_COMPLETED")
    yield server
    over.set()
    await keeper


async def test_calls_are_admitted_and_refused_after_the_cancel(server, tmp_path):
    fence = TurnFence()
    wrapped: Any = fence.wrap_mcp_server(server)
    assert isinstance(fence.wrap_mcp_server(server), MCPServer)
    assert wrapped.name == "demo"
    assert fence.wrap_mcp_server(wrapped) is wrapped
    tools = await wrapped.list_tools()
    assert [t.name for t in tools] == ["add", "wait", "touch"]
    assert wrapped._get_needs_approval_for_tool(tools[0], None) is True
    assert wrapped._get_needs_approval_for_tool(tools[1], None) is False
    assert wrapped.use_structured_content is server.use_structured_content
    wrapped.use_structured_content = True
    assert server.use_structured_content is True
    assert (await wrapped.call_tool("add", {"a": 1, "b": 2})).content[0].text == "3"
    assert (await wrapped.get_prompt("greet")).messages[0].content.text == "hello"
    assert (await wrapped.read_resource("demo://one")).contents[0].text == "content"
    receipt = await fence.wait_for_quiescence()
    assert receipt.operations.admitted == 3
    for call in (
        lambda: wrapped.call_tool("touch", {"name": "late"}),
        lambda: wrapped.get_prompt("greet"),
        lambda: wrapped.read_resource("demo://one"),
    ):
        with pytest.raises(TurnCancelled):
            await call()
    assert not (tmp_path / "late").exists()
    assert await wrapped.list_tools()


async def test_a_call_in_flight_is_cancelled_after_its_grace(server, tmp_path, h):
    fence = TurnFence(policy=EscalationPolicy(call_grace=0.2))
    wrapped: Any = fence.wrap_mcp_server(server)
    call = asyncio.create_task(wrapped.call_tool("wait", {}))
    await h.until((tmp_path / "began").exists, "the call")
    receipt = await fence.wait_for_quiescence()
    assert receipt.proven
    with pytest.raises(TurnCancelled):
        await call


async def test_a_run_uses_it_like_the_real_one(server, fence, h, tmp_path):
    agent = Agent(
        name="a",
        model=ScriptedModel(
            [
                [function_call("touch", {"name": "file"})],
                [assistant_message("done")],
            ]
        ),
        mcp_servers=[fence.wrap_mcp_server(server)],
    )
    result = await h.run(agent)
    assert "touched" in str(h.outputs(result)[0])
    assert (tmp_path / "file").exists()


async def test_two_fences(server):
    async with TurnFence() as outer, TurnFence() as inner:
        wrapped: Any = inner.wrap_mcp_server(outer.wrap_mcp_server(server))
        kind: type = type(wrapped)
        assert kind is FencedMCPServer
        assert outer.wrap_mcp_server(wrapped) is wrapped
        assert (await wrapped.call_tool("add", {"a": 1, "b": 2})).content[0].text == "3"
        outer.cancel()
        with pytest.raises(TurnCancelled):
            await wrapped.call_tool("add", {"a": 1, "b": 2})


async def test_the_proxy_opens_and_closes_the_real_server(tmp_path, fence):
    server = MCPServerStdio(
        params={"command": sys.executable, "args": [str(SCRIPT), str(tmp_path)]},
        client_session_timeout_seconds=30,
    )
    async with fence.wrap_mcp_server(server) as wrapped:
        assert len(await wrapped.list_tools()) == 3
    assert server.session is None


async def test_not_a_server(fence):
    with pytest.raises(FenceUsageError) as caught:
        fence.wrap_mcp_server(object())
    assert caught.value.field == "server"
