"""What the demo saw of one turn: filled in while it runs, drawn as text and as SVG.

All times are seconds since the turn began. What is running is seen in /proc by a thread of this
module, without any code of the fence; only the signals are the fence's own word.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field
from typing import Self

from tests.support import procs

LOOK_EVERY = 0.02


@dataclass
class Seen:
    """One process of a lane, from the first look that found it to the first that did not."""

    process: procs.Process
    since: float
    until: float | None = None


@dataclass
class Lane:
    """One command of the turn. `token` is in the argv of everything that it starts."""

    number: int
    title: str
    cmd: str
    token: str
    call_id: str
    waits: bool = False
    """Whether the agent waits for this command: its tool call is in flight at Stop."""
    seen: list[Seen] = field(default_factory=list)
    signals: list[tuple[float, str]] = field(default_factory=list)
    saved: bool | None = None
    """For the command that saves its work when it is told to end: whether it could."""

    @property
    def running(self) -> list[Seen]:
        """What of it runs now."""
        return [s for s in self.seen if s.until is None]

    @property
    def began(self) -> float | None:
        """When its first process was seen."""
        return min((s.since for s in self.seen), default=None)

    @property
    def gone(self) -> float | None:
        """When its last process was gone; None while one runs or before the first."""
        if not self.seen or self.running:
            return None
        return max(s.until for s in self.seen if s.until is not None)


@dataclass
class Recording:
    """One turn. `answered` is when whoever was asked to stop it said that it had."""

    title: str
    answerer: str
    lanes: list[Lane]
    zero: float = field(default_factory=time.monotonic)
    zero_of_day: float = field(default_factory=time.time)
    stop: float | None = None
    answered: float | None = None
    answer: str = ""
    sweeps: list[tuple[float, float]] = field(default_factory=list)
    proved: bool = False
    end: float | None = None

    def now(self) -> float:
        """Seconds since the turn began; stands still after `finish()`."""
        return time.monotonic() - self.zero if self.end is None else self.end

    def since_day(self, at: float) -> float:
        """Turn a time of day into seconds since the turn began."""
        return at - self.zero_of_day

    def finish(self) -> None:
        """Stop the clock."""
        self.end = self.now()

    @property
    def survivors(self) -> list[procs.Process]:
        """What was still running at the last look."""
        return [s.process for lane in self.lanes for s in lane.running]


def common_window(*records: Recording) -> tuple[float, float]:
    """Return the first and last moment of these turns, as seconds from their Stop."""
    begun = [(lane.began or 0.0) - (r.stop or 0.0) for r in records for lane in r.lanes]
    ended = [r.now() - (r.stop or 0.0) for r in records]
    span = max(ended) - min(begun)
    return min(begun) - 0.02 * span, max(ended) + 0.02 * span


STEPS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


def ticks(window: tuple[float, float], most: int) -> list[float]:
    """Return at most `most` round moments of a window."""
    first, last = window
    step = next((s for s in STEPS if (last - first) / s <= most), STEPS[-1])
    return [n * step for n in range(math.ceil(first / step), math.floor(last / step) + 1)]


class Eyes:
    """Looks at /proc in a thread of its own and keeps a recording's lanes up to date."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._closed = threading.Event()
        self._look_now = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="eyes", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def look(self) -> None:
        """Look once, now."""
        with self._look_now:
            found = [p for p in procs.everything() if p.state not in "ZX"]
            at = self._recording.now()
            for lane in self._recording.lanes:
                mine = {
                    (p.pid, p.start): p for p in found if any(lane.token in word for word in p.argv)
                }
                for seen in lane.running:
                    now = mine.pop((seen.process.pid, seen.process.start), None)
                    if now is None:
                        seen.until = at
                    else:
                        seen.process = now  # it may have called exec since
                lane.seen += [Seen(process, at) for process in mine.values()]

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_EVERY):
            self.look()
