"""The public names are a promise: this file says what is promised, word by word."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import importlib.resources
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import fence
import fence_providers

# DESIGN.md, section 8, plus what a caller meets as an argument, a result or an error of those.
PROMISED = {
    "EscalationPolicy",
    "FenceError",
    "QuiescenceReceipt",
    "QuiescenceTimeout",
    "SandboxCommandResult",
    "SandboxControl",
    "SandboxProof",
    "TurnCancelled",
    "TurnFence",
    "quiesce_turn",
}

FENCE_METHODS = {
    "bind_sandbox",
    "cancel",
    "cancelled",
    "check_open",
    "on_quiesce",
    "reason",
    "receipt",
    "run_operation",
    "run_sandbox_command",
    "running",
    "session_closed",
    "start_command",
    "turn",
    "turn_id",
    "wait_for_quiescence",
    "wrap_capabilities",
    "wrap_capability",
    "wrap_mcp_server",
    "wrap_session",
    "wrap_tools",
    "write_stdin",
}

RECEIPT_FIELDS = {
    "cancelled_at",
    "commands",
    "containment",
    "elapsed_ms",
    "exemptions",
    "operations",
    "quiesced_at",
    "reason",
    "sandboxes",
    "started_at",
    "turn_id",
    "unsettled_starts",
    "version",
}


def test_what_is_promised_is_there():
    assert set(fence.__all__) >= PROMISED


def test_all_is_sorted_and_says_everything():
    assert list(fence.__all__) == sorted(fence.__all__)
    assert len(set(fence.__all__)) == len(fence.__all__)
    public = {
        name
        for name, value in vars(fence).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert public == set(fence.__all__)


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_each_name_has_a_contract_and_a_module_of_this_package(name: str):
    value = getattr(fence, name)
    assert (value.__doc__ or "").strip(), f"{name} has no docstring"
    assert value.__module__.split(".")[0] == "fence"


def test_no_public_name_comes_from_a_private_module():
    for name in fence.__all__:
        module = getattr(getattr(fence, name), "__module__", "fence")
        assert not any(part.startswith("_") for part in module.split(".")), (name, module)


def test_the_fence_has_the_methods_that_the_design_names():
    # Attributes set in __init__ are not on the class; they are read from an instance.
    instance = fence.TurnFence()
    missing = {name for name in FENCE_METHODS if not hasattr(instance, name)}
    assert not missing


def test_the_fence_takes_the_arguments_that_the_design_names():
    parameters = inspect.signature(fence.TurnFence).parameters
    named = {
        "accept_sampled",
        "brand",
        "cancel_on",
        "end_policy",
        "on_event",
        "policy",
        "require",
        "turn_id",
    }
    assert named <= set(parameters)
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in named)
    assert all(parameters[name].default is not inspect.Parameter.empty for name in named)


def test_a_receipt_has_the_fields_that_the_design_names_and_is_frozen():
    names = {field.name for field in dataclasses.fields(fence.QuiescenceReceipt)}
    assert names >= RECEIPT_FIELDS
    assert getattr(fence.QuiescenceReceipt, "__dataclass_params__").frozen  # noqa: B009
    assert {"to_json", "from_json"} <= set(dir(fence.QuiescenceReceipt))


def test_every_error_is_a_fence_error():
    errors = [
        value
        for name in fence.__all__
        if isinstance(value := getattr(fence, name), type) and issubclass(value, BaseException)
    ]
    assert fence.FenceError in errors
    assert all(issubclass(error, fence.FenceError) for error in errors)


@pytest.mark.parametrize("package", [fence, fence_providers])
def test_the_package_says_that_it_is_typed(package):
    assert importlib.resources.files(package).joinpath("py.typed").is_file()


def test_every_public_function_is_annotated():
    for name in sorted(PROMISED):
        value = getattr(fence, name)
        functions = [value] if inspect.isfunction(value) else vars(value).values()
        for function in functions:
            if inspect.isfunction(function) and not function.__name__.startswith("_"):
                hints = function.__annotations__
                assert "return" in hints, f"{name}: {function.__qualname__}"


def test_every_script_is_shipped():
    from fence.lineage.marks import script

    for name in ("preamble", "prepare", "sweep"):
        assert script(name).strip()


def test_the_version_is_the_distributions():
    assert importlib.metadata.version("turnfence") == _pyproject_version()


def _pyproject_version() -> str:
    import tomllib

    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    version = tomllib.loads(text)["project"]["version"]
    assert isinstance(version, str)
    return version


def test_the_changelog_knows_the_version():
    text = Path(__file__).parents[2].joinpath("CHANGELOG.md").read_text()
    assert f"## [{_pyproject_version()}]" in text


FOREIGN = ("agents", "docker", "modal", "rich", "typer", "openai", "trio", "fence_providers")


def _modules_after(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has after `statement`."""
    code = f"{statement}\nimport sys\nprint(sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50
    )
    return set(ast.literal_eval(done.stdout))


def test_importing_the_core_imports_no_sdk_and_no_command_line():
    loaded = _modules_after("import fence; fence.TurnFence; fence.quiesce_turn")
    assert not loaded & set(FOREIGN)


def test_that_check_does_see_an_sdk():
    assert "agents" in _modules_after("import agents")


def test_the_promise_is_in_the_readme():
    text = Path(__file__).parents[2].joinpath("README.md").read_text()
    missing = {name for name in PROMISED if name not in text}
    assert not missing


def test_signatures_can_be_resolved_by_tools():
    for name in ("cancel", "wait_for_quiescence", "run_sandbox_command"):
        assert "return" in typing.get_type_hints(getattr(fence.TurnFence, name))
