"""Tools of other makers that are named and speak like the SDK's."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from agents import FunctionTool
from agents.sandbox.capabilities.tools import ExecCommandTool, WriteStdinTool

from fence import TurnCancelled, TurnFence
from tests.openai_agents._calls import function_call
from tests.support import procs


def foreign(real, seen=None):
    """A plain FunctionTool in front of an SDK tool: what the adapter cannot look into."""

    async def invoke(context, raw):
        if seen is not None:
            seen.append(json.loads(raw))
        return await real.on_invoke_tool(context, raw)

    return FunctionTool(
        real.name, "foreign", real.params_json_schema, invoke, strict_json_schema=False
    )


def body(text: str) -> str:
    return text.split("Output:\n", 1)[1]


CASES = [
    {"cmd": "echo out; echo err >&2; exit 3"},
    {"cmd": "pwd; echo \"it's $HOME\" '$x' `echo a` \\\\"},
    {"cmd": "cat <<'EOF'\nlines 'and' \"quotes\"\nEOF\n"},
    {"cmd": "echo $BASH_VERSION | grep -c .; shopt -q login_shell; echo $?", "shell": "bash"},
    {
        "cmd": "echo $BASH_VERSION | grep -c .; shopt -q login_shell; echo $?",
        "shell": "bash",
        "login": False,
    },
    {"cmd": "echo a; false", "tty": True},
]


@pytest.mark.parametrize("arguments", CASES, ids=str)
async def test_the_result_is_the_same(fence, session, h, arguments):
    tool = foreign(ExecCommandTool(session=session))
    (wrapped,) = fence.wrap_tools([tool], session=session)
    given = json.dumps({"yield_time_ms": 20000, **arguments})
    with_fence, without = await h.call(wrapped, given), await h.call(tool, given)
    assert body(with_fence) == body(without)
    assert with_fence.splitlines()[2] == without.splitlines()[2]


async def test_its_commands_are_stopped(session, h):
    fence = TurnFence()
    exec_tool, write_tool = fence.wrap_tools(
        [foreign(ExecCommandTool(session=session)), foreign(WriteStdinTool(session=session))],
        session=session,
    )
    token = procs.new_token()
    arguments = {"cmd": f"setsid sleep {token} & read x; sleep {token}", "tty": True}
    out = await h.call(exec_tool, json.dumps({**arguments, "yield_time_ms": 500}))
    number = int(out.split("session ID ")[1].split()[0])
    await h.call(write_tool, json.dumps({"session_id": number, "chars": "go\n"}))
    await h.running(token, 2)
    receipt = await fence.wait_for_quiescence()
    assert procs.find(token) == []
    assert receipt.adopted == ()
    assert [(c.call_id, c.tty, c.outcome) for c in receipt.commands] == [
        ("call-1", True, "stopped")
    ]
    for tool, given in ((exec_tool, {"cmd": "true"}), (write_tool, {"session_id": 1})):
        with pytest.raises(TurnCancelled):
            await h.call(tool, json.dumps(given))


async def test_a_cancelled_caller(fence, session, h):
    (wrapped,) = fence.wrap_tools([foreign(ExecCommandTool(session=session))], session=session)
    token = procs.new_token()
    task = asyncio.create_task(
        h.call(wrapped, json.dumps({"cmd": f"setsid sleep {token} & wait", "yield_time_ms": 30000}))
    )
    await h.running(token)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await h.until(lambda: procs.find(token) == [], "the command's end")


async def test_only_cmd_and_login_are_changed(fence, session, h):
    seen: list[Any] = []
    (wrapped,) = fence.wrap_tools(
        [foreign(ExecCommandTool(session=session), seen)], session=session
    )
    given = {"cmd": "true", "login": True, "shell": "bash", "workdir": ".", "yield_time_ms": 9000}
    await h.call(wrapped, json.dumps(given))
    (got,) = seen
    assert got["login"] is False
    assert got["cmd"].startswith("exec ")
    assert {**got, "cmd": "true", "login": True} == given


async def test_arguments_that_are_not_the_sdks_go_to_the_tool(fence, session, h):
    seen: list[Any] = []
    exec_tool, write_tool = fence.wrap_tools(
        [
            foreign(ExecCommandTool(session=session), seen),
            foreign(WriteStdinTool(session=session)),
        ],
        session=session,
    )
    for given in ("{}", '{"cmd": 3}', '{"cmd": ""}', '{"command": "x"}'):
        assert "Invalid tool arguments" in await h.call(exec_tool, given)
        assert seen.pop() == json.loads(given)
    for given in ("{}", '{"session_id": "x"}', '{"session_id": true}'):
        assert isinstance(await h.call(write_tool, given), str)
    assert (await fence.wait_for_quiescence()).commands == ()


async def test_without_a_session_it_is_a_plain_tool_and_a_person_is_told(fence, session, h, caplog):
    (wrapped,) = fence.wrap_tools([foreign(ExecCommandTool(session=session))])
    notes = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(notes) == 1
    assert "session=" in notes[0].getMessage()
    assert "one" in await h.call(wrapped, '{"cmd": "echo one"}')
    receipt = await fence.wait_for_quiescence()
    assert receipt.commands == ()
    assert receipt.operations.admitted == 1


async def test_an_answer_that_is_no_banner_leaves_the_command_to_the_sweep(session, h):
    fence = TurnFence()

    async def silent(context, raw):
        await ExecCommandTool(session=session).on_invoke_tool(context, raw)
        return {"ok": True}

    tool = FunctionTool("exec_command", "", {"type": "object"}, silent, strict_json_schema=False)
    (wrapped,) = fence.wrap_tools([tool], session=session)
    token = procs.new_token()
    given = json.dumps({"cmd": f"setsid sleep {token} & sleep {token}", "yield_time_ms": 300})
    assert await h.call(wrapped, given) == {"ok": True}
    await h.running(token, 2)
    assert (await fence.wait_for_quiescence()).commands[0].outcome == "stopped"
    assert procs.find(token) == []


async def test_an_approval_of_a_decorated_foreign_tool(fence, session, h):
    from agents import function_tool

    real = ExecCommandTool(session=session)

    @function_tool(needs_approval=True)
    async def exec_command(cmd: str) -> str:
        return str(await real.on_invoke_tool(h.context(), json.dumps({"cmd": cmd, "login": False})))

    agent = h.agent(
        function_call("exec_command", {"cmd": "echo approved"}, call_id="f"),
        tools=fence.wrap_tools([exec_command], session=session),
        capabilities=[],
    )
    result = await h.run(agent, session)
    state = result.to_state()
    state.approve(result.interruptions[0])
    result = await h.run(agent, session, state)
    assert "approved" in h.outputs(result)[-1]
    receipt = await fence.wait_for_quiescence()
    assert [c.call_id for c in receipt.commands] == ["f"]
