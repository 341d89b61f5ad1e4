"""Each kind of tool: wrapped where it runs here, untouched where it does not."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import threading
from dataclasses import dataclass
from typing import Any, cast

import pytest
from agents import (
    ApplyPatchTool,
    AsyncComputer,
    CodeInterpreterTool,
    Computer,
    ComputerProvider,
    ComputerTool,
    CustomTool,
    FileSearchTool,
    FunctionTool,
    HostedMCPTool,
    ImageGenerationTool,
    LocalShellTool,
    RunContextWrapper,
    ShellTool,
    ToolSearchTool,
    WebSearchTool,
    function_tool,
)
from agents.editor import ApplyPatchEditor, ApplyPatchOperation, ApplyPatchResult
from agents.sandbox.capabilities.tools import (
    ExecCommandTool,
    SandboxApplyPatchEditor,
    SandboxApplyPatchTool,
    ViewImageTool,
    WriteStdinTool,
)
from agents.tool import dispose_resolved_computers, invoke_function_tool, resolve_computer
from agents.tool_context import ToolContext

from fence import EscalationPolicy, QuiescenceTimeout, TurnCancelled, TurnFence
from fence.openai_agents import FencedComputer, FencedSandboxSession, current_call_id
from tests.support import procs

PATCH = "*** Begin Patch\n*** Add File: new.txt\n+text\n*** End Patch\n"
HOSTED = [
    WebSearchTool(),
    FileSearchTool(vector_store_ids=["v"]),
    CodeInterpreterTool(tool_config={"type": "code_interpreter", "container": {"type": "auto"}}),
    HostedMCPTool(tool_config={"type": "mcp", "server_label": "x", "server_url": "https://x"}),
    ImageGenerationTool(tool_config={"type": "image_generation"}),
    ToolSearchTool(),
    ShellTool(environment={"type": "container_auto"}),
]


@pytest.mark.parametrize("tool", HOSTED, ids=lambda t: type(t).__name__)
async def test_hosted_tools_stay_the_same_object(fence, tool):
    assert fence.wrap_tools([tool]) == [tool]
    assert fence.wrap_tools([tool])[0] is tool


async def test_unknown_objects_stay_the_same_object(fence):
    class Odd:
        def __getattr__(self, name):
            raise RuntimeError(name)

    things = [object(), "text", None, 3, {"type": "function"}, lambda: None, Odd, Odd()]
    assert all(a is b for a, b in zip(fence.wrap_tools(things), things, strict=True))


# Function tools.


async def test_what_a_tool_carries_stays(fence):
    async def approve(_context, _parameters, _call_id):
        return True

    @function_tool(needs_approval=approve, timeout=9, is_enabled=False, name_override="named")
    async def tool(x: int) -> str:
        """Say something."""
        return f"{x} {current_call_id()}"

    (wrapped,) = fence.wrap_tools([tool])
    assert wrapped is not tool
    for field in tool.__dataclass_fields__:
        if field != "on_invoke_tool":
            assert getattr(wrapped, field) == getattr(tool, field), field
    assert wrapped.__wrapped__ is tool.__wrapped__
    assert fence.wrap_tools([wrapped]) == [wrapped]
    assert fence.wrap_tools([wrapped])[0] is wrapped


async def test_results_and_errors_are_the_tools_own(fence, h):
    @function_tool
    async def good(x: int) -> str:
        return f"{x} {current_call_id()}"

    @function_tool
    def plain(x: int) -> str:
        return f"{x} {threading.current_thread() is threading.main_thread()}"

    @function_tool
    async def bad() -> str:
        raise ValueError("oh")

    @function_tool(failure_error_function=None)
    async def raises() -> str:
        raise ValueError("oh")

    tools = [good, plain, bad]
    for wrapped, tool in zip(fence.wrap_tools(tools), tools, strict=True):
        with_fence = await h.call(wrapped, '{"x": 4}')
        without = await h.call(tool, '{"x": 4}')
        assert with_fence == without.replace("None", "call-1")
    assert await h.call(fence.wrap_tools([good])[0], "{nonsense") == await h.call(good, "{nonsense")
    (wrapped,) = fence.wrap_tools([raises])
    with pytest.raises(ValueError, match="oh"):
        await h.call(wrapped, "{}")


async def test_the_context_that_a_tool_declares_is_what_it_gets(fence, h):
    seen = []

    async def narrow(context: RunContextWrapper, _raw: str) -> str:
        seen.append(type(context))
        return ""

    async def wide(context: ToolContext, _raw: str) -> str:
        seen.append(type(context))
        return ""

    for invoke in (narrow, wide):
        tool = FunctionTool("t", "", {"type": "object"}, invoke, strict_json_schema=False)
        for each in (tool, *fence.wrap_tools([tool])):
            await invoke_function_tool(function_tool=each, context=h.context(), arguments="{}")
    assert seen == [RunContextWrapper, RunContextWrapper, ToolContext, ToolContext]


async def test_an_async_tool_in_flight_gets_its_grace_and_is_then_cancelled(h):
    fence = TurnFence(policy=EscalationPolicy(call_grace=0.2))
    ended = []

    @function_tool
    async def waits() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return ""

    @function_tool
    async def finishes() -> str:
        gate.set()
        await fence_closed.wait()
        return "true result"

    gate, fence_closed = asyncio.Event(), asyncio.Event()
    wrapped = fence.wrap_tools([waits, finishes])
    calls = [asyncio.create_task(h.call(tool, "{}")) for tool in wrapped]
    await gate.wait()
    fence.cancel()
    fence_closed.set()
    receipt = await fence.wait_for_quiescence()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[0], TurnCancelled)
    assert results[1] == "true result"
    assert ended == [True]
    assert receipt.operations.settled == 2


async def test_a_sync_tool_is_waited_for_and_named(h):
    fence = TurnFence()
    gate, began = threading.Event(), threading.Event()

    @function_tool
    def blocks() -> str:
        began.set()
        gate.wait(30)
        return "done"

    (wrapped,) = fence.wrap_tools([blocks])
    call = asyncio.create_task(h.call(wrapped, "{}"))
    await h.until(began.is_set, "the thread")
    with pytest.raises(QuiescenceTimeout) as caught:
        await fence.wait_for_quiescence(0.3)
    assert [(o.name, o.kind) for o in caught.value.partial.open_operations] == [
        ("blocks", "thread")
    ]
    gate.set()
    assert await call == "done"
    assert (await fence.wait_for_quiescence()).proven


# Tools with a session.


async def test_sdk_tools_are_copies_bound_to_the_fenced_session(fence, session):
    tools: list[Any] = [
        ExecCommandTool(session=session, user=None),
        WriteStdinTool(session=session),
        ViewImageTool(session=session),
        SandboxApplyPatchTool(session=session),
    ]
    for wrapped, tool in zip(fence.wrap_tools(tools), tools, strict=True):
        assert type(wrapped) is type(tool)
        assert tool.session is session
        assert isinstance(wrapped.session, FencedSandboxSession)
        assert fence.wrap_tools([wrapped])[0] is wrapped
    assert isinstance(fence.wrap_tools(tools)[3].editor.session, FencedSandboxSession)


async def test_exec_and_write_stdin(fence, session, h):
    exec_tool, write_tool = fence.wrap_tools(
        [ExecCommandTool(session=session), WriteStdinTool(session=session)]
    )
    out = await h.call(exec_tool, '{"cmd": "echo one; exit 3"}', call_id="c-1")
    assert "Process exited with code 3" in out
    assert "one" in out
    out = await h.call(
        exec_tool, '{"cmd": "read x; echo got $x; exit 5", "tty": true, "yield_time_ms": 250}'
    )
    number = int(out.split("session ID ")[1].split()[0])
    arguments = json.dumps({"session_id": number, "chars": "word\n", "yield_time_ms": 8000})
    out = await h.call(write_tool, arguments)
    assert "got word" in out
    assert "Process exited with code 5" in out
    assert "Invalid tool arguments" in await h.call(exec_tool, "{}")
    receipt = await fence.wait_for_quiescence()
    assert [(c.call_id, c.exit_code, c.outcome) for c in receipt.commands] == [
        ("c-1", 3, "exited"),
        ("call-1", 5, "exited"),
    ]


async def test_apply_patch_and_view_image(fence, session, workspace, h):
    patch, view = fence.wrap_tools(
        [SandboxApplyPatchTool(session=session), ViewImageTool(session=session)]
    )
    assert "Created new.txt" in await h.call(patch, PATCH)
    assert (workspace / "new.txt").read_text() == "text"
    (workspace / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    image = await h.call(view, '{"path": "a.png"}')
    assert image.image_url.startswith("data:image/png")
    assert "not found" in await h.call(view, '{"path": "b.png"}')


async def test_sdk_tools_refuse_after_the_cancel(session, workspace, h):
    fence = TurnFence()
    tools = fence.wrap_tools(
        [
            ExecCommandTool(session=session),
            WriteStdinTool(session=session),
            SandboxApplyPatchTool(session=session),
            ViewImageTool(session=session),
        ]
    )
    await fence.wait_for_quiescence()
    inputs = ['{"cmd": "touch new.txt"}', '{"session_id": 1}', PATCH, '{"path": "a.png"}']
    for tool, given in zip(tools, inputs, strict=True):
        with pytest.raises(TurnCancelled):
            await h.call(tool, given)
    assert list(workspace.iterdir()) == []


async def test_a_subclass_with_a_session_of_its_own(fence, session, h, caplog):
    class Counting(ExecCommandTool):
        tool_name = "counting"

        async def _invoke(self, context, raw_input):
            return "counted " + await super()._invoke(context, raw_input)

    @dataclass(init=False)
    class ByPartial(FunctionTool):
        def __init__(self, session):
            self.session = session
            super().__init__(
                "partial",
                "",
                {"type": "object"},
                functools.partial(type(self).go, self),
                strict_json_schema=False,
            )

        async def go(self, _context, _raw):
            return type(self.session).__name__

    @dataclass(init=False)
    class ByClosure(ByPartial):
        def __init__(self, session):
            super().__init__(session)
            self.on_invoke_tool = lambda context, raw: self.go(context, raw)

    counting, partial, closure = fence.wrap_tools(
        [Counting(session=session), ByPartial(session), ByClosure(session)]
    )
    assert (await h.call(counting, '{"cmd": "true"}')).startswith("counted Chunk ID")
    assert await h.call(partial, "{}") == "FencedSandboxSession"
    # A closure cannot be rebound: owned as a whole, and a person is told.
    assert await h.call(closure, "{}") == "SandboxSession"
    notes = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(notes) == 1
    assert "no method of the tool" in notes[0].getMessage()


async def test_timeout_of_a_tool_stops_its_command(fence, session, h):
    tool = ExecCommandTool(session=session)
    tool.timeout_seconds = 1.0
    (wrapped,) = fence.wrap_tools([tool])
    token = procs.new_token()
    out = await invoke_function_tool(
        function_tool=wrapped,
        context=h.context("exec_command"),
        arguments=json.dumps({"cmd": f"setsid sleep {token} & wait", "yield_time_ms": 30000}),
    )
    assert "timed out" in out
    await h.until(lambda: procs.find(token) == [], "the command's end")
    assert not fence.cancelled


async def test_negative_control_timeout_of_an_unfenced_tool_leaves_the_command(session, h):
    tool = ExecCommandTool(session=session)
    tool.timeout_seconds = 2.0
    token = procs.new_token()
    await invoke_function_tool(
        function_tool=tool,
        context=h.context("exec_command"),
        arguments=json.dumps({"cmd": f"setsid sleep {token} & wait", "yield_time_ms": 30000}),
    )
    await session.exec("true")
    left = procs.find(token)
    assert left
    procs.end(left)


# Custom tools and editors.


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_custom_tools(h, asynchronous):
    async def later(context, raw):
        return f"{raw} {current_call_id()} {context.tool_call_id}"

    def now(context, raw):
        return f"{raw} {current_call_id()} {context.tool_call_id}"

    fence = TurnFence()
    tool = CustomTool("c", "", later if asynchronous else now)
    (wrapped,) = fence.wrap_tools([tool])
    assert wrapped.tool_config == tool.tool_config
    assert await h.call(wrapped, "raw", call_id="k") == "raw k k"
    receipt = await fence.wait_for_quiescence()
    assert receipt.operations.admitted == 1
    with pytest.raises(TurnCancelled):
        await h.call(wrapped, "raw")


class Editor:
    def __init__(self):
        self.seen = []
        self.extra = "extra"

    async def create_file(self, operation):
        self.seen.append(operation.path)
        return ApplyPatchResult(output="created")

    def update_file(self, operation):
        self.seen.append(operation.path)
        return "updated"

    def delete_file(self, operation):
        self.seen.append(operation.path)


async def test_hosted_apply_patch_with_an_editor_of_ones_own():
    fence = TurnFence()
    editor = Editor()
    tool = ApplyPatchTool(editor=editor)
    (wrapped,) = fence.wrap_tools([tool])
    assert tool.editor is editor
    fenced: Any = wrapped.editor
    assert isinstance(wrapped.editor, ApplyPatchEditor)
    assert fenced.extra == "extra"
    make = functools.partial(ApplyPatchOperation, path="p")
    assert (await fenced.create_file(make("create_file"))).output == "created"
    assert await fenced.update_file(make("update_file")) == "updated"
    assert await fenced.delete_file(make("delete_file")) is None
    await fence.wait_for_quiescence()
    for name in ("create_file", "update_file", "delete_file"):
        with pytest.raises(TurnCancelled):
            await getattr(fenced, name)(make(name))
    assert editor.seen == ["p"] * 3


async def test_hosted_apply_patch_with_the_sandbox_editor(fence, session, workspace):
    tool = ApplyPatchTool(editor=SandboxApplyPatchEditor(session))
    (wrapped,) = fence.wrap_tools([tool])
    assert isinstance(wrapped.editor.session, FencedSandboxSession)
    await wrapped.editor.create_file(ApplyPatchOperation("create_file", "e.txt", "+x\n"))
    assert (workspace / "e.txt").read_text() == "x"
    await fence.wait_for_quiescence()
    with pytest.raises(TurnCancelled):
        await wrapped.editor.create_file(ApplyPatchOperation("create_file", "f.txt", "+x\n"))
    assert not (workspace / "f.txt").exists()


# Shell executors.


@dataclass
class Request:
    data: object


@dataclass
class Data:
    call_id: str


@pytest.mark.parametrize("kind", [LocalShellTool, ShellTool])
@pytest.mark.parametrize("asynchronous", [True, False])
async def test_local_shells(kind, asynchronous):
    ran = []

    def now(request):
        ran.append(current_call_id())
        return "out"

    async def later(request):
        return now(request)

    fence = TurnFence()
    tool = kind(executor=later if asynchronous else now)
    (wrapped,) = fence.wrap_tools([tool])
    assert wrapped.name == tool.name
    assert await wrapped.executor(Request(Data("s-1"))) == "out"
    await fence.wait_for_quiescence()
    with pytest.raises(TurnCancelled):
        await wrapped.executor(Request(Data("s-2")))
    assert ran == ["s-1"]


# Computers.


class Screen(Computer):
    environment = "ubuntu"
    dimensions = (3, 4)

    def __init__(self):
        self.did = []

    def screenshot(self):
        return "png"

    def click(self, x, y, button, *, keys=None):
        self.did.append(("click", x, y, button, keys))

    def double_click(self, x, y):
        self.did.append(("double", x, y))

    def scroll(self, x, y, scroll_x, scroll_y):
        self.did.append("scroll")

    def type(self, text):
        self.did.append(text)

    def wait(self):
        self.did.append("wait")

    def move(self, x, y):
        self.did.append("move")

    def keypress(self, keys):
        self.did.append(keys)

    def drag(self, path):
        self.did.append(path)


class AsyncScreen(AsyncComputer):
    def __init__(self):
        self.inner = Screen()
        self.did = self.inner.did

    async def screenshot(self):
        return "png"

    async def click(self, x, y, button, *, keys=None):
        self.inner.click(x, y, button, keys=keys)

    async def double_click(self, x, y):
        self.inner.double_click(x, y)

    async def scroll(self, x, y, scroll_x, scroll_y):
        self.inner.scroll(x, y, scroll_x, scroll_y)

    async def type(self, text):
        self.inner.type(text)

    async def wait(self):
        self.inner.wait()

    async def move(self, x, y):
        self.inner.move(x, y)

    async def keypress(self, keys):
        self.inner.keypress(keys)

    async def drag(self, path):
        self.inner.drag(path)


@pytest.mark.parametrize("make", [Screen, AsyncScreen])
async def test_a_computer_instance(make):
    fence = TurnFence()
    real: Any = make()
    tool = ComputerTool(computer=real)
    (wrapped,) = fence.wrap_tools([tool])
    assert cast(Any, tool.computer) is real
    computer: Any = await resolve_computer(tool=wrapped, run_context=RunContextWrapper(None))
    assert type(computer) is FencedComputer
    acts: Any = computer
    assert await acts.screenshot() == "png"
    await acts.click(1, 2, "left", keys=["ctrl"])
    await acts.drag([(1, 2)])
    assert real.did == [("click", 1, 2, "left", ["ctrl"]), [(1, 2)]]
    # The SDK asks the signature whether `keys` may be passed.
    assert "keys" in inspect.signature(computer.click).parameters
    assert "keys" not in inspect.signature(computer.double_click).parameters
    assert computer.dimensions == real.dimensions
    assert computer.did is real.did
    await fence.wait_for_quiescence()
    for name in FencedComputer.ACTIONS:
        with pytest.raises(TurnCancelled):
            await getattr(computer, name)()
    assert len(real.did) == 2


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("provided", [True, False])
async def test_computer_factories_and_providers(asynchronous, provided):
    fence = TurnFence()
    made, disposed = [], []

    def now(*, run_context):
        made.append(Screen())
        return made[-1]

    async def later(*, run_context):
        return now(run_context=run_context)

    def dispose(*, run_context, computer):
        disposed.append(computer)

    create = later if asynchronous else now
    tool = ComputerTool(computer=ComputerProvider(create, dispose) if provided else create)
    (wrapped,) = fence.wrap_tools([tool])
    context = RunContextWrapper(None)
    computer = await resolve_computer(tool=wrapped, run_context=context)
    assert isinstance(computer, FencedComputer)
    assert computer.computer is made[0]
    # Another run has another computer; the tool remembers its factory.
    await resolve_computer(tool=wrapped, run_context=RunContextWrapper(None))
    assert len(made) == 2
    await fence.wait_for_quiescence()
    await dispose_resolved_computers(run_context=context)
    assert disposed == ([made[0]] if provided else [])
    with pytest.raises(TurnCancelled):
        await resolve_computer(tool=wrapped, run_context=RunContextWrapper(None))
    assert len(made) == 2
    # A provider that is used twice is fenced once more by the next turn only.
    async with TurnFence() as next_turn:
        (again,) = next_turn.wrap_tools([tool])
        assert isinstance(await resolve_computer(tool=again, run_context=context), FencedComputer)
