"""Attacks found by trying to break the proof: odd environments, floods, closed directories."""

from __future__ import annotations

import secrets

import pytest

from tests.lineage import _shells
from tests.lineage._shells import SHELLS, Box
from tests.support import procs


@pytest.fixture(params=sorted(SHELLS))
def box(request: pytest.FixtureRequest, turn_id: str) -> Box:
    return Box(turn_id, _shells.SHELLS[request.param])


def _started(child) -> None:
    assert child.stdout.readline() == b"up\n"


def test_a_large_environment_in_front_of_the_mark_costs_no_grace(box: Box) -> None:
    """Cutting the mark out by patterns took quadratic time: no INT, no TERM, then no proof."""
    text = (
        'x=$(head -c 120000 /dev/zero | tr "\\0" x); echo up; '
        'exec env -i A="$x" FENCE_LINEAGE="$FENCE_LINEAGE" /bin/sleep 15'
    )
    with box.command(text, branded=False) as child:
        _started(child)
        while (seen := procs.read(child.pid)) is not None and seen.name != "sleep":
            pass
        found = box.sweep(branded=False)
    assert found.verdict == "clear"
    assert {name for p in found.processes for name, _at in p.signals} == {"INT"}


def test_a_mark_in_another_variable_is_not_ours(box: Box) -> None:
    box.prepare()
    other = {"FENCE_LINEAGE": f":{secrets.token_hex(16)}.1.", "SEEN": f":{box.turn}.1."}
    with procs.canary(env=other):
        assert box.sweep().processes == ()


@pytest.mark.parametrize("number", ["007", "9" * 30, "", "x"])
def test_a_number_that_a_command_made_up_does_not_spoil_the_report(box: Box, number: str) -> None:
    text = f"FENCE_LINEAGE=:{box.turn}.{number}.; export FENCE_LINEAGE; echo up; exec sleep 15"
    with box.command(text, branded=False) as child:
        _started(child)
        while (seen := procs.read(child.pid)) is not None and seen.name != "sleep":
            pass
        (process,) = box.sweep(look=True, branded=False).processes
        assert process.command is None
        assert box.sweep(branded=False).verdict == "clear"
