"""The observer counts what strace really saw, and refuses to guess."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import observer, procs

WORKER = """
import os, signal, subprocess, sys
subprocess.run(["sh", "-c", ":", "fence-sweep", "1", "x" * 500])
subprocess.run(["sh", "-c", ":", "fence-sweep", "1"])
subprocess.run(["sh", "-c", ":", "fence-prepare", "1"])
subprocess.run(["sh", "-c", "true fence-sweep", "fence-sweeper", "fence-sweep"])
subprocess.run(["sh", "-c", "kill -TERM $$", "x"])
left = subprocess.Popen(["setsid", "sleep", sys.argv[1]], stdout=subprocess.DEVNULL)
os.kill(left.pid, 0)
os.kill(left.pid, signal.SIGCONT)
print(left.pid)
sys.exit(7)
"""


def test_counts_real_executions_and_signals_and_lets_survivors_go(tmp_path: Path):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    token = procs.new_token()
    seen = observer.observe(worker, [token])
    survivors = procs.find(token)
    procs.end(survivors)
    assert seen.exit_code == 7
    assert seen.control_runs("fence-sweep") == 2
    assert seen.control_runs("fence-prepare") == 1
    (survivor,) = survivors
    assert int(seen.stdout) == survivor.pid
    assert seen.signals_to(survivor.pid) == ["SIGCONT"]
    assert seen.delivered_to(survivor.pid) == ["SIGCONT"]
    assert sum(s.name == "SIGTERM" for s in seen.signals) == 1


def test_a_worker_that_never_ends_is_a_timeout_and_is_ended(tmp_path: Path):
    worker = tmp_path / "worker.py"
    worker.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(TimeoutError, match="longer than 1 s"):
        observer.observe(worker, timeout=1)
    assert procs.find(str(worker)) == []


def test_a_call_cut_in_two_is_put_together():
    log = (
        '10 execve("/bin/sh", ["sh", "-c", ":", "fence-sweep"], 0x1 /* 2 vars */ <unfinished ...>\n'
        "11 kill(-10, SIGTERM)              = 0\n"
        "10 <... execve resumed>)           = 0\n"
        "10 tgkill(10, 12, SIGKILL)         = -1 ESRCH (No such process)\n"
        "10 --- SIGTERM {si_signo=SIGTERM, si_code=SI_USER, si_pid=11, si_uid=0} ---\n"
        "10 +++ killed by SIGTERM +++\n"
    )
    executions, signals, deliveries = observer.parse(log)
    assert executions == [(10, ("sh", "-c", ":", "fence-sweep"))]
    assert signals == [
        observer.Signal(11, -10, "SIGTERM", ok=True),
        observer.Signal(10, 12, "SIGKILL", ok=False),
    ]
    assert deliveries == [observer.Delivery(10, "SIGTERM", 11)]
    assert observer.exit_code_of(10, log) == -15
    assert observer.exit_code_of(11, log) is None


def test_an_execution_that_failed_does_not_count():
    log = (
        '10 execve("/bin/no", ["sh", "-c", ":", "fence-sweep"], 0x1 /* 2 vars */) = -1 ENOENT (x)\n'
    )
    assert observer.parse(log) == ([], [], [])


@pytest.mark.parametrize("line", ['10 execve("/bin/sh", garbage', "10 kill(what", "no pid here"])
def test_an_unreadable_line_is_an_error_and_no_guess(line: str):
    with pytest.raises(ValueError, match=r"unreadable|not a line"):
        observer.parse(line)
