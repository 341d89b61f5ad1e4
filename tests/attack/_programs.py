"""Programs that a turn may start and that are hard to stop; each says that it lives by writing.

A heartbeat file grows as long as any process of the program runs. All times are seconds.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.battery._tools import PATIENCE, until
from tests.support import procs

# Forks, leaves its session and exits, for ever: whoever reads the process table is late.
CHAIN = """
import os, sys, time
_, beat, stop, delay, token = sys.argv
out = os.open(beat, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
while not os.path.exists(stop):
    os.write(out, b".")
    if float(delay):
        time.sleep(float(delay))
    if os.fork():
        os._exit(0)
    os.setsid()
"""

# The main thread ends alone; state Z, no environ, no cmdline, and one thread goes on writing.
HEADLESS = """
import ctypes, os, sys, threading, time
_, beat, stop, delay, token = sys.argv
out = os.open(beat, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def work():
    while not os.path.exists(stop):
        os.write(out, b".")
        time.sleep(float(delay))
    os._exit(0)
threading.Thread(target=work).start()
number = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
ctypes.CDLL(None).syscall(number, 0)
"""

# Its name in /proc/PID/stat looks like the end of the name, a zombie's state and a newline.
MISNAMED = """
import ctypes, os, sys, time
_, beat, stop, delay, token = sys.argv
ctypes.CDLL(None).prctl(15, b") Z 1\\n", 0, 0, 0)
out = os.open(beat, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.getsid(0) == os.getpid() or os.setsid()
while not os.path.exists(stop):
    os.write(out, b".")
    time.sleep(float(delay))
"""

# Many of them at once, each of which forks all the time.
CROWD = """
import os, sys, time
_, beat, stop, delay, token = sys.argv
out = os.open(beat, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for _ in range(64):
    if not os.fork():
        break
else:
    os._exit(0)
while not os.path.exists(stop):
    os.write(out, b".")
    if not os.fork():
        time.sleep(float(delay))
        os._exit(0)
    time.sleep(float(delay))
    os.waitpid(-1, os.WNOHANG)
"""


@dataclass(frozen=True)
class Program:
    """One instance of a program: how to start it, and how to tell whether it lives."""

    text: str
    directory: Path
    delay: float
    token: str

    @property
    def beat(self) -> Path:
        return self.directory / f"beat-{self.token}"

    @property
    def stop(self) -> Path:
        """The program ends by itself once this file exists."""
        return self.directory / f"stop-{self.token}"

    def argv(self) -> list[str]:
        words = [self.beat, self.stop, self.delay, self.token]
        return [sys.executable, "-c", self.text, *map(str, words)]

    def command(self, *, scrubbed: bool) -> str:
        """A shell command that leaves the program behind; scrubbed, with an empty environment."""
        words = ["env", "-i", *self.argv()] if scrubbed else self.argv()
        return f"{shlex.join(words)} </dev/null >/dev/null 2>&1 &"

    def beats(self) -> int:
        return self.beat.stat().st_size if self.beat.exists() else 0


def new_program(text: str, directory: Path, delay: float) -> Program:
    return Program(text, directory, delay, procs.new_token())


@contextmanager
def ended_at_last(program: Program) -> Iterator[Program]:
    """End the program at the end of the block, whatever happened in it."""
    try:
        yield program
    finally:
        program.stop.touch()
        procs.wait_until(lambda: procs.find(program.token) == [], PATIENCE, "the program to end")


async def assert_silent(programs: list[Program], beats: int = 20) -> None:
    """Check that none of the programs beats any more.

    A twin outside every turn, started now, beats meanwhile: when it has done so `beats` times, one
    of the others would have, too.
    """
    before = [program.beats() for program in programs]
    model = max(programs, key=lambda program: program.delay)
    with (
        ended_at_last(new_program(model.text, model.directory, model.delay)) as twin,
        subprocess.Popen(twin.argv(), start_new_session=True),
    ):
        await until(lambda: twin.beats() >= beats, "the twin to beat")
        after = [program.beats() for program in programs]
        twin.stop.touch()
    assert after == before
    left = [str(process) for program in programs for process in procs.find(program.token)]
    assert left == []
