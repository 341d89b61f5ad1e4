"""The leak check must complain about each kind of leak, name it, and remove it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import leaks, procs

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> leaks.LeakCheck:
    monkeypatch.setattr(leaks, "GRACE", 0.1)
    monkeypatch.setenv(leaks.TEST_VARIABLE, "inner")
    return leaks.LeakCheck("inner", tmp_path / "none")


def _orphan(*prefix: str, **env: str) -> str:
    """Start a process that is no child of ours, and return its token."""
    token = procs.new_token()
    words = " ".join(prefix)
    subprocess.run(
        ["sh", "-c", f"{words} setsid sleep {token} >/dev/null 2>&1 </dev/null &"],
        check=True,
        env={**os.environ, **env},
    )
    procs.wait_until(lambda: bool(procs.find(token)), 5, "the orphan")
    return token


def test_nothing_left_is_no_leak(check: leaks.LeakCheck):
    subprocess.run(["true"], check=True)
    assert check.finish() == []


def test_a_child_is_a_leak(check: leaks.LeakCheck):
    with subprocess.Popen(["sleep", "600"]) as child:
        (problem,) = check.finish()
        assert f"pid {child.pid}" in problem
        assert "sleep 600" in problem
    assert child.returncode == -9


def test_an_orphan_is_known_by_the_tests_environment(check: leaks.LeakCheck):
    token = _orphan()
    procs.take_issued()
    (problem,) = check.finish()
    assert token in problem
    assert procs.find(token) == []


def test_an_orphan_without_environment_is_known_by_its_token(check: leaks.LeakCheck):
    token = _orphan("env -i")
    (problem,) = check.finish()
    assert token in problem
    assert procs.find(token) == []


def test_an_orphan_is_known_by_its_turn(check: leaks.LeakCheck):
    turn = "ab" * 16
    check.turns.add(turn)
    token = _orphan(FENCE_LINEAGE=f":{turn}.1", FENCE_TEST="another")
    procs.take_issued()
    (problem,) = check.finish()
    assert token in problem


def test_an_orphan_without_environment_is_known_by_its_brand(check: leaks.LeakCheck):
    turn = "ab" * 16
    check.turns.add(turn)
    token = _orphan(f"ulimit -St {(1_000_000 + 0xABABAB) * 1000 + 7};", "env -i")
    procs.take_issued()
    (problem,) = check.finish()
    assert token in problem


def test_a_process_in_the_runs_directory_is_a_leak(tmp_path: Path):
    base = tmp_path / "base"
    base.mkdir()
    check = leaks.LeakCheck("inner", tmp_path / "none", base)
    token = _orphan(f"cd {base}; env -i", FENCE_TEST="another")
    procs.take_issued()
    (problem,) = check.finish()
    assert token in problem
    assert procs.find(token) == []


# Forks, lets the parent exit, and begins again, 2,000 hops long: nobody sees the same pid twice.
CHAIN = """
import os, sys, time
print("ready", flush=True)
for _ in range(2000):
    if os.fork():
        os._exit(0)
    os.setsid()
    time.sleep(0.001)
"""


def test_a_chain_that_forks_and_exits_is_found_and_ended(check: leaks.LeakCheck):
    token = procs.new_token()
    first = subprocess.Popen([sys.executable, "-c", CHAIN, token], stdout=subprocess.PIPE)
    assert first.stdout is not None
    with first.stdout:
        assert first.stdout.readline() == b"ready\n"
    first.wait()
    problems = check.finish(check_descriptors=False)
    assert problems
    assert not any("could not" in problem for problem in problems)
    assert check.finish(check_descriptors=False) == []


def test_a_process_of_somebody_else_is_no_leak(check: leaks.LeakCheck):
    token = _orphan(FENCE_TEST="another", FENCE_LINEAGE=":" + "cd" * 16 + ".1")
    procs.take_issued()
    assert check.finish() == []
    procs.end(procs.find(token))


def test_an_open_descriptor_is_a_leak(check: leaks.LeakCheck):
    read, write = os.pipe()
    problems = check.finish()
    os.close(read)
    os.close(write)
    assert len(problems) == 2
    assert all("pipe:" in problem for problem in problems)


def test_markers_are_a_leak_and_tombstones_are_not(
    check: leaks.LeakCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(leaks, "FENCE_DIRECTORIES", (tmp_path,))
    turn = "ef" * 16
    check.turns.add(turn)
    marker = tmp_path / "0" / turn / "1"
    marker.parent.mkdir(parents=True)
    marker.touch()
    tombstone = tmp_path / f"{turn}.cancelled"
    tombstone.touch()
    (problem,) = check.finish()
    assert str(marker.parent) in problem
    assert not marker.exists()
    assert not tombstone.exists()


def test_a_temporary_file_is_a_leak(tmp_path: Path):
    folder = tmp_path / "t"
    undo = leaks.redirect_temporary_files(folder)
    undo()
    (folder / "left.txt").touch()
    (problem,) = leaks.LeakCheck("x", folder).finish()
    assert problem.endswith("left.txt")
    assert not folder.exists()


def test_the_fixtures_fail_a_test_that_leaks(pytester: pytest.Pytester):
    """The real conftest, on three tests that leak and one that does not."""
    pytester.makepyfile(
        """
        import asyncio, os, subprocess

        def test_clean():
            subprocess.run(["true"], check=True)

        def test_process():
            subprocess.Popen(["sleep", "601"])

        def test_descriptor():
            os.dup(0)

        async def test_task():
            test_task.kept = asyncio.create_task(asyncio.sleep(600), name="forgotten")
        """
    )
    pytester.makeini("[pytest]\nanyio_mode = auto\nmarkers = leaks_fds(why): x\n")
    pytester.makeconftest(
        "from tests.conftest import *\nfrom tests.conftest import no_leaks, "
        "_no_task_leaks, _task_check, _record_turns\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(pytester.path)],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert "4 passed, 3 errors" in done.stdout, done.stdout + done.stderr
    for word in ("process left: pid", "sleep 601", "descriptor left open", "forgotten"):
        assert word in done.stdout, word
