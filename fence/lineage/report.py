"""Parses what prepare and sweep print, strictly: anything unexpected is InvalidReport."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from fence.control import ControlOutput
from fence.errors import InvalidReport
from fence.lineage.marks import PROTOCOL, Exit

Verdict = Literal["clear", "alive", "unknown"]
Containment = Literal["lineage", "lineage-unbranded", "own-uid", "group", "operation", "gone"]
Snapshot = Literal["consistent", "sampled"]
Look = Literal["gone", "alive", "unknown"]
Evidence = Literal["environ", "brand", "marker", "group", "session", "parent"]


@dataclass(frozen=True)
class ProcessReport:
    """One process of the turn as the sweep saw it. Times are ms since the sweep began."""

    pid: int
    start: int
    """Field 22 of /proc/PID/stat, clock ticks since boot: with the pid it names the process."""
    ppid: int
    pgid: int
    sid: int
    uid: int | None
    command: int | None
    """Number of the turn's command it descends from; None where only closure tells."""
    evidence: Evidence
    look: Look
    state: str
    name: str
    signals: tuple[tuple[str, int], ...] = ()
    gone_at: int | None = None
    problem: str | None = None
    """Why it could not be stopped or looked at, e.g. `EPERM`, `frozen`, `other-turn`."""


@dataclass(frozen=True)
class MarkerReport:
    """One marker file: a command's first process. `outcome` is what the preamble decided."""

    command: int
    uid: int
    pid: int
    start: int
    branded: bool
    outcome: Literal["run", "refused", "failed", "pending"]


@dataclass(frozen=True)
class SweepReport:
    """A whole, well-formed report of one sweep."""

    turn: str
    run: str
    verdict: Verdict
    containment: Containment
    snapshot: Snapshot
    scans: int
    unseen: int
    elapsed_ms: int
    processes: tuple[ProcessReport, ...] = ()
    markers: tuple[MarkerReport, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrepareReport:
    """What a sandbox offers, before its first command."""

    turn: str
    run: str
    directory: str
    uid: int
    namespace: str
    containment: Containment
    brand: bool
    notes: tuple[str, ...] = field(default=())


_MAX_BYTES = 4 << 20
_EXIT_OF_VERDICT = {"clear": Exit.CLEAR, "alive": Exit.ALIVE, "unknown": Exit.UNKNOWN}
