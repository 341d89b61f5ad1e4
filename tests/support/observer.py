"""Watches a worker from outside with strace: what was really executed, what was really signalled.

No counter of ours takes part. A control run is one successful execve of `sh -c SCRIPT NAME ...`
with NAME `fence-sweep` or `fence-prepare`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import procs

CONTROLS = ("fence-sweep", "fence-prepare")

_LINE = re.compile(r"^(\d+) +(.*)$")
_UNFINISHED = " <unfinished ...>"
_RESUMED = re.compile(r"^<\.\.\. \w+ resumed>(.*)$")
_EXECVE = re.compile(
    r'^execve\("(?P<path>(?:[^"\\]|\\.)*)", \[(?P<argv>.*)\], .*\) += (?P<rc>-?\d+)'
)
_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"(?:\.\.\.)?')
_KILL = re.compile(
    r"^(?P<call>kill|tkill|tgkill)\((?P<targets>-?\d+(?:, -?\d+)?), (?P<sig>\w+)\) += (?P<rc>-?\d+)"
)
_EXITED = re.compile(r"^\+\+\+ (?:exited with (\d+)|killed by (SIG\w+)).*\+\+\+$")
_DELIVERED = re.compile(
    r"^--- (?P<sig>SIG\w+) \{.*?si_code=(?P<code>\w+)(?:, si_pid=(?P<pid>\d+))?"
)


@dataclass(frozen=True)
class Signal:
    """One kill(2) that was really made. `target` is as the caller gave it: negative for a group."""

    sender: int
    target: int
    name: str
    ok: bool


@dataclass(frozen=True)
class Delivery:
    """One signal that really arrived. `sender` is None where the kernel sent it."""

    pid: int
    name: str
    sender: int | None


@dataclass(frozen=True)
class Observation:
    """What an outside observer saw of one worker and everything that it started."""

    exit_code: int | None
    stdout: str
    stderr: str
    executions: tuple[tuple[int, tuple[str, ...]], ...]
    signals: tuple[Signal, ...]
    deliveries: tuple[Delivery, ...]

    def control_runs(self, name: str) -> int:
        """Return how many control runs of this name were really executed."""
        assert name in CONTROLS, name
        return sum(argv[1:2] == ("-c",) and argv[3:4] == (name,) for _, argv in self.executions)

    def signals_to(self, pid: int) -> list[str]:
        """Return the names of the signals sent to `pid` itself (0, the look, left out)."""
        return [s.name for s in self.signals if s.target == pid and s.ok and s.name != "0"]

    def delivered_to(self, pid: int) -> list[str]:
        """Return the names of the signals that another process sent and that reached `pid`."""
        return [d.name for d in self.deliveries if d.pid == pid and d.sender is not None]


def parse(text: str) -> tuple[list[tuple[int, tuple[str, ...]]], list[Signal], list[Delivery]]:
    """Return executions, signals and deliveries of an strace log.

    Raises:
        ValueError: a line of a traced call cannot be read, so a count would be a guess.
    """
    executions: list[tuple[int, tuple[str, ...]]] = []
    signals: list[Signal] = []
    deliveries: list[Delivery] = []
    begun: dict[int, str] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            raise ValueError(f"not a line of strace: {line[:120]!r}")
        pid, rest = int(match[1]), match[2]
        if rest.endswith(_UNFINISHED):
            begun[pid] = rest.removesuffix(_UNFINISHED)
            continue
        if resumed := _RESUMED.match(rest):
            if pid not in begun:
                continue
            rest = begun.pop(pid) + resumed[1]
        if rest.startswith("execve("):
            found = _EXECVE.match(rest)
            if found is None:
                # The caller was ended inside the call: it executed nothing that could be counted.
                if rest.endswith("= ?"):
                    continue
                raise ValueError(f"unreadable execve: {rest[:200]!r}")
            if found["rc"] == "0":
                executions.append((pid, tuple(_WORD.findall(found["argv"]))))
        elif rest.startswith(("kill(", "tkill(", "tgkill(")):
            found = _KILL.match(rest)
            if found is None:
                if rest.endswith("= ?"):
                    continue
                raise ValueError(f"unreadable kill: {rest[:200]!r}")
            target = int(found["targets"].split(",")[-1])
            signals.append(Signal(pid, target, found["sig"], found["rc"] == "0"))
        elif found := _DELIVERED.match(rest):
            by_process = found["code"] in ("SI_USER", "SI_TKILL", "SI_QUEUE")
            sender = int(found["pid"]) if by_process and found["pid"] else None
            deliveries.append(Delivery(pid, found["sig"], sender))
    return executions, signals, deliveries


def observe(
    worker: str | Path,
    args: Sequence[str] = (),
    *,
    timeout: float = 50.0,
    env: Mapping[str, str] | None = None,
) -> Observation:
    """Run a Python worker script under strace until the worker itself has ended.

    Whatever the worker left running is let go (detached), not ended: that is for the test to find.

    Raises:
        TimeoutError: the worker runs longer than `timeout`; it is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "strace.log")
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        trace = [
            "-f",
            # Stops at the traced calls only: the rest runs at its own speed.
            "--seccomp-bpf",
            "-q",
            "-I",
            "2",
            "-s",
            "64",
            "-e",
            "trace=execve,kill,tgkill,tkill",
            "-o",
            str(log),
        ]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            tracer = subprocess.Popen(
                ["strace", *trace, sys.executable, str(worker), *args],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        pid = _wait(tracer, log, timeout)
        text = log.read_text(errors="replace")
        executions, signals, deliveries = parse(text)
        return Observation(
            exit_code=exit_code_of(pid, text),
            stdout=out.read_text(errors="replace"),
            stderr=err.read_text(errors="replace"),
            executions=tuple(executions),
            signals=tuple(signals),
            deliveries=tuple(deliveries),
        )


def exit_code_of(pid: int, text: str) -> int | None:
    """Return the exit code that strace saw, negative for a signal; None if it saw no end."""
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and int(match[1]) == pid and (ended := _EXITED.match(match[2])):
            return int(ended[1]) if ended[1] else -signal.Signals[ended[2]]
    return None


def _wait(tracer: subprocess.Popen[bytes], log: Path, timeout: float) -> int:
    """Wait for the traced worker, let strace go, and return the worker's pid."""
    deadline = time.monotonic() + timeout
    worker: int | None = None
    start: int | None = None
    try:
        # strace itself ends only when every process that it follows has ended.
        while tracer.poll() is None:
            if worker is None:
                worker = _first_pid(log)
            elif (process := procs.read(worker)) is None or process.state in "ZX":
                break
            elif start is None:
                start = process.start
            if time.monotonic() > deadline:
                if worker is not None and start is not None:
                    procs.kill(worker, start)
                raise TimeoutError(f"the observed worker ran longer than {timeout:g} s")
            time.sleep(0.01)
    finally:
        if tracer.poll() is None:
            tracer.terminate()
        try:
            tracer.wait(5)
        except subprocess.TimeoutExpired:
            tracer.kill()
            tracer.wait()
    worker = _first_pid(log) if worker is None else worker
    if worker is None:
        raise RuntimeError("strace has traced nothing; is ptrace allowed here?")
    return worker


def _first_pid(log: Path) -> int | None:
    """Return the pid of the first traced call: the worker's execve. Not the first child of strace,
    which forks some of its own to try what the kernel can do.
    """
    try:
        with log.open(errors="replace") as lines:
            match = _LINE.match(lines.readline().rstrip("\n"))
    except FileNotFoundError:
        return None
    return int(match[1]) if match else None
