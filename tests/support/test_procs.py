"""The tests' eyes are checked first: each checker has a test in which it must complain."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import procs


def test_finds_a_process_by_its_token_and_ends_it():
    token = procs.new_token()
    with subprocess.Popen(["sleep", token]) as child:
        (found,) = procs.find(token)
        assert found.pid == child.pid
        assert procs.alive(found.pid, found.start)
        procs.end([found])
        assert not procs.alive(found.pid, found.start)
    assert procs.find(token) == []


def test_a_zombie_is_not_found():
    token = procs.new_token()
    child = subprocess.Popen(["sh", "-c", "exit 0", token])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    process = procs.read(child.pid)
    assert process is not None
    assert process.state == "Z"
    assert procs.find(token) == []
    child.wait()
    assert procs.read(child.pid) is None


def test_a_zombie_leader_with_a_running_thread_is_alive():
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "print('ready', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    child = subprocess.Popen(["python3", "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        child.stdout.readline()
        stat = Path(f"/proc/{child.pid}/stat")
        procs.wait_until(lambda: b") Z " in stat.read_bytes(), 5, "the main thread to end")
        process = procs.read(child.pid)
        assert process is not None
        assert procs.alive(process.pid, process.start)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_name_made_to_mislead_is_read_right(tmp_path: Path):
    evil = tmp_path / ") Z 1 1 1"
    evil.symlink_to("/bin/sleep")
    with subprocess.Popen([str(evil), "600"]) as child:
        procs.wait_until(
            lambda: (p := procs.read(child.pid)) is not None and p.name.startswith(")"),
            5,
            "the exec",
        )
        process = procs.read(child.pid)
        assert process is not None
        assert (process.state in "RS", process.ppid) == (True, os.getpid())
        child.kill()


def test_never_signals_a_process_with_another_start_time():
    with subprocess.Popen(["sleep", "600"]) as child:
        process = procs.read(child.pid)
        assert process is not None
        assert not procs.kill(process.pid, process.start + 1)
        assert procs.kill(process.pid, process.start)


def test_reads_marks_of_another_process():
    script = "ulimit -St 1234567890; exec sleep 600"
    with subprocess.Popen(["sh", "-c", script], env={**os.environ, "MARK": "x"}) as child:
        procs.wait_until(lambda: procs.cpu_limit(child.pid) is not None, 5, "the limit")
        assert procs.cpu_limit(child.pid) == 1234567890
        assert procs.environ(child.pid)["MARK"] == "x"
        child.kill()


def test_wait_until_names_what_did_not_happen():
    with pytest.raises(TimeoutError, match="the sun to rise"):
        procs.wait_until(lambda: False, 0.01, "the sun to rise")


def test_a_canary_that_nobody_touched_is_quiet():
    with procs.canary(env={"MARK": "other"}, cpu=1_999_999_999) as bird:
        bird.assert_untouched()
        assert procs.cpu_limit(bird.pid) == 1_999_999_999


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGCONT, signal.SIGHUP])
def test_a_canary_tells_every_signal_and_its_sender(number: signal.Signals):
    said = f"{number.name} from pid {os.getpid()}"
    with pytest.raises(AssertionError, match=said), procs.canary() as bird:
        os.kill(bird.pid, number)
        procs.wait_until(lambda: bool(bird.signals()), 5, "the canary to tell")


@pytest.mark.parametrize(
    ("number", "word"), [(signal.SIGKILL, r"ended \(9\)"), (signal.SIGSTOP, "STOP")]
)
def test_a_canary_tells_what_no_process_can_catch(number: signal.Signals, word: str):
    with pytest.raises(AssertionError, match=word), procs.canary() as bird:
        os.kill(bird.pid, number)
        procs.wait_until(lambda: bool(bird.signals()), 5, "the kernel to tell")


def test_a_token_is_issued_to_the_running_test_only():
    procs.take_issued()
    token = procs.new_token()
    assert procs.take_issued() == [token]
    assert procs.take_issued() == []
