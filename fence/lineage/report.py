"""Parses what prepare and sweep print, strictly: anything unexpected is InvalidReport."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from fence.control import ControlOutput
from fence.errors import InvalidReport, TurnReused
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
    pid: int | None
    start: int | None
    branded: bool
    outcome: Literal["run", "refused", "pending", "invalid"]


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
    notes: tuple[str, ...] = ()


_MAX_BYTES = 4 << 20
_EXIT_OF_VERDICT: dict[str, Exit] = {
    "clear": Exit.CLEAR,
    "alive": Exit.ALIVE,
    "unknown": Exit.UNKNOWN,
}

# [0-9], not \d: int() would accept other digits, and a shell never prints them.
_NUMBER = "(?:0|[1-9][0-9]{0,17})"
_CONTAINMENTS = "lineage|lineage-unbranded|own-uid|group"
_PROCESS = re.compile(
    rf"p ({_NUMBER}) ({_NUMBER}) ({_NUMBER}) ({_NUMBER}) ({_NUMBER}) (-|{_NUMBER}) (-|{_NUMBER})"
    r" (environ|brand|marker|group|session|parent) (gone|alive|unknown) ([A-Za-z?])"
    rf" (-|(?:[A-Z]+@{_NUMBER},)*[A-Z]+@{_NUMBER}) (-|{_NUMBER}) (-|[A-Za-z-]+) (.*)"
)
_MARKER = re.compile(
    rf"m ({_NUMBER}) ({_NUMBER}) (-|{_NUMBER}) (-|{_NUMBER}) ([01]) (run|refused|pending|invalid)"
)
_SWEEP_END = re.compile(
    rf"end (clear|alive|unknown) ({_CONTAINMENTS}) (consistent|sampled)"
    rf" ({_NUMBER}) ({_NUMBER}) ({_NUMBER})"
)
_PREPARE_END = re.compile(
    rf"end (/[!-~]*) ({_NUMBER}) ([!-~]+) ({_CONTAINMENTS}) ([01])",
)


def parse_sweep(output: ControlOutput, turn: str, run: str) -> SweepReport:
    """Return the report of the sweep that was started with these `turn` and `run`.

    Raises:
        InvalidReport: not one whole report of this run, or its exit code says something else.
    """
    lines = _body(output, "fence-sweep", turn, run)
    end = _SWEEP_END.fullmatch(lines[-1])
    if end is None:
        raise InvalidReport("the sweep's last line is not a verdict")
    processes: list[ProcessReport] = []
    markers: list[MarkerReport] = []
    notes: list[str] = []
    for line in lines[:-1]:
        if (found := _PROCESS.fullmatch(line)) is not None:
            processes.append(_process(found))
        elif (found := _MARKER.fullmatch(line)) is not None:
            markers.append(_marker(found))
        elif line.startswith("n "):
            notes.append(line[2:])
        else:
            raise InvalidReport(f"a line of the sweep is not understood: {line[:60]!r}")
    verdict = end[1]
    if output.exit_code is not None and output.exit_code != _EXIT_OF_VERDICT[verdict]:
        raise InvalidReport(f"the sweep says {verdict} but exits with {output.exit_code}")
    if verdict == "clear" and any(p.look != "gone" for p in processes):
        raise InvalidReport("the sweep says clear and lists a process that is not gone")
    return SweepReport(
        turn=turn,
        run=run,
        verdict=verdict,  # type: ignore[arg-type]  # the pattern admits these words only
        containment=end[2],  # type: ignore[arg-type]
        snapshot=end[3],  # type: ignore[arg-type]
        scans=int(end[4]),
        unseen=int(end[5]),
        elapsed_ms=int(end[6]),
        processes=tuple(processes),
        markers=tuple(markers),
        notes=tuple(notes),
    )


def parse_prepare(output: ControlOutput, turn: str, run: str) -> PrepareReport:
    """Return what the prepare run of this `turn` and `run` found.

    Raises:
        InvalidReport: not one whole report of this run; the reason that the script gave, if any.
        TurnReused: the turn's tombstone is there already.
    """
    lines = _body(output, "fence-prepare", turn, run)
    notes = tuple(line[2:] for line in lines[:-1] if line.startswith("n "))
    if len(notes) != len(lines) - 1:
        raise InvalidReport("a line of the prepare run is not understood")
    if lines[-1] == "stopped before":
        raise TurnReused(turn)
    if lines[-1].startswith("refused "):
        raise InvalidReport(f"the sandbox cannot be prepared: {lines[-1][8:]}")
    end = _PREPARE_END.fullmatch(lines[-1])
    if end is None:
        raise InvalidReport("the prepare run's last line is not understood")
    if output.exit_code not in (None, 0):
        raise InvalidReport(f"the prepare run exits with {output.exit_code}")
    return PrepareReport(
        turn=turn,
        run=run,
        directory=end[1],
        uid=int(end[2]),
        namespace=end[3],
        containment=end[4],  # type: ignore[arg-type]  # the pattern admits these words only
        brand=end[5] == "1",
        notes=notes,
    )


def _body(output: ControlOutput, name: str, turn: str, run: str) -> list[str]:
    """Return the lines after the header; checks that this is one whole report of this run."""
    if len(output.stdout) > _MAX_BYTES:
        raise InvalidReport(f"{len(output.stdout)} bytes, more than {_MAX_BYTES}")
    try:
        text = output.stdout.decode("ascii")
    except UnicodeDecodeError:
        raise InvalidReport("a byte that is not ASCII") from None
    # A control channel with a terminal turns \n into \r\n.
    text = text.replace("\r\n", "\n")
    if not text.endswith("\n"):
        raise InvalidReport(_cut(output, "no line" if not text else "cut in the middle of a line"))
    lines = text[:-1].split("\n")
    header = f"{name} {PROTOCOL} {turn} {run}"
    if lines[0] != header:
        raise InvalidReport(f"not the report of this run (it begins {lines[0][:60]!r})")
    if len(lines) < 2 or any(line == header for line in lines[1:]):
        raise InvalidReport(_cut(output, "not exactly one report"))
    return lines[1:]


def _cut(output: ControlOutput, why: str) -> str:
    tail = output.stderr[-200:].decode("ascii", "backslashreplace").strip()
    return f"{why}, exit code {output.exit_code}" + (f", stderr: {tail}" if tail else "")


def _process(found: re.Match[str]) -> ProcessReport:
    signals = () if found[11] == "-" else tuple(_signal(part) for part in found[11].split(","))
    return ProcessReport(
        pid=int(found[1]),
        start=int(found[2]),
        ppid=int(found[3]),
        pgid=int(found[4]),
        sid=int(found[5]),
        uid=_optional(found[6]),
        command=_optional(found[7]),
        evidence=found[8],  # type: ignore[arg-type]  # the pattern admits these words only
        look=found[9],  # type: ignore[arg-type]
        state=found[10],
        signals=signals,
        gone_at=_optional(found[12]),
        problem=None if found[13] == "-" else found[13],
        name=found[14],
    )


def _marker(found: re.Match[str]) -> MarkerReport:
    return MarkerReport(
        command=int(found[1]),
        uid=int(found[2]),
        pid=_optional(found[3]),
        start=_optional(found[4]),
        branded=found[5] == "1",
        outcome=found[6],  # type: ignore[arg-type]  # the pattern admits these words only
    )


def _signal(part: str) -> tuple[str, int]:
    name, _, at = part.partition("@")
    return name, int(at)


def _optional(text: str) -> int | None:
    return None if text == "-" else int(text)
