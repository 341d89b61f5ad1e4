"""Fixtures for every test: a default backend, and the check that a test leaves nothing behind."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

import fence
from tests.support import leaks

_numbers = itertools.count()
_current: list[leaks.LeakCheck] = []


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The SDK runs on asyncio; tests of the core ask for trio as well."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def _record_turns() -> Iterator[None]:
    """Tell the leak check which turns a test opened."""
    fence_class = getattr(fence, "TurnFence", None)
    if fence_class is None:
        yield
        return
    original = fence_class.__init__

    @functools.wraps(original)
    def recording(self, *args, **kwargs):
        original(self, *args, **kwargs)
        for check in _current:
            check.turns.add(self.turn)

    fence_class.__init__ = recording
    yield
    fence_class.__init__ = original


@pytest.fixture(autouse=True)
def no_leaks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[leaks.LeakCheck]:
    """Fail the test, naming it, for a process, descriptor, marker or temporary file left behind."""
    token = f"{os.getpid()}-{next(_numbers)}"
    base = tmp_path_factory.getbasetemp()
    temporary = base / f"tmp-{token}"
    undo = leaks.redirect_temporary_files(temporary)
    os.environ[leaks.TEST_VARIABLE] = token
    check = leaks.LeakCheck(token, temporary, base)
    _current.append(check)
    try:
        yield check
    finally:
        _current.remove(check)
        undo()
        del os.environ[leaks.TEST_VARIABLE]
        keeps_fds = request.node.get_closest_marker("leaks_fds") is not None
        problems = check.finish(check_descriptors=not keeps_fds)
    if problems:
        pytest.fail("the test left something behind:\n  " + "\n  ".join(problems), pytrace=False)


@pytest.fixture(autouse=True)
def _no_task_leaks(request: pytest.FixtureRequest, no_leaks: leaks.LeakCheck) -> None:
    """Set up the check for tasks in front of all other fixtures, for async tests only."""
    function = getattr(request.node, "obj", None)
    function = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    if inspect.iscoroutinefunction(function) and "anyio_backend" in request.fixturenames:
        request.getfixturevalue("_task_check")


@pytest.fixture
async def _task_check(anyio_backend_name: str) -> AsyncIterator[None]:
    """Fail the test for an asyncio task that it started and that does not end by itself."""
    if anyio_backend_name != "asyncio":
        yield
        return
    before = asyncio.all_tasks()
    yield
    # anyio's runner makes a task of its own for each call into it, this one too.
    left = {
        task
        for task in asyncio.all_tasks() - before
        if not getattr(task.get_coro(), "__qualname__", "").startswith("TestRunner.")
    }
    if left:
        _, left = await asyncio.wait(left, timeout=leaks.GRACE)
    if left:
        names = sorted(f"{t.get_name()}: {t.get_coro()!r}" for t in left)
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=leaks.GRACE)
        # Not pytest.fail(): its exception is no Exception, and would end the runner's task.
        raise AssertionError("the test left tasks running:\n  " + "\n  ".join(names))


@pytest.fixture
def turn_id(no_leaks: leaks.LeakCheck) -> str:
    """A turn id of the test's own that the leak check knows; it is its own key, too."""
    turn = secrets.token_hex(16)
    no_leaks.turns.add(turn)
    return turn
