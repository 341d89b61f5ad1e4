"""Looks at processes and ends them, without any code of the fence: the tests' own eyes.

A process is named by pid and start time (field 22 of /proc/PID/stat, clock ticks since boot). A
zombie is not running. All times are seconds.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """One process as it looked when it was read."""

    pid: int
    start: int
    ppid: int
    pgid: int
    sid: int
    state: str
    name: str
    argv: tuple[str, ...]

    def __str__(self) -> str:
        shown = " ".join(self.argv)[:100] or f"[{self.name}]"
        return f"pid {self.pid} (parent {self.ppid}, state {self.state}): {shown}"


def read(pid: int) -> Process | None:
    """Return the process, None if there is none. A zombie whose threads still run counts as one."""
    base = Path("/proc") / str(pid)
    try:
        stat = (base / "stat").read_bytes()
        argv = (base / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in parentheses and may hold any byte, so the last one ends it.
    name, _, rest = stat.partition(b"(")[2].rpartition(b")")
    fields = rest.split()
    state = fields[0].decode()
    if state in "ZX" and _has_running_thread(base):
        state = "S"
    return Process(
        pid=pid,
        start=int(fields[19]),
        ppid=int(fields[1]),
        pgid=int(fields[2]),
        sid=int(fields[3]),
        state=state,
        name=name.decode("utf-8", "replace"),
        argv=tuple(part.decode("utf-8", "replace") for part in argv.split(b"\0")[:-1]),
    )


def _has_running_thread(base: Path) -> bool:
    try:
        threads = list((base / "task").iterdir())
    except OSError:
        return False
    for thread in threads:
        try:
            state = (thread / "stat").read_bytes().rpartition(b")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if state not in (b"Z", b"X"):
            return True
    return False


def snapshot() -> frozenset[tuple[int, int]]:
    """Return (pid, start) of every process there is now, zombies too."""
    return frozenset((p.pid, p.start) for p in everything())


def everything() -> Iterator[Process]:
    """Yield every process that can be read, zombies too."""
    for entry in os.listdir("/proc"):  # noqa: PTH208 - iterdir() is ten times slower here
        if entry.isdigit() and (process := read(int(entry))) is not None:
            yield process


def find(token: str) -> list[Process]:
    """Return what runs with `token` in its argv; zombies and the caller itself left out."""
    return [
        p
        for p in everything()
        if p.state not in "ZX" and p.pid != os.getpid() and any(token in word for word in p.argv)
    ]


def newest_pid() -> int:
    """Return the pid that was given out last in this pid namespace."""
    return int(Path("/proc/loadavg").read_text().split()[4])


def pids_since(pid: int) -> list[int]:
    """Return the pids given out after `pid`, oldest first; at most 500, also where pids wrapped."""
    newest = newest_pid()
    if newest < pid:
        return list(range(max(1, newest - 499), newest + 1))
    return list(range(max(pid + 1, newest - 499), newest + 1))


def working_directory(pid: int) -> str:
    """Return where the process works; empty if that cannot be read."""
    try:
        return os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115 - " (deleted)" is no path
    except OSError:
        return ""


def environ(pid: int) -> dict[str, str]:
    """Return the environment that the process was started with; empty if it cannot be read."""
    try:
        raw = (Path("/proc") / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (part.partition(b"=") for part in raw.split(b"\0") if part)
    return {k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, _, v in pairs}


def cpu_limit(pid: int) -> int | None:
    """Return the soft CPU-time limit in seconds, None if there is none or it cannot be read."""
    try:
        lines = (Path("/proc") / str(pid) / "limits").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("Max cpu time"):
            soft = line.split()[3]
            return int(soft) if soft.isdigit() else None
    return None


def alive(pid: int, start: int) -> bool:
    """Say whether this very process runs (a zombie does not)."""
    process = read(pid)
    return process is not None and process.start == start and process.state not in "ZX"


def kill(pid: int, start: int, number: int = signal.SIGKILL) -> bool:
    """Signal this very process; False if it is not there any more.

    The pidfd is opened before the start time is read, so that a reused pid is never hit.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not alive(pid, start):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def end(processes: Iterable[Process], timeout: float = 5.0) -> None:
    """KILL these processes and wait until none of them runs.

    Raises:
        TimeoutError: one still runs after `timeout`.
    """
    targets = list(processes)
    for process in targets:
        kill(process.pid, process.start)
    wait_until(lambda: not any(alive(p.pid, p.start) for p in targets), timeout, "KILL to work")


def wait_until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    """Block until `condition()` holds.

    Raises:
        TimeoutError: it does not after `timeout`; names `what` was waited for.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:g} s for {what}")
        time.sleep(0.005)


_issued: list[str] = []


def new_token() -> str:
    """Return a number that no other process here has in its argv; `sleep` takes it, too.

    The leak check of the running test looks for every number that was issued in it.
    """
    token = str(4_000_000_000 + secrets.randbelow(1_000_000_000))
    _issued.append(token)
    return token


def take_issued() -> list[str]:
    """Return the tokens issued since the last call, and forget them."""
    tokens = _issued[:]
    _issued.clear()
    return tokens


# Reports each signal as `signal name,sender` on its stdout. STOP and KILL cannot be caught: the
# kernel's word on them is taken from waitid().
_CANARY = """
import signal, sys
everything = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
signal.pthread_sigmask(signal.SIG_BLOCK, everything)
print("ready", flush=True)
while True:
    info = signal.sigwaitinfo(everything)
    print(signal.Signals(info.si_signo).name, info.si_pid, flush=True)
"""


class Canary:
    """A bystander: must be alive and unsignalled at the end. Made by `canary()`."""

    def __init__(self, child: subprocess.Popen[bytes], token: str) -> None:
        self._child = child
        self.pid = child.pid
        self.token = token
        process = read(child.pid)
        assert process is not None
        self.start = process.start
        self._seen: list[str] = []

    def signals(self) -> list[str]:
        """Return what has been received: `SIGTERM from pid 4711`, `STOP`, `KILL`."""
        assert self._child.stdout is not None
        handle = self._child.stdout.fileno()
        while select.select([handle], [], [], 0)[0]:
            chunk = os.read(handle, 65536)
            if not chunk:
                break
            for line in chunk.decode().splitlines():
                name, _, sender = line.partition(" ")
                self._seen.append(f"{name} from pid {sender}")
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        if status is not None and status.si_pid == self.pid:
            word = "STOP" if status.si_code == os.CLD_STOPPED else f"ended ({status.si_status})"
            if word not in self._seen:
                self._seen.append(word)
        return list(self._seen)

    def assert_untouched(self) -> None:
        """Raise AssertionError if the canary was signalled or does not run."""
        seen = self.signals()
        assert not seen, f"canary {self.pid} received: {', '.join(seen)}"
        assert alive(self.pid, self.start), f"canary {self.pid} is gone"


@contextmanager
def canary(
    *, env: Mapping[str, str] | None = None, new_session: bool = True, cpu: int | None = None
) -> Iterator[Canary]:
    """Run a bystander and check at the end that nobody touched it.

    Args:
        env: added to the environment, e.g. another turn's mark.
        new_session: False leaves it in the caller's group and session.
        cpu: its soft CPU-time limit, e.g. another turn's brand.
    """
    token = new_token()
    argv = [sys.executable, "-c", _CANARY, token]
    if cpu is not None:
        argv = ["sh", "-c", f'ulimit -St {cpu}; exec "$@"', "sh", *argv]
    with subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        start_new_session=new_session,
        env={**os.environ, **(env or {})},
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            bird = Canary(child, token)
            yield bird
            bird.assert_untouched()
        finally:
            child.kill()
