"""Whole runs of the SDK's Runner with everything wrapped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agents import Agent, RunConfig, Runner, UserError, function_tool, handoff
from agents.run_config import SandboxRunConfig, ToolExecutionConfig
from agents.run_state import RunState
from agents.sandbox.capabilities import Filesystem, Shell
from agents.sandbox.capabilities.tools import ExecCommandTool
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient
from agents.testing import ScriptedModel, assistant_message

from fence import TurnCancelled, TurnFence
from fence.openai_agents import RunTurnCancelled
from tests.openai_agents._calls import function_call
from tests.support import procs


def hold(token: str, **more) -> dict:
    return {"cmd": f"setsid sleep {token} & sleep {token}", "yield_time_ms": 30000, **more}


@pytest.mark.parametrize("tty", [False, True])
async def test_a_run_that_waits_for_a_command_ends_when_the_turn_is_cancelled(session, h, tty):
    fence = TurnFence()
    token = procs.new_token()
    agent = h.agent(
        function_call("exec_command", hold(token, tty=tty)),
        capabilities=fence.wrap_capabilities([Shell()]),
    )
    run = asyncio.create_task(h.run(agent, session))
    await h.running(token, 2)
    fence.cancel("stop")
    with pytest.raises(TurnCancelled) as caught:
        await run
    assert isinstance(caught.value, RunTurnCancelled)
    assert caught.value.reason == "stop"
    await fence.wait_for_quiescence()
    assert procs.find(token) == []


async def test_negative_control_a_cancelled_run_alone_leaves_its_command(session, h):
    token = procs.new_token()
    agent = h.agent(function_call("exec_command", hold(token)), capabilities=[Shell()])
    run = asyncio.create_task(h.run(agent, session))
    left = await h.running(token, 2)
    # Cancelled inside asyncio's process start, CPython 3.11 waits for the pipe's last holder.
    await session.exec("true")
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert all(procs.alive(p.pid, p.start) for p in left)
    procs.end(procs.find(token))


async def test_a_cancelled_run_has_its_command_stopped_while_the_turn_goes_on(session, fence, h):
    token = procs.new_token()
    agent = h.agent(
        function_call("exec_command", hold(token)),
        capabilities=fence.wrap_capabilities([Shell()]),
    )
    run = asyncio.create_task(h.run(agent, session))
    await h.running(token, 2)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await h.until(lambda: procs.find(token) == [], "the command's end")
    assert not fence.cancelled


async def test_a_sandbox_that_the_run_owns_and_closes(h):
    fence = TurnFence()
    token = procs.new_token()
    client = UnixLocalSandboxClient()
    agent = h.agent(
        function_call("exec_command", hold(token, yield_time_ms=300, tty=True)),
        capabilities=fence.wrap_capabilities([Shell(), Filesystem()]),
    )
    config = RunConfig(sandbox=SandboxRunConfig(client=client), tracing_disabled=True)
    result = await Runner.run(agent, "go", run_config=config)
    assert result.final_output == "done"
    # The session is closed and deleted; what left its group lives on.
    assert procs.find(token)
    receipt = await fence.wait_for_quiescence()
    assert receipt.proven
    assert procs.find(token) == []


async def test_a_run_on_a_fenced_session_needs_no_wrapped_capability(session, h):
    fence = TurnFence()
    token = procs.new_token()
    agent = h.agent(
        function_call("exec_command", hold(token, yield_time_ms=300)), capabilities=[Shell()]
    )
    result = await h.run(agent, fence.wrap_session(session))
    assert "session ID" in h.outputs(result)[0]
    await h.running(token, 2)
    await fence.wait_for_quiescence()
    assert procs.find(token) == []


async def test_parallel_calls(session, h):
    fence = TurnFence()
    tokens = [procs.new_token() for _ in range(4)]
    agent = h.agent(
        [function_call("exec_command", hold(t), call_id=f"c{i}") for i, t in enumerate(tokens)],
        capabilities=fence.wrap_capabilities([Shell()]),
    )
    run = asyncio.create_task(h.run(agent, session))
    for token in tokens:
        await h.running(token, 2)
    fence.cancel()
    with pytest.raises(TurnCancelled):
        await run
    receipt = await fence.wait_for_quiescence()
    assert sorted(str(c.call_id) for c in receipt.commands) == ["c0", "c1", "c2", "c3"]
    assert sum(box.control_runs for box in receipt.sandboxes) == 1
    assert [p for token in tokens for p in procs.find(token)] == []


async def test_a_sibling_that_fails_has_the_other_calls_command_stopped(session, fence, h):
    token = procs.new_token()
    began = asyncio.Event()

    @function_tool(failure_error_function=None)
    async def fails() -> str:
        await began.wait()
        raise ValueError("sibling")

    agent = h.agent(
        [
            function_call("exec_command", hold(token), call_id="a"),
            function_call("fails", {}, call_id="b"),
        ],
        capabilities=fence.wrap_capabilities([Shell()]),
        tools=fence.wrap_tools([fails]),
    )
    run = asyncio.create_task(h.run(agent, session))
    await h.running(token, 2)
    began.set()
    with pytest.raises(UserError, match="sibling"):
        await run
    await h.until(lambda: procs.find(token) == [], "the command's end")
    assert not fence.cancelled


async def test_approval_and_resume(session, fence, h):
    def configure(toolset):
        toolset.exec_command = ExecCommandTool(session=session, needs_approval=True)

    def make(*outputs):
        return h.agent(
            *outputs, capabilities=fence.wrap_capabilities([Shell(configure_tools=configure)])
        )

    agent = make(function_call("exec_command", {"cmd": "echo approved"}, call_id="ap"))
    result = await h.run(agent, session)
    assert len(result.interruptions) == 1
    text = result.to_state().to_string()
    # Resumed as another worker would: from text, with an agent built anew.
    resumed = make()
    state = await RunState.from_string(resumed, text)
    state.approve(state.get_interruptions()[0])
    result = await h.run(resumed, session, state)
    assert "approved" in h.outputs(result)[-1]
    receipt = await fence.wait_for_quiescence()
    assert [c.call_id for c in receipt.commands] == ["ap"]


async def test_a_rejected_call_starts_nothing(session, fence, h, workspace):
    @function_tool(needs_approval=True)
    async def write() -> str:
        (workspace / "late").touch()
        return ""

    agent = h.agent(function_call("write", {}), tools=fence.wrap_tools([write]), capabilities=[])
    result = await h.run(agent, session)
    state = result.to_state()
    state.reject(result.interruptions[0])
    result = await h.run(agent, session, state)
    assert result.final_output == "done"
    assert not (workspace / "late").exists()
    assert (await fence.wait_for_quiescence()).operations.admitted == 0


async def test_approval_policies_see_the_prepared_arguments(fence, h):
    asked = []

    async def policy(_context, parameters, _call_id):
        asked.append(parameters)
        return False

    @function_tool(needs_approval=policy)
    async def tool(x: int) -> str:
        return str(x)

    variants: list[list[Any]] = [[tool], fence.wrap_tools([tool])]
    for each in variants:
        agent = Agent(
            name="a",
            model=ScriptedModel([[function_call("tool", {"x": 3})], [assistant_message("done")]]),
            tools=each,
        )
        assert h.outputs(await h.run(agent)) == ["3"]
    assert asked == [{"x": 3}, {"x": 3}]


async def test_handoff_between_agents_that_share_a_fence(session, h):
    fence = TurnFence()
    first, second = procs.new_token(), procs.new_token()
    b = h.agent(
        function_call("exec_command", hold(second, yield_time_ms=300), call_id="b"),
        name="b",
        capabilities=fence.wrap_capabilities([Shell()]),
    )
    a = h.agent(
        function_call("exec_command", hold(first, yield_time_ms=300), call_id="a"),
        function_call("transfer_to_b", {}),
        name="a",
        capabilities=fence.wrap_capabilities([Shell()]),
        handoffs=[handoff(b)],
    )
    result = await h.run(a, session)
    assert result.last_agent.name == "b"
    for token in (first, second):
        await h.running(token, 2)
    receipt = await fence.wait_for_quiescence()
    assert [c.call_id for c in receipt.commands] == ["a", "b"]
    assert procs.find(first) == procs.find(second) == []


async def test_an_agent_as_a_tool(session, h):
    fence = TurnFence()
    token = procs.new_token()
    inner = h.agent(
        function_call("exec_command", hold(token), call_id="inner"),
        name="inner",
        capabilities=fence.wrap_capabilities([Shell()]),
    )
    tool = inner.as_tool("ask", "asks", run_config=h.config(session))
    (wrapped,) = fence.wrap_tools([tool])
    assert wrapped._agent_instance is tool._agent_instance
    assert wrapped._is_agent_tool is True
    outer = h.agent(
        function_call("ask", {"input": "go"}, call_id="outer"), tools=[wrapped], capabilities=[]
    )
    run = asyncio.create_task(h.run(outer, session))
    await h.running(token, 2)
    fence.cancel()
    # The tool turns its error into text, as it would without the fence.
    result = await run
    assert "error occurred" in h.outputs(result)[0]
    receipt = await fence.wait_for_quiescence()
    assert [c.call_id for c in receipt.commands] == ["inner"]
    assert receipt.operations.settled == 2
    assert procs.find(token) == []


async def test_an_approval_inside_an_agent_as_a_tool(session, fence, h):
    def configure(toolset):
        toolset.exec_command.needs_approval = True

    inner = h.agent(
        function_call("exec_command", {"cmd": "echo approved"}, call_id="inner"),
        name="inner",
        capabilities=fence.wrap_capabilities([Shell(configure_tools=configure)]),
    )
    tools = fence.wrap_tools([inner.as_tool("ask", "asks", run_config=h.config(session))])
    outer = h.agent(
        function_call("ask", {"input": "go"}, call_id="outer"), tools=tools, capabilities=[]
    )
    result = await h.run(outer, session)
    assert len(result.interruptions) == 1
    state = result.to_state()
    state.approve(result.interruptions[0])
    result = await h.run(outer, session, state)
    assert h.outputs(result)[-1] == "done"
    receipt = await fence.wait_for_quiescence()
    assert [c.call_id for c in receipt.commands] == ["inner"]


async def test_a_run_after_the_cancel_raises_before_any_side_effect(session, h, workspace):
    fence = TurnFence()
    agent = h.agent(
        function_call("exec_command", {"cmd": "touch late"}),
        capabilities=fence.wrap_capabilities([Shell()]),
    )
    await fence.wait_for_quiescence()
    with pytest.raises(TurnCancelled):
        await h.run(agent, session)
    assert list(workspace.iterdir()) == []


async def test_a_cancel_between_two_tools_refuses_the_second(session, h, workspace):
    fence = TurnFence()

    @function_tool
    async def stop() -> str:
        fence.cancel("between")
        return "stopped"

    agent = h.agent(
        function_call("stop", {}),
        function_call("exec_command", {"cmd": "touch late"}),
        capabilities=fence.wrap_capabilities([Shell()]),
        tools=fence.wrap_tools([stop]),
    )
    with pytest.raises(TurnCancelled) as caught:
        await h.run(agent, session)
    assert caught.value.reason == "between"
    await fence.wait_for_quiescence()
    assert list(workspace.iterdir()) == []


async def test_results_of_a_run_are_the_same_with_and_without(session, fence, h):
    @function_tool
    async def shout(text: str) -> str:
        return text.upper()

    def outputs(tools, capabilities):
        return h.agent(
            function_call("exec_command", {"cmd": "printf out; printf err >&2; exit 3"}),
            function_call("shout", {"text": "x"}),
            function_call("exec_command", {"cmd": "cat", "tty": False, "yield_time_ms": 5000}),
            function_call("exec_command", {}),
            function_call("write_stdin", {"session_id": 4}),
            tools=tools,
            capabilities=capabilities,
        )

    plain = await h.run(outputs([shout], [Shell()]), session)
    fenced = await h.run(
        outputs(fence.wrap_tools([shout]), fence.wrap_capabilities([Shell()])), session
    )

    def told(result):
        lines = "\n".join(h.outputs(result)).splitlines()
        return [x for x in lines if not x.startswith(("Chunk ID", "Wall time"))]

    assert told(fenced) == told(plain)
    assert len(told(plain)) > 10


async def test_one_call_at_a_time(session, fence, h):
    agent = h.agent(
        [function_call("exec_command", {"cmd": f"echo {i}"}, call_id=f"c{i}") for i in range(3)],
        capabilities=fence.wrap_capabilities([Shell()]),
    )
    config = RunConfig(
        sandbox=SandboxRunConfig(session=session),
        tracing_disabled=True,
        tool_execution=ToolExecutionConfig(max_function_tool_concurrency=1),
    )
    result = await Runner.run(agent, "go", run_config=config)
    assert [o.splitlines()[-1] for o in h.outputs(result)] == ["0", "1", "2"]
