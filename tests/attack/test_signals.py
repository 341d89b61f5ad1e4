"""What a stop does to processes that behave: how often, in which order, and how soon it signals."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fence import QuiescenceReceipt, TurnFence
from tests.battery._tools import Tools, assert_proven, catches_term, run, unix_local, until
from tests.support import procs

MODES = [pytest.param(False, id="pipe"), pytest.param(True, id="pty")]

# Writes down each signal; a second Ctrl-C would abort it, TERM makes it leave.
DIARIST = """
import os, signal, sys, time
_, diary, token = sys.argv
out = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def note(number, frame):
    os.write(out, signal.Signals(number).name.encode() + b"\\n")
    if number == signal.SIGTERM:
        os._exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCONT, signal.SIGQUIT):
    signal.signal(number, note)
os.write(out, b"ready\\n")
while True:
    time.sleep(1)
"""

# Blocks INT and TERM in every thread; one of them waits for them with sigwait and leaves in order.
SIGWAITER = """
import os, signal, sys, threading
_, diary, token = sys.argv
signals = {signal.SIGINT, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
out = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def work():
    while True:
        number = signal.sigwait(signals)
        os.write(out, signal.Signals(number).name.encode() + b"\\n")
        if number == signal.SIGTERM:
            os._exit(0)
thread = threading.Thread(target=work)
thread.start()
os.write(out, b"ready\\n")
thread.join()
"""

# Takes 300 ms to leave after TERM, as a server that finishes its requests.
SLOW_LEAVER = """
import os, signal, sys, time
_, diary, token = sys.argv
out = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def leave(number, frame):
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        time.sleep(0.01)
    os.write(out, b"left in order\\n")
    os._exit(0)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, leave)
os.write(out, b"ready\\n")
while True:
    time.sleep(1)
"""

# Stopped when the turn is: has to run its TERM handler nevertheless, and nothing else before it.
SLEEPER_STOPPED = """
import os, signal, sys
_, diary, token = sys.argv
out = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def leave(number, frame):
    os.write(out, b"SIGTERM\\n")
    os._exit(0)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, leave)
os.write(out, b"ready\\n")
os.kill(os.getpid(), signal.SIGSTOP)
os.write(out, b"ran on\\n")
while True:
    signal.pause()
"""


async def diary_of(
    text: str, directory: Path, *, tty: bool = False, state: str | None = None
) -> tuple[list[str], QuiescenceReceipt, int]:
    """Stop one program in a turn of its own; return what it wrote, the receipt and its pid."""
    token = procs.new_token()
    diary = directory / token
    command = "exec " + shlex.join([sys.executable, "-c", text, str(diary), token])
    async with unix_local() as session, TurnFence() as fence:
        call = asyncio.ensure_future(
            Tools(session, fence).exec_command(command, tty=tty, yield_time_ms=30_000)
        )
        await until(lambda: diary.exists() and "ready" in diary.read_text(), "the program")
        if state is not None:
            await until(lambda: [p.state for p in procs.find(token)] == [state], f"state {state}")
        (process,) = procs.find(token)
        fence.cancel("stop")
        receipt = await fence.wait_for_quiescence()
        assert procs.find(token) == []
        assert_proven(receipt)
        await asyncio.gather(call, return_exceptions=True)
    return diary.read_text().split("\n")[1:-1], receipt, process.pid


def signals_in(receipt: QuiescenceReceipt, pid: int) -> list[str]:
    (process,) = [p for box in receipt.sandboxes for p in box.stopped if p.pid == pid]
    return [name for name, _ms in process.signals]


@pytest.mark.parametrize("tty", MODES)
def test_one_int_then_term(tty: bool, tmp_path: Path) -> None:
    diary, receipt, pid = run(lambda: diary_of(DIARIST, tmp_path, tty=tty))
    assert diary == ["SIGINT", "SIGTERM"]
    assert "KILL" not in signals_in(receipt, pid)


def test_a_thread_that_sigwaits_is_not_taken_for_deaf(tmp_path: Path) -> None:
    diary, receipt, pid = run(lambda: diary_of(SIGWAITER, tmp_path))
    assert diary == ["SIGINT", "SIGTERM"]
    assert "KILL" not in signals_in(receipt, pid)


def test_no_kill_for_who_needs_300_ms_of_the_grace(tmp_path: Path) -> None:
    diary, receipt, pid = run(lambda: diary_of(SLOW_LEAVER, tmp_path))
    assert diary == ["left in order"]
    assert "KILL" not in signals_in(receipt, pid)
    assert "TERM" in signals_in(receipt, pid)


def test_a_stopped_process_runs_its_term_handler_first(tmp_path: Path) -> None:
    diary, receipt, pid = run(lambda: diary_of(SLEEPER_STOPPED, tmp_path, state="T"))
    assert diary == ["SIGTERM"]
    assert "KILL" not in signals_in(receipt, pid)


def test_the_control_a_bare_cont_lets_it_run_on(tmp_path: Path) -> None:
    """CONT before TERM is the mistake that the test above would see."""
    token = procs.new_token()
    diary = tmp_path / token
    argv = [sys.executable, "-c", SLEEPER_STOPPED, str(diary), token]
    with subprocess.Popen(argv, start_new_session=True) as child:
        try:
            procs.wait_until(
                lambda: [p.state for p in procs.find(token)] == ["T"], 20, "it to stop itself"
            )
            os.kill(child.pid, signal.SIGCONT)
            procs.wait_until(lambda: "ran on" in diary.read_text(), 20, "it to run on")
        finally:
            child.kill()


@pytest.mark.parametrize("tty", MODES)
@pytest.mark.parametrize("trapped", ["INT", "TERM"])
def test_a_lock_file_that_a_trap_removes_is_removed(
    trapped: str, tty: bool, tmp_path: Path
) -> None:
    token = procs.new_token()
    lock = tmp_path / f"lock-{token}"
    deaf = "trap '' INT; " if trapped == "TERM" else ""
    command = (
        f"{deaf}trap 'rm -f {lock}; exit 1' {trapped}; echo $$ > {lock}; "
        f"while :; do sleep 0.05; done"
    )

    async def main() -> None:
        async with unix_local() as session, TurnFence() as fence:
            call = asyncio.ensure_future(
                Tools(session, fence).exec_command(command, tty=tty, yield_time_ms=30_000)
            )
            await until(lambda: lock.exists() and lock.read_text() != "", "the lock")
            assert_proven(await fence.wait_for_quiescence())
            assert not lock.exists()
            await asyncio.gather(call, return_exceptions=True)

    run(main)


def test_the_helper_of_a_term_handler_may_finish(tmp_path: Path) -> None:
    """A handler that runs another program: to stop that one within the grace breaks the handler."""
    token = procs.new_token()
    done = tmp_path / f"done-{token}"
    helper = f"sleep 0.2 && echo saved-{token} > {done}"
    command = f"trap '' INT; trap '{helper}; exit 0' TERM; while :; do sleep 0.05; done"

    async def main() -> None:
        async with unix_local() as session, TurnFence() as fence:
            call: Any = asyncio.ensure_future(
                Tools(session, fence).exec_command(command, yield_time_ms=30_000)
            )
            await until(lambda: any(map(catches_term, procs.find(token))), "the trap to be set")
            assert_proven(await fence.wait_for_quiescence())
            assert done.exists()
            await asyncio.gather(call, return_exceptions=True)

    run(main)


def test_nothing_of_others_is_frozen_or_signalled() -> None:
    """A deaf crowd next to bystanders: STOP and KILL go to the crowd alone."""
    token = procs.new_token()
    command = "trap '' INT TERM; " + f"sleep {token} & " * 10 + "wait; wait"

    async def main() -> QuiescenceReceipt:
        async with unix_local() as session, TurnFence() as fence:
            call = asyncio.ensure_future(Tools(session, fence).exec_command(command))
            await until(
                lambda: [p.name for p in procs.find(token)].count("sleep") == 10, "the crowd"
            )
            receipt = await fence.wait_for_quiescence()
            await asyncio.gather(call, return_exceptions=True)
            return receipt

    with procs.canary() as one, procs.canary(new_session=False) as two:
        receipt = run(main)
        assert procs.find(token) == []
        stopped = {p.pid for box in receipt.sandboxes for p in box.stopped}
        assert stopped.isdisjoint({one.pid, two.pid})
