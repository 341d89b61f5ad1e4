"""Each private name of the SDK that the adapter uses: a new SDK version fails here first."""

from __future__ import annotations

import ast
import copy
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import agents.tool as tool_module
import pytest
from agents import ComputerProvider, ComputerTool, FunctionTool, function_tool
from agents.mcp import MCPServer
from agents.sandbox.capabilities import Capability, Filesystem, Memory, Shell
from agents.sandbox.capabilities.tools import ExecCommandTool, SandboxApplyPatchTool
from agents.sandbox.errors import ExecTransportError
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient, UnixLocalSandboxSession
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.sandbox_session import SandboxSession
from agents.tool_context import ToolContext

import fence.openai_agents
from fence.openai_agents import internals
from fence.openai_agents.session import FencedSandboxSession

PACKAGE = Path(fence.openai_agents.__file__).parent


@pytest.fixture
async def session():
    client = UnixLocalSandboxClient()
    session = await client.create()
    await session.start()
    yield session
    await session.aclose()
    await client.delete(session)


async def test_sdk_wraps_the_providers_session_in_inner(session):
    assert isinstance(session, SandboxSession)
    assert isinstance(session._inner, UnixLocalSandboxSession)
    assert internals.innermost(session) is session._inner
    assert internals.innermost(session._inner) is session._inner


async def test_prepare_exec_command_of_the_provider_and_of_the_wrapper_differ(session):
    # Why the innermost session is asked: the wrapper would answer with a login shell.
    assert session._prepare_exec_command("x", shell=True, user=None) == ["sh", "-lc", "x"]
    assert internals.prepare_command(session, ["x"], True) == ["sh", "-c", "x"]
    assert internals.prepare_command(session, ["x"], ["bash", "-lc"]) == ["bash", "-lc", "x"]
    assert internals.prepare_command(session, ["a", "b c"], False) == ["a", "b c"]


async def test_a_program_in_the_workspace_keeps_its_absolute_name(session):
    program = str(Path(session.state.manifest.root).resolve() / "run me")
    argv = internals.prepare_command(session, [program, "x"], False)
    assert argv == ["/bin/sh", "-c", f"exec '{program}' \"$@\"", "sh", "x"]
    # What would go wrong otherwise, as the SDK does it to every word but the first.
    relative = session._inner._workspace_relative_command_parts
    root = Path(session.state.manifest.root).resolve()
    assert relative(["sh", program], root) == ["sh", "run me"]
    assert relative(["sh", *argv], root)[1:] == argv


KNOWN_ASYNC = {
    "__aenter__", "__aexit__", "_aclose_dependencies", "_aclose_impl", "_after_shutdown",
    "_after_start", "_after_start_failed", "_after_stop", "_annotate", "_apply_entry_batch",
    "_apply_manifest", "_before_shutdown", "_before_stop",
    "_can_reuse_restorable_snapshot_workspace",
    "_can_skip_snapshot_restore_on_resume", "_check_mkdir_with_exec", "_check_read_with_exec",
    "_check_rm_with_exec", "_check_write_with_exec", "_clear_workspace_dir_on_resume_pruned",
    "_clear_workspace_root_on_resume", "_compute_and_cache_snapshot_fingerprint",
    "_delete_cached_snapshot_fingerprint_best_effort", "_emit_finish_event", "_emit_start_event",
    "_ensure_backend_started", "_ensure_runtime_helper_installed", "_ensure_runtime_helpers",
    "_exec_checked_nonzero", "_exec_internal", "_extract_tar_archive", "_extract_zip_archive",
    "_live_workspace_matches_snapshot_on_resume", "_persist_snapshot", "_prepare_backend_workspace",
    "_probe_workspace_root_for_preserved_resume", "_raise_read_error_from_exec", "_read",
    "_read_bounded", "_read_cached_snapshot_fingerprint", "_reapply_ephemeral_manifest_on_resume",
    "_remove_workspace_entry_on_resume", "_resolve_exposed_port",
    "_restore_snapshot_and_reapply_ephemeral_on_resume",
    "_restore_snapshot_into_workspace_on_resume", "_run_pre_stop_hooks", "_shutdown_backend",
    "_start_workspace", "_terminate_ambiguous_mount_transition", "_validate_manifest_application",
    "_validate_path_access", "_validate_remote_path_access", "_write_new_file", "aclose",
    "apply_manifest", "apply_patch", "exec", "extract", "hydrate_workspace", "ls", "mkdir", "mv",
    "persist_workspace", "provision_manifest_accounts", "pty_exec_start", "pty_terminate_all",
    "pty_write_stdin", "read", "read_bounded", "resolve_exposed_port", "rm", "run_pre_stop_hooks",
    "running", "same_file", "shutdown", "start", "stop", "write",
}  # fmt: skip


def test_no_new_coroutine_method_on_a_session():
    # A new one is admitted as a file operation; look whether it is lifecycle or a command.
    found = {name for name, kind in internals.session_names().items() if kind == "async"}
    assert found == KNOWN_ASYNC


def test_every_name_of_a_session_is_forwarded_or_overridden():
    own = {**vars(internals.DelegatingSession), **vars(FencedSandboxSession)}
    inherited = {
        name
        for name, kind in internals.session_names().items()
        if kind != "static" and name not in own
    }
    assert inherited == set()


def test_every_operation_on_the_sandbox_is_the_fences():
    own = vars(FencedSandboxSession)
    for name, kind in internals.session_names().items():
        if kind == "async" and name not in internals.LIFECYCLE:
            if name in {"_annotate", "_emit_start_event", "_emit_finish_event", "_exec_internal"}:
                continue
            assert name in own or name == "_exec_checked_nonzero", name


def test_state_stays_the_sdks_own_descriptor():
    # agents.sandbox._mount_security compares it by identity and redacts every error otherwise.
    assert "state" not in vars(internals.DelegatingSession)
    assert inspect.getattr_static(FencedSandboxSession, "state") is SandboxSession.state


def test_redacting_decorators_keep_coroutine_functions():
    for name in ("exec", "start", "stop", "aclose", "apply_manifest"):
        assert inspect.iscoroutinefunction(vars(BaseSandboxSession)[name])


def test_signatures_that_the_fenced_session_repeats():
    for name in ("exec", "pty_exec_start", "pty_write_stdin"):
        sdk = inspect.signature(vars(BaseSandboxSession)[name])
        ours = inspect.signature(vars(FencedSandboxSession)[name])
        assert [(p.name, p.kind, p.default) for p in sdk.parameters.values()] == [
            (p.name, p.kind, p.default) for p in ours.parameters.values()
        ]


async def test_the_providers_table_of_sessions_can_be_looked_at(session):
    update = await session.pty_exec_start("read x; exit 7", tty=True, yield_time_s=0.25)
    number = update.process_id
    assert number is not None
    assert internals.peek_session(session, number) == (False, None)
    update = await session.pty_write_stdin(session_id=number, chars="\n", yield_time_s=5)
    assert update.exit_code == 7
    assert internals.peek_session(session, number) == (True, None)


def test_a_session_without_a_table_says_so():
    class Other(UnixLocalSandboxSession):
        def __init__(self) -> None:
            pass

    assert internals.peek_session(Other(), 1) is None


async def test_errors_name_the_users_command(session):
    marked = ["sh", "-c", "marked", "sleep", "9"]
    with pytest.raises(ExecTransportError) as caught:
        raise ExecTransportError(command=["sudo", "-u", "x", "--", *marked])
    internals.restore_command(caught.value, marked, ["sleep", "9"])
    assert caught.value.command == ("sudo", "-u", "x", "--", "sleep", "9")
    assert caught.value.context["command"] == caught.value.command
    assert caught.value.context["command_str"] == "sudo -u x -- sleep 9"


def test_decorated_tools_have_the_sdks_invoker_and_marker():
    @function_tool
    def plain() -> str:
        return ""

    @function_tool
    async def coroutine() -> str:
        return ""

    for tool in (plain, coroutine):
        assert internals.has_failure_handling(tool.on_invoke_tool)
        assert callable(tool.on_invoke_tool.__agents_bind_function_tool__)
        assert callable(tool.on_invoke_tool.prepare_arguments)
        assert callable(tool.on_invoke_tool._invoke_tool_impl)
        assert callable(tool.on_invoke_tool._on_handled_error)
        assert tool.on_invoke_tool._function_tool is tool
    assert internals.is_sync_invoker(plain.on_invoke_tool)
    assert not internals.is_sync_invoker(coroutine.on_invoke_tool)
    again: Any = copy.copy(plain).on_invoke_tool
    assert again._function_tool is not plain


async def test_sdk_tools_rebind_their_invoker_when_copied(session):
    tool = ExecCommandTool(session=session)
    copied: Any = copy.copy(tool)
    assert copied.on_invoke_tool.__self__ is copied
    # Not so a CustomTool: the adapter does it.
    patch = SandboxApplyPatchTool(session=session)
    invoker: Any = copy.copy(patch).on_invoke_tool
    assert invoker.__self__ is patch


def test_prepared_arguments_of_an_approval_can_be_dropped():
    context = ToolContext(context=None, tool_name="t", tool_call_id="c", tool_arguments="{}")
    assert context._function_tool_arguments is None
    context._function_tool_arguments = cast(Any, object())
    internals.forget_prepared_arguments(context)
    assert context._function_tool_arguments is None
    internals.forget_prepared_arguments(object())


def test_agents_as_tools_are_marked():
    fields = FunctionTool.__dataclass_fields__
    assert {"_is_agent_tool", "_agent_instance"} <= set(fields)


def test_computers_are_remembered_by_tool():
    def create(*, run_context):
        raise AssertionError

    factory = ComputerTool(computer=create)
    provider = ComputerTool(computer=ComputerProvider(create=create))
    assert internals.computer_config(factory) is create
    assert internals.is_computer_provider(internals.computer_config(provider))
    assert not internals.is_computer_provider(create)
    assert internals.computer_config(ComputerTool(computer="instance")) == "instance"
    assert factory in tool_module._computer_initializer_map


def test_clone_copies_private_attributes_by_reference():
    class Probe(Capability):
        type: str = "probe"
        _kept: object = None

    original = Probe()
    original._kept = object()
    cloned: Any = original.clone()
    assert cloned._kept is original._kept
    assert type(original.clone()) is Probe
    for kind in (Shell, Filesystem, Memory):
        assert type(kind().clone()) is kind


def test_mcp_helpers_the_sdk_calls():
    for name in ("_get_needs_approval_for_tool", "_get_failure_error_function", "_error_name"):
        assert name in vars(MCPServer)


def test_only_internals_touches_private_names():
    """Parse the adapter: `x._name` on anything but self, and imports of private names."""
    allowed = {"_FenceLink"}
    for path in PACKAGE.glob("*.py"):
        if path.name == "internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                owner = node.value
                own = isinstance(owner, ast.Name) and owner.id in {"self", "cls"}
                dunder = node.attr.startswith("__") and node.attr.endswith("__")
                assert own or dunder or node.attr in allowed, f"{path.name}: {ast.unparse(node)}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agents"):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert private == [], f"{path.name}: {private}"


def _import_with(preparation: str) -> str:
    program = (
        f"import sys\n{preparation}\nimport fence\n"
        "try:\n    fence.TurnFence().wrap_tools([])\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
        "try:\n    import fence.openai_agents\n"
        "except ImportError as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_the_sdk_the_error_says_what_to_install():
    first, second = _import_with("sys.modules['agents'] = None").splitlines()
    assert first.startswith("ExtraMissing")
    assert second.startswith("ModuleNotFoundError fence.openai_agents needs the OpenAI Agents SDK")


def test_with_another_sdk_the_error_says_which():
    first, second = _import_with(
        "import agents.tool\ndel agents.tool._is_computer_provider"
    ).splitlines()
    assert "openai-agents" in first
    assert second.startswith("ImportError the installed openai-agents is not the version")
    assert "_is_computer_provider" in second
