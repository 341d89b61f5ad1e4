"""The proof: an immutable record of how a turn was stopped and what that proves.

Times of day are seconds since the epoch, durations are whole milliseconds. No command text, no
output.
"""

from __future__ import annotations

import json
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as wire

from fence.errors import InvalidReport
from fence.lineage.report import Containment, Snapshot

RECEIPT_VERSION = 1

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

# From weakest to strongest; `gone` and `operation` prove by other means than a scan.
CONTAINMENT_ORDER: tuple[Containment, ...] = (
    "group",
    "own-uid",
    "lineage-unbranded",
    "operation",
    "lineage",
    "gone",
)


@wire(frozen=True, config=_STRICT)
class StoppedProcess:
    """One process of the turn that the sweep signalled or found.

    `signals` are (name, ms since that sweep began) in the order they were sent; empty where it
    ended by itself. `gone_at` is ms since that sweep began, None while `look` is not `gone`.
    """

    pid: int
    start: int
    command: int | None
    name: str
    look: Literal["gone", "alive", "unknown"]
    state: str
    last_signal: str | None
    signals: tuple[tuple[str, int], ...] = ()
    gone_at: int | None = None
    problem: str | None = None


@wire(frozen=True, config=_STRICT)
class SandboxProof:
    """What is known of one sandbox. `proven` says whether nothing of the turn runs in it."""

    provider: str
    sandbox_id: str
    proven: bool
    containment: Containment
    snapshot: Snapshot
    scans: int
    unseen: int
    control_runs: int
    stopped: tuple[StoppedProcess, ...] = ()
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    evidence: str | None = None


@wire(frozen=True, config=_STRICT)
class CommandRecord:
    """One shell command of the turn. `outcome` is its last known state."""

    number: int
    call_id: str | None
    sandbox: str
    pid: int | None
    pgid: int | None
    outcome: Literal["exited", "stopped", "refused", "failed", "unknown", "running", "starting"]
    started_at: float | None
    """None where another process started it."""
    ended_at: float | None = None
    exit_code: int | None = None
    tty: bool = False


@wire(frozen=True, config=_STRICT)
class OperationCounts:
    """How many capability calls the fence saw. `rejected` ones were refused after the cancel."""

    admitted: int
    settled: int
    cancelled: int
    rejected: int


@wire(frozen=True, config=_STRICT)
class OpenOperation:
    """A call that has not settled: who has to look at it."""

    name: str
    kind: str
    call_id: str | None
    running_for_ms: int


@wire(frozen=True, config=_STRICT)
class HookResult:
    """An `on_quiesce` callback: whether it finished, and the type of its error if it raised."""

    name: str
    finished: bool
    elapsed_ms: int
    error: str | None = None


@wire(frozen=True, config=_STRICT)
class QuiescenceReceipt:
    """The result of a turn's drain.

    `proven` is True in every receipt that `wait_for_quiescence()` returns and False in the partial
    one inside QuiescenceTimeout. `containment` is the weakest of the sandboxes', None where the
    turn used none.
    """

    turn_id: str
    turn: str
    proven: bool
    reason: str | None
    started_at: float
    cancelled_at: float
    quiesced_at: float | None
    elapsed_ms: int
    containment: Containment | None
    sandboxes: tuple[SandboxProof, ...]
    commands: tuple[CommandRecord, ...]
    operations: OperationCounts
    unsettled_starts: tuple[int, ...] = ()
    open_operations: tuple[OpenOperation, ...] = ()
    adopted: tuple[int, ...] = ()
    """Provider session ids of adopted commands (not started by this fence) that ended."""
    adopted_open: tuple[int, ...] = ()
    hooks: tuple[HookResult, ...] = ()
    exemptions: tuple[str, ...] = ()
    origin: Literal["turn", "other-process"] = "turn"
    version: int = RECEIPT_VERSION

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the receipt as JSON text; `from_json` gives back an equal value."""
        return _ADAPTER.dump_json(self, indent=indent).decode("utf-8")

    @classmethod
    def from_json(cls, text: str | bytes) -> QuiescenceReceipt:
        """Read a receipt.

        Raises:
            InvalidReport: not JSON, a field missing, unknown or of another kind, another version.
        """
        try:
            receipt = _ADAPTER.validate_json(text)
        except ValidationError as error:
            _refuse_other_version(_version_of(text))
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "receipt"
            raise InvalidReport(f"field {where}: {first['msg']}", of="receipt") from None
        _refuse_other_version(receipt.version)
        return receipt

    def describe_open(self) -> str:
        """Say in one line what is still open, for an error message."""
        parts: list[str] = []
        for box in self.sandboxes:
            if box.proven:
                continue
            alive = [p for p in box.stopped if p.look != "gone"]
            if alive:
                shown = ", ".join(
                    f"pid {p.pid} {p.name} ({p.problem or p.look}, state {p.state})"
                    for p in alive[:5]
                )
                more = f" and {len(alive) - 5} more" if len(alive) > 5 else ""
                parts.append(f"{box.provider} {box.sandbox_id}: {shown}{more}")
            else:
                last = box.errors[-1] if box.errors else "no report yet"
                parts.append(f"{box.provider} {box.sandbox_id}: {last}")
        parts += [f"call {o.name} ({o.kind}) has not settled" for o in self.open_operations]
        parts += [f"adopted session {s} has not ended" for s in self.adopted_open]
        parts += [
            f"hook {h.name}: {h.error or 'not finished'}" for h in self.hooks if not h.finished
        ]
        return "; ".join(parts) or "nothing left to name"


def _version_of(text: str | bytes) -> object:
    try:
        parsed = json.loads(text)
    except ValueError:
        return RECEIPT_VERSION
    return parsed.get("version", RECEIPT_VERSION) if isinstance(parsed, dict) else RECEIPT_VERSION


def _refuse_other_version(version: object) -> None:
    if version != RECEIPT_VERSION:
        raise InvalidReport(
            f"version {version!r}, this library reads {RECEIPT_VERSION}", of="receipt"
        )


_ADAPTER: TypeAdapter[QuiescenceReceipt] = TypeAdapter(QuiescenceReceipt)


def weakest(levels: list[Containment]) -> Containment | None:
    """Return the weakest containment of a list, None for an empty one."""
    return min(levels, key=CONTAINMENT_ORDER.index, default=None)


__all__ = [
    "CommandRecord",
    "HookResult",
    "OpenOperation",
    "OperationCounts",
    "QuiescenceReceipt",
    "SandboxProof",
    "StoppedProcess",
]
