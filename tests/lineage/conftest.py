"""Fixtures of the shell tests: each shell, each kind of user."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.lineage import _shells
from tests.support import leaks


@pytest.fixture(params=sorted(_shells.SHELLS))
def shell(request: pytest.FixtureRequest) -> list[str]:
    """dash, bash, busybox ash."""
    return _shells.SHELLS[request.param]


@pytest.fixture(params=["root", "nobody"])
def uid(request: pytest.FixtureRequest) -> int:
    """Root, and an ordinary user."""
    return 0 if request.param == "root" else _shells.NOBODY


@pytest.fixture
def _markers_go(turn_id: str) -> Iterator[None]:
    """Remove the turn's markers at the end: only a sweep that proved something does it itself."""
    yield
    for directory in leaks.FENCE_DIRECTORIES:
        for place in directory.glob(f"*/{turn_id}"):
            shutil.rmtree(place)


@pytest.fixture
def box(shell: list[str], turn_id: str, _markers_go: None) -> _shells.Box:
    """A turn of this test, as root, in one shell."""
    return _shells.Box(turn_id, shell)


@pytest.fixture
def box_of_user(shell: list[str], uid: int, turn_id: str, _markers_go: None) -> _shells.Box:
    """A turn of this test, as either user."""
    return _shells.Box(turn_id, shell, uid)


@pytest.fixture
def one(turn_id: str, _markers_go: None) -> _shells.Box:
    """A turn of this test in the system's own sh."""
    return _shells.Box(turn_id)
