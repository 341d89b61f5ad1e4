"""What a test may leave behind: nothing. Finds it, names it, and removes it.

A process is the test's if it began during the test and is a child, carries the test's or one of its
turns' marks, has a token of the test in its argv, or works in the run's temporary directory.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from tests.support import procs

TEST_VARIABLE = "FENCE_TEST"
MARK_VARIABLE = "FENCE_LINEAGE"
FENCE_DIRECTORIES = (Path("/tmp/.fence"), Path("/var/tmp/.fence"), Path("/dev/shm/.fence"))

# A process that was told to end, and a transport that was told to close, may take this long.
GRACE = 2.0
END_PATIENCE = 10.0
CHASE, CHASE_QUIET = 0.1, 0.002

T = TypeVar("T")


class LeakCheck:
    """Takes stock when it is made; `finish()` says what is there that was not there then."""

    def __init__(self, token: str, temporary: Path, base: Path | None = None) -> None:
        self.token = token
        self.temporary = temporary
        self._base = f"{base}/" if base is not None else None
        self.turns: set[str] = set()
        self._processes = procs.snapshot()
        self._descriptors = descriptors()

    def finish(self, *, check_descriptors: bool = True) -> list[str]:
        """Return one line for each leak, after having removed it."""
        tokens = procs.take_issued()
        problems: list[str] = []
        left = _settle(lambda: self._left_processes(tokens))
        problems += [f"process left: {process}" for process in left]
        if left:
            problems += self._end(tokens)
        if check_descriptors:
            opened = _settle(self._left_descriptors)
            problems += [f"descriptor left open: {number} -> {to}" for number, to in opened]
        problems += self._remove_files()
        return problems

    def _left_processes(self, tokens: list[str]) -> list[procs.Process]:
        # Only what is new since the test began is looked at closely: that keeps the check cheap.
        newest = procs.newest_pid()
        found = {p.pid: p for p in procs.everything() if self._is_left(p, tokens)}
        for process in _newcomers(newest):
            if process.pid not in found and self._is_left(process, tokens):
                found[process.pid] = process
                break
        return list(found.values())

    def _end(self, tokens: list[str]) -> list[str]:
        """KILL what is left until two looks in a row find nothing; name what cannot be ended."""
        deadline = time.monotonic() + END_PATIENCE
        empty = 0
        while empty < 2:
            left = self._left_processes(tokens)
            # Right when they are found: a chain of forks is somewhere else a millisecond later.
            for process in left:
                procs.kill(process.pid, process.start)
            empty = 0 if left else empty + 1
            if time.monotonic() > deadline:
                return [f"could not be ended: {process}" for process in left]
        return []

    def _is_left(self, process: procs.Process, tokens: list[str]) -> bool:
        if (process.pid, process.start) in self._processes or process.state in "ZX":
            return False
        return self._is_mine(process, tokens)

    def _is_mine(self, process: procs.Process, tokens: list[str]) -> bool:
        if process.ppid == os.getpid():
            return True
        if any(token in word for token in tokens for word in process.argv):
            return True
        if self._base is not None and (
            any(self._base in word for word in process.argv)
            or f"{procs.working_directory(process.pid)}/".startswith(self._base)
        ):
            return True
        environ = procs.environ(process.pid)
        if environ.get(TEST_VARIABLE) == self.token:
            return True
        if any(f":{turn}." in environ.get(MARK_VARIABLE, "") for turn in self.turns):
            return True
        limit = procs.cpu_limit(process.pid) if self.turns else None
        return limit is not None and limit // 1000 in {
            1_000_000 + int(turn[:6], 16) for turn in self.turns
        }

    def _left_descriptors(self) -> list[tuple[int, str]]:
        new = descriptors() - self._descriptors
        if new:
            # An object in a reference cycle closes its descriptor only when it is collected.
            gc.collect()
            new = descriptors() - self._descriptors
        return sorted(new)

    def _remove_files(self) -> list[str]:
        problems = []
        for directory in FENCE_DIRECTORIES:
            for turn in self.turns:
                for marker in directory.glob(f"[0-9]*/{turn}"):
                    names = ", ".join(sorted(p.name for p in marker.iterdir()))
                    problems.append(f"markers left: {marker} ({names or 'empty'})")
                    shutil.rmtree(marker, ignore_errors=True)
                # Tombstones outlive their turn by design: removed, and no leak.
                for tombstone in directory.glob(f"{turn}*"):
                    if tombstone.is_dir():
                        shutil.rmtree(tombstone, ignore_errors=True)
                    else:
                        tombstone.unlink(missing_ok=True)
        if self.temporary.exists():
            problems += [f"temporary file left: {path}" for path in self.temporary.iterdir()]
            shutil.rmtree(self.temporary, ignore_errors=True)
        return problems


def _newcomers(since: int) -> Iterator[procs.Process]:
    """Yield each process that gets a pid after `since`, until none came for a moment.

    What forks and exits faster than /proc can be listed is seen here, when it is new.
    """
    end = time.monotonic() + CHASE
    quiet = time.monotonic() + CHASE_QUIET
    while time.monotonic() < min(end, quiet):
        for pid in procs.pids_since(since):
            since = pid
            quiet = time.monotonic() + CHASE_QUIET
            if (process := procs.read(pid)) is not None:
                yield process


def descriptors() -> set[tuple[int, str]]:
    """Return (number, what it leads to) of every descriptor above 2, which pytest redirects."""
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the folder changes while it is read
        if int(name) <= 2:
            continue
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))  # noqa: PTH115
        except OSError:
            continue
    return found


def redirect_temporary_files(to: Path) -> Callable[[], None]:
    """Let `tempfile` work in a new directory; the answer undoes it."""
    to.mkdir()
    before, tempfile.tempdir = tempfile.tempdir, str(to)

    def undo() -> None:
        tempfile.tempdir = before

    return undo


def _settle(look: Callable[[], list[T]]) -> list[T]:
    """Return what `look` still finds when nothing more goes away, at the latest after GRACE."""
    deadline = time.monotonic() + GRACE
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
