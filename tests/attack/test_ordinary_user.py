"""The fence as an ordinary uid: what it may not read or signal is named, and stops nothing else.

As root none of this shows. Both the control and the commands run as uid 65534 here.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fence import EscalationPolicy
from tests.attack._bare import NOBODY, Bare
from tests.support import procs

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")

QUICK = EscalationPolicy(sweep=2.0, deadline=3.0)
ANOTHER = "setpriv --reuid=65533 --regid=65533 --clear-groups"

# /proc/PID/environ answers EACCES to its own user, as for a setgid ssh-agent.
NON_DUMPABLE = "import ctypes, time, sys; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); time.sleep(600)"


def _python() -> str:
    """A Python that uid 65534 may run; the tests' own may lie in root's home."""
    for candidate in (sys.executable, "/usr/bin/python3"):
        # By a shell: setpriv itself still has root's way through closed directories.
        words = [*NOBODY, "sh", "-c", 'exec "$0" -c ""', candidate]
        probe = subprocess.run(words, capture_output=True, check=False)
        if probe.returncode == 0:
            return candidate
    pytest.skip("uid 65534 may run no Python here")


@pytest.fixture
def bare(turn_id: str) -> Iterator[Bare]:
    turn = Bare(turn=turn_id, control=NOBODY, command=NOBODY, policy=QUICK)
    try:
        yield turn
    finally:
        for child in turn.started:
            if child.poll() is None:
                child.kill()
            child.wait()
        for directory in Path("/tmp/.fence").glob(f"[0-9]*/{turn_id}"):
            shutil.rmtree(directory, ignore_errors=True)


def _sleeps(token: str) -> list[procs.Process]:
    return [process for process in procs.find(token) if process.name == "sleep"]


def test_nasty_commands_of_an_ordinary_user(bare: Bare) -> None:
    token = procs.new_token()
    bare.start(f"setsid sleep {token} & wait")
    bare.start(f"(env -i setsid sleep {token} &) ; exec sleep {token}")
    bare.start(f"trap '' INT TERM; while :; do sleep {token}; done")
    procs.wait_until(lambda: len(_sleeps(token)) == 4, 20, "four to sleep")
    with procs.canary() as root_owned:
        report = bare.sweep()
        assert report.verdict == "clear", report
        assert report.containment == "lineage"
        assert procs.find(token) == []
        assert root_owned.pid not in {process.pid for process in report.processes}


def test_non_dumpable_is_found_by_its_brand(bare: Bare) -> None:
    python, token = _python(), procs.new_token()
    bare.start(f"setsid {python} -c {shlex.quote(NON_DUMPABLE)} {token} & wait")

    def hidden() -> list[procs.Process]:
        found = [p for p in procs.find(token) if p.name.startswith("python")]
        return [p for p in found if not _readable(p.pid)]

    procs.wait_until(lambda: len(hidden()) == 1, 20, "its environment to become unreadable")
    (process,) = hidden()
    report = bare.sweep()
    assert report.verdict == "clear", report
    assert procs.find(token) == []
    assert "brand" in {p.evidence for p in report.processes if p.pid == process.pid}


def _readable(pid: int) -> bool:
    probe = subprocess.run(
        [*NOBODY, "cat", f"/proc/{pid}/environ"], capture_output=True, check=False
    )
    return probe.returncode == 0


def test_non_dumpable_without_a_brand_is_never_called_gone_in_silence(turn_id: str) -> None:
    """No brand and no environment: by its parent while that lives, else stated as a limit."""
    python, token = _python(), procs.new_token()
    bare = Bare(turn=turn_id, control=NOBODY, command=NOBODY, policy=QUICK, branded=False)
    hides = f"{python} -c {shlex.quote(NON_DUMPABLE)} {token}"
    child = bare.start(f"{hides} & wait")
    procs.wait_until(
        lambda: any(not _readable(p.pid) for p in procs.find(token) if p.name[:6] == "python"),
        20,
        "its environment to become unreadable",
    )
    try:
        report = bare.sweep()
        assert report.containment == "lineage-unbranded"
        if report.verdict == "clear":
            assert procs.find(token) == []
    finally:
        procs.end(procs.find(token))
        child.wait(20)
        shutil.rmtree(Path("/tmp/.fence/65534") / turn_id, ignore_errors=True)


def test_children_of_another_uid_are_named_and_the_others_die(turn_id: str) -> None:
    """A command that became another user, as through sudo: EPERM is no end of the pass."""
    mine, theirs = procs.new_token(), procs.new_token()
    # The command starts as root, to be able to become two users; the control is an ordinary one.
    bare = Bare(turn=turn_id, control=NOBODY, policy=QUICK)
    bare.prepare()
    first = bare.start(f"exec {shlex.join(NOBODY)} sleep {mine}", command=NOBODY[:0])
    second = bare.start(f"exec {ANOTHER} sleep {theirs}", command=NOBODY[:0])
    third = bare.start(f"exec {shlex.join(NOBODY)} sleep {mine}", command=NOBODY[:0])
    procs.wait_until(lambda: len(_sleeps(mine)) == 2 and len(_sleeps(theirs)) == 1, 20, "three")
    (other,) = _sleeps(theirs)
    try:
        report = bare.sweep()
        assert procs.find(mine) == [], report
        assert procs.alive(other.pid, other.start)
        assert report.verdict == "alive"
        (named,) = [p for p in report.processes if p.look != "gone"]
        assert (named.pid, named.problem) == (other.pid, "EPERM")
        # Nothing that the sweep froze stays frozen, and what goes away later is proved later.
        assert procs.read(other.pid).state == "S"  # type: ignore[union-attr]
        procs.end([other])
        assert bare.sweep().verdict == "clear"
    finally:
        procs.end([*procs.find(mine), *procs.find(theirs)])
        for child in (first, second, third):
            child.wait(20)
        for directory in Path("/tmp/.fence").glob(f"[0-9]*/{turn_id}"):
            shutil.rmtree(directory, ignore_errors=True)


HIDEPID = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t proc -o hidepid=2 proc /proc && exec "$@"',
    "sh",
)


def _hidepid_works() -> bool:
    probe = subprocess.run(
        [*HIDEPID, *NOBODY, "test", "!", "-e", "/proc/1"], capture_output=True, check=False
    )
    return probe.returncode == 0


def test_hidepid_is_said_and_the_own_ones_die(turn_id: str) -> None:
    if not _hidepid_works():
        pytest.skip("cannot mount /proc with hidepid=2 here")
    mine, theirs = procs.new_token(), procs.new_token()
    bare = Bare(turn=turn_id, control=[*HIDEPID, *NOBODY], command=NOBODY, policy=QUICK)
    assert bare.prepare().containment == "own-uid"
    first = bare.start(f"setsid sleep {mine} & wait")
    second = bare.start(f"exec {ANOTHER} sleep {theirs}", command=())
    procs.wait_until(lambda: len(_sleeps(mine)) == len(_sleeps(theirs)) == 1, 20, "both")
    try:
        report = bare.sweep()
        assert procs.find(mine) == [], report
        # What it cannot see it does not vouch for: the containment says how far the proof goes.
        assert report.containment == "own-uid"
        assert _sleeps(theirs) != []
    finally:
        procs.end([*procs.find(mine), *procs.find(theirs)])
        for child in (first, second):
            child.wait(20)
        for directory in Path("/tmp/.fence").glob(f"[0-9]*/{turn_id}"):
            shutil.rmtree(directory, ignore_errors=True)
