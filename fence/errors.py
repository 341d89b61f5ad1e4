"""Errors, grouped by who must act. Message text is built here, never at the call site."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fence.receipt import QuiescenceReceipt


class FenceError(Exception):
    """Base of every error that this library raises on purpose."""


# The caller's turn is over, or the caller passed something that cannot work.


class TurnCancelled(FenceError):
    """The turn is cancelled: the call was refused before any side effect, or ended by the stop."""

    def __init__(self, turn_id: str, reason: str | None) -> None:
        self.turn_id = turn_id
        self.reason = reason
        why = f": {reason}" if reason else ""
        super().__init__(
            f"turn {turn_id} is cancelled{why}; start a new TurnFence for the next turn"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (TurnCancelled, (self.turn_id, self.reason))


class TurnReused(FenceError):
    """A turn of this id was stopped in this sandbox before; nothing was started."""

    def __init__(self, turn_id: str) -> None:
        self.turn_id = turn_id
        super().__init__(
            f"turn {turn_id} was stopped in this sandbox before: an id is used once, and its "
            f"tombstone stays for at least 24 hours; choose a new turn_id"
        )


class FenceUsageError(FenceError, ValueError):
    """A value passed by the caller is not allowed. Raised before any side effect."""

    def __init__(self, field: str, got: object, allowed: str) -> None:
        self.field = field
        super().__init__(
            f"{field}: got {_kind(got)}, allowed is {allowed}",
        )


class ContainmentTooWeak(FenceError):
    """The sandbox cannot give the containment that `require=` asks for; nothing was started."""

    def __init__(self, sandbox: str, have: str, need: str, notes: tuple[str, ...] = ()) -> None:
        self.sandbox = sandbox
        self.have = have
        self.need = need
        self.notes = notes
        why = f" ({'; '.join(notes)})" if notes else ""
        super().__init__(
            f"sandbox {sandbox} offers containment {have!r}{why}, but require={need!r}; "
            f"lower `require` or run the turn in another sandbox"
        )


# An operator must act: something could not be proven.


class QuiescenceTimeout(FenceError):
    """Quiescence could not be proven before the deadline. The fence stays closed.

    `partial` is a receipt with `proven == False`: what still runs, what has not settled, and the
    errors of each control run. `wait_for_quiescence()` may be awaited again.
    """

    def __init__(self, partial: QuiescenceReceipt) -> None:
        self.partial = partial
        again = "quiesce_turn()" if partial.origin == "other-process" else "wait_for_quiescence()"
        advice = f"await {again} again"
        if any(not box.proven for box in partial.sandboxes):
            advice += ", or remove the sandbox"
        super().__init__(
            f"turn {partial.turn_id} is not proven quiet after {partial.elapsed_ms} ms: "
            f"{partial.describe_open()}; {advice}"
        )


# A provider's adapter or transport must act.


class ControlError(FenceError):
    """A script could not be run over the control channel. Retried until the deadline."""


class SandboxGone(FenceError):
    """Positive evidence that the sandbox itself no longer exists: a proof of its own kind.

    A provider raises it only on evidence (container absent, exit code polled), never because a
    request failed. `evidence` is a short sentence for the receipt.
    """

    def __init__(self, evidence: str) -> None:
        self.evidence = evidence
        super().__init__(f"the sandbox no longer exists: {evidence}")


class InvalidReport(FenceError):
    """A script of ours answered something that is not its protocol. Means: could not tell."""

    def __init__(self, why: str, *, of: str = "report from the sandbox") -> None:
        super().__init__(f"unreadable {of}: {why}")


class SandboxNotReady(FenceError):
    """The sandbox could not be prepared for marked commands; the command was not started."""

    def __init__(self, sandbox: str, why: str) -> None:
        super().__init__(f"sandbox {sandbox} is not ready for fenced commands: {why}")


class ExtraMissing(FenceError):
    """An optional part of the library is not installed. Raised before any side effect."""

    def __init__(self, extra: str) -> None:
        self.extra = extra
        super().__init__(
            f"this needs the extra {extra!r}: install it with `pip install 'turnfence[{extra}]'`"
        )


class FenceInternalError(FenceError):
    """A bug of this library: the ledger was told something that cannot happen. Please report it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"internal error, please report it: {what}")


def _kind(value: object) -> str:
    """Name a value and its type without printing something long or secret."""
    if isinstance(value, bool | int | float | None):
        return f"{value!r} ({type(value).__name__})"
    if isinstance(value, str):
        shown = value if len(value) <= 40 else value[:37] + "..."
        return f"{shown!r} (str)"
    return type(value).__name__
