"""Capabilities: bound to the fenced session, whatever the SDK or a callback does with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from agents import function_tool
from agents.sandbox.capabilities import Capability, Compaction, Filesystem, Memory, Shell, Skills
from agents.sandbox.capabilities.tools import ExecCommandTool

from fence import TurnCancelled, TurnFence
from fence.errors import FenceUsageError
from fence.openai_agents import FencedSandboxSession
from tests.openai_agents._calls import function_call
from tests.support import procs


async def test_a_wrapped_capability_is_still_one_of_its_class(fence, session):
    for original in (Shell(), Filesystem(), Memory(generate=None), Compaction()):
        wrapped = fence.wrap_capability(original)
        assert wrapped is not original
        assert isinstance(wrapped, type(original))
        assert wrapped.type == original.type
        assert type(wrapped).__module__ == type(original).__module__
        assert type(wrapped).__qualname__ == type(original).__qualname__
        assert repr(wrapped) == repr(original)
        assert wrapped.required_capability_types() == original.required_capability_types()
        assert fence.wrap_capability(wrapped) is wrapped
        wrapped.bind(session)
        assert isinstance(wrapped.session, FencedSandboxSession)
        assert original.session is None


@pytest.mark.parametrize("copies", [1, 3])
async def test_the_fence_survives_copies(fence, session, copies):
    wrapped = fence.wrap_capability(Shell())
    for _ in range(copies):
        wrapped = copy.deepcopy(wrapped.clone()).model_copy(deep=True)
    wrapped.bind(session)
    assert wrapped.session.fence is fence
    assert all(tool.session.fence is fence for tool in wrapped.tools())


async def test_a_bound_capability_is_bound_again(fence, session):
    shell = Shell()
    shell.bind(session)
    wrapped = fence.wrap_capability(shell)
    assert isinstance(wrapped.session, FencedSandboxSession)
    assert shell.session is session


async def test_what_a_callback_puts_in_is_wrapped(fence, session, h):
    kept = []

    @function_tool(name_override="write_stdin")
    async def own_write() -> str:
        return "own"

    def configure(toolset):
        # A tool on the raw session that the app has at hand, and one of its own.
        toolset.exec_command = ExecCommandTool(session=session, needs_approval=True)
        toolset.write_stdin = own_write
        kept.append(toolset)

    wrapped = fence.wrap_capability(Shell(configure_tools=configure)).clone()
    wrapped.bind(session)
    exec_tool, write_tool = wrapped.tools()
    assert isinstance(exec_tool.session, FencedSandboxSession)
    assert exec_tool.needs_approval is True
    assert len(kept) == 1
    assert await h.call(write_tool, "{}") == "own"
    await h.call(exec_tool, '{"cmd": "true"}')
    assert (await fence.wait_for_quiescence()).commands[0].call_id == "call-1"


async def test_a_capability_of_ones_own(fence, session, h):
    class Notes(Capability):
        type: str = "notes"
        bound: int = 0

        def bind(self, session):
            self.bound += 1
            super().bind(session)

        def tools(self):
            capability: Any = self

            @function_tool
            async def note() -> str:
                result = await capability.session.exec("echo noted")
                return str(result.stdout, "utf-8")

            return [note]

    wrapped = fence.wrap_capability(Notes()).clone()
    wrapped.bind(session)
    assert wrapped.bound == 1
    (tool,) = wrapped.tools()
    assert await h.call(tool, "{}", call_id="n") == "noted\n"
    receipt = await fence.wait_for_quiescence()
    assert [c.call_id for c in receipt.commands] == ["n"]
    with pytest.raises(TurnCancelled):
        wrapped.bind(session)
    with pytest.raises(TurnCancelled):
        wrapped.tools()


async def test_two_fences_on_one_capability(session, h):
    async with TurnFence() as outer, TurnFence() as inner:
        wrapped = inner.wrap_capability(outer.wrap_capability(Shell())).clone()
        wrapped.bind(session)
        exec_tool = wrapped.tools()[0]
        assert "one" in await h.call(exec_tool, '{"cmd": "echo one"}')
        receipts = [await f.wait_for_quiescence() for f in (inner, outer)]
    assert [len(r.commands) for r in receipts] == [1, 1]
    assert [r.operations.admitted for r in receipts] == [1, 1]


async def test_not_a_capability(fence):
    with pytest.raises(FenceUsageError) as caught:
        fence.wrap_capability("shell")
    assert caught.value.field == "capability"


async def test_lazy_skills_load_through_the_fence(fence, session, workspace, h, tmp_path):
    from agents.sandbox.capabilities.skills import LocalDirLazySkillSource
    from agents.sandbox.entries import LocalDir
    from agents.sandbox.workspace_paths import SandboxPathGrant

    skill = tmp_path / "skills" / "greet"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: greet\ndescription: says hello\n---\nhello\n")
    session.state.manifest.extra_path_grants = (
        SandboxPathGrant(path=str(tmp_path), read_only=True),
    )
    skills = fence.wrap_capability(
        Skills(lazy_from=LocalDirLazySkillSource(source=LocalDir(src=tmp_path / "skills")))
    ).clone()
    skills.bind(session)
    (load,) = skills.tools()
    out = await h.call(load, '{"skill_name": "greet"}')
    assert "loaded" in str(out), out
    assert list(workspace.rglob("SKILL.md"))
    receipt = await fence.wait_for_quiescence()
    assert receipt.operations.admitted > 1
    with pytest.raises(TurnCancelled):
        await h.call(load, '{"skill_name": "greet"}')


async def test_a_whole_run_with_all_of_them(fence, session, workspace, h):
    token = procs.new_token()
    agent = h.agent(
        function_call(
            "exec_command",
            {"cmd": f"setsid sleep {token} & echo up", "yield_time_ms": 1000},
            call_id="a",
        ),
        function_call("exec_command", {"cmd": "pwd"}, call_id="b"),
        capabilities=fence.wrap_capabilities([Shell(), Filesystem(), Compaction()]),
    )
    result = await h.run(agent, session)
    outputs = h.outputs(result)
    assert "up" in outputs[0]
    assert str(workspace) in outputs[1]
    await h.running(token)
    receipt = await fence.wait_for_quiescence()
    assert [c.call_id for c in receipt.commands] == ["a", "b"]
    assert procs.find(token) == []
