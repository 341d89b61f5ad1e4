"""Attacks found by trying to break the proof: odd environments, floods, closed directories."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attack._bare import Bare
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


@pytest.mark.parametrize("count", [2000, pytest.param(6000, marks=pytest.mark.slow)])
def test_a_flood_of_markers_does_not_cost_the_stop_its_time(turn_id: str, count: int) -> None:
    """Quadratic notes took 5 s and 28 s, beyond the sweep's own clock, and nobody was signalled."""
    bare = Bare(turn=turn_id)
    child = bare.start("exec sleep 15")
    place = Path(bare.prepare().directory, "0", turn_id)
    for number in range(100, 100 + count):
        (place / str(number)).touch()
    try:
        found = bare.sweep()
        assert child.wait(5) == -2
        assert found.elapsed_ms < 5000
        assert [p.signals[-1][0] for p in found.processes] == ["INT"]
    finally:
        shutil.rmtree(place, ignore_errors=True)


@pytest.mark.parametrize(
    "variable",
    ["TIME_STYLE=long-iso", "TIME_STYLE=+%s", "QUOTING_STYLE=c", "LS_BLOCK_SIZE=K"],
)
def test_the_hosts_taste_in_listings_hides_no_marker(
    turn_id: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*variable.split("=", 1))
    bare = Bare(turn=turn_id)
    bare.start("exec sleep 15")
    found = bare.sweep()
    bare.reap()
    assert (found.verdict, found.notes) == ("clear", ())
    assert [m.outcome for m in found.markers] == ["run"]


# What else lies in /tmp stays where it was: this checkout or its Python may be there.
_OWN_TMP = """
mount --bind /tmp /mnt && mount -t tmpfs none /tmp || exit
for entry in /mnt/*; do
  if [ -d "$entry" ]; then
    mkdir "/tmp/${entry##*/}" && mount --bind "$entry" "/tmp/${entry##*/}"
  fi
done
exec "$@"
"""
OWN_TMP = ("unshare", "-m", "sh", "-c", _OWN_TMP, "sh")
CLOSED = """
import os, sys
from pathlib import Path
from tests.attack._bare import Bare, NOBODY

who = NOBODY if sys.argv[1] == "nobody" else ()
bare = Bare(control=who, command=who)
assert bare.start("true").wait(10) == 0
directory = bare.prepared.directory
assert directory == "/tmp/.fence", directory
if sys.argv[2] == "moved":
    os.rename(directory, "/tmp/moved")
    os.symlink("/tmp/moved", directory)
else:
    os.chmod(directory, int(sys.argv[2], 8))
verdict = bare.sweep().verdict
if sys.argv[2] != "moved":
    os.chmod(directory, 0o1777)
late = bare.start("touch /tmp/late").wait(10)
print(verdict, late, Path("/tmp/late").exists())
"""


@pytest.mark.parametrize("what", ["nobody 000", "nobody 555", "nobody 111", "root moved"])
def test_a_directory_that_a_command_closed_or_moved(what: str) -> None:
    """The late start found its markers' directory and no tombstone, after a verdict of clear."""
    done = subprocess.run(
        [*OWN_TMP, sys.executable, "-c", CLOSED, *what.split()],
        capture_output=True,
        check=False,
        timeout=30,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    verdict, late, ran = done.stdout.split()
    assert verdict != "clear" or (late, ran) == ("130", "False")
    assert verdict == ("unknown" if what == "root moved" else "clear")


@pytest.mark.parametrize("flag", ["-ls", "-lsE"])
@pytest.mark.parametrize("shell", ["dash", "bash"])  # busybox has a grep of its own
def test_a_grep_that_is_killed_half_way_has_not_looked(
    turn_id: str, shell: str, flag: str, tmp_path: Path
) -> None:
    """Only its parent tells whose the child is; the sweep said clear and it went on."""
    box = Box(turn_id, SHELLS[shell])
    grep = tmp_path / "grep"
    grep.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = {flag} ] || exec {shutil.which("grep")} "$@"\n'
        f'{shutil.which("grep")} "$@" | head -n -1\n'
        "kill -9 $$\n"
    )
    grep.chmod(0o755)
    box.env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    token = procs.new_token()
    text = f"(ulimit -St unlimited; exec env -i /bin/sleep {token}) & echo up; wait"
    with box.command(text) as child:
        _started(child)
        found = box.sweep()
        assert (found.verdict, procs.find(token)) == ("clear", [])
    assert "grep failed: each process was looked at by itself" in found.notes
