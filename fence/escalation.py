"""Every duration and cap of a stop, in one frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from fence.errors import FenceUsageError


@dataclass(frozen=True, kw_only=True)
class EscalationPolicy:
    """How hard and how long a stop tries. All durations are seconds.

    Raises:
        FenceUsageError: a value is not a finite number in its range, or the stages do not fit.
    """

    int_grace: float = 0.25
    """From SIGINT (what Ctrl-C sends) until SIGTERM, for a process that reacts to neither."""
    term_grace: float = 0.75
    """From SIGTERM until SIGKILL."""
    sweep: float = 8.0
    """The longest one sweep may take in the sandbox, by its own clock."""
    deadline: float = 30.0
    """The default of `wait_for_quiescence(timeout=)` and the bound of the drain itself."""
    call_grace: float = 1.0
    """How long an in-flight call may go on after the cancel before its task is cancelled."""
    control_overhead: float = 5.0
    """What a control run may take beyond the script's own time before it counts as lost."""
    retry_first: float = 0.1
    """Pause before the first repeat of a failed control run; doubles up to `retry_max`."""
    retry_max: float = 2.0
    """Longest pause between repeats of a failed control run."""
    max_signalled: int = 4096
    """A sweep that meets more processes of one turn than this could not tell, and is repeated."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "max_signalled":
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise FenceUsageError(f"EscalationPolicy.{f.name}", value, "an int >= 1")
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not math.isfinite(value)
                or value < 0
                or value > 86_400
            ):
                raise FenceUsageError(
                    f"EscalationPolicy.{f.name}", value, "a number of seconds from 0 to 86400"
                )
        for name in ("sweep", "deadline", "control_overhead", "retry_first", "retry_max"):
            if getattr(self, name) == 0:
                raise FenceUsageError(f"EscalationPolicy.{name}", 0, "a number of seconds above 0")
        if self.int_grace + self.term_grace >= self.sweep:
            raise FenceUsageError(
                "EscalationPolicy.sweep",
                self.sweep,
                f"more than int_grace + term_grace = {self.int_grace + self.term_grace:g} s",
            )
        if self.sweep > self.deadline:
            raise FenceUsageError(
                "EscalationPolicy.deadline", self.deadline, f"at least sweep = {self.sweep:g} s"
            )
        if self.retry_first > self.retry_max:
            raise FenceUsageError(
                "EscalationPolicy.retry_first",
                self.retry_first,
                f"at most retry_max = {self.retry_max:g} s",
            )
