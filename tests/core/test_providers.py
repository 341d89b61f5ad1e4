"""Providers come from entry points; a broken one is named and left out."""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint

import pytest

from fence import providers as subject
from tests.core.fakes import FakeSandbox


class Known:
    pass


class Unknown:
    pass


def known(session: object) -> FakeSandbox | None:
    return FakeSandbox("known") if isinstance(session, Known) else None


def generic(session: object) -> FakeSandbox | None:
    return FakeSandbox("generic")


def raising(session: object) -> FakeSandbox | None:
    raise OSError("its daemon is down")


def nonsense(session: object) -> object:
    return "a control"


not_callable = 3


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    def install(**entries: str) -> None:
        found = [EntryPoint(n, v, subject.GROUP) for n, v in entries.items()]
        monkeypatch.setattr(subject, "entry_points", lambda group: found)
        subject.providers.cache_clear()

    subject._noted.clear()
    yield install
    monkeypatch.undo()
    subject.providers.cache_clear()
    subject._noted.clear()


def test_the_first_that_knows_the_session_answers_and_the_generic_is_last(install) -> None:
    install(sdk_exec=f"{__name__}:generic", zebra=f"{__name__}:known")
    assert [name for name, _ in subject.providers()] == ["zebra", "sdk_exec"]
    control = subject.control_for_session(Known())
    assert control is not None
    assert control.sandbox_id == "known"


def test_the_generic_channel_is_noted_once_for_each_kind_of_session(install, caplog) -> None:
    install(sdk_exec=f"{__name__}:generic", known=f"{__name__}:known")
    with caplog.at_level(logging.DEBUG, "fence"):
        for _ in range(2):
            control = subject.control_for_session(Unknown())
            assert control is not None
            assert control.sandbox_id == "generic"
    assert len(caplog.records) == 1
    assert "no provider knows" in caplog.text
    assert "Unknown" in caplog.text


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("fence.providers:no_such_name", "cannot be loaded"),
        ("fence.no_such_module:x", "cannot be loaded"),
        (f"{__name__}:not_callable", "is not callable"),
        (f"{__name__}:raising", "failed on a"),
        (f"{__name__}:nonsense", "which is no SandboxControl"),
    ],
)
def test_a_broken_plugin_is_named_and_passed_over(install, caplog, broken: str, says: str) -> None:
    install(broken=broken, known=f"{__name__}:known")
    with caplog.at_level(logging.DEBUG, "fence"):
        control = subject.control_for_session(Known())
    assert control is not None
    assert control.sandbox_id == "known"
    assert says in caplog.text
    assert "broken" in caplog.text


def test_no_provider_is_no_answer(install) -> None:
    install()
    assert subject.control_for_session(Known()) is None


def test_plugins_are_loaded_once(install) -> None:
    install(known=f"{__name__}:known")
    assert subject.providers() is subject.providers()


def test_the_installed_ones_are_found() -> None:
    names = [name for name, _ in subject.providers()]
    assert names[-1] == "sdk_exec"
    assert "unix_local" in names
