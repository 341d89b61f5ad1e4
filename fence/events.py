"""What a fence tells while it works: one frozen value an event, for logs, timelines and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal[
    "sandbox_prepared",
    "operation_admitted",
    "operation_settled",
    "operation_refused",
    "command_starting",
    "command_running",
    "command_exited",
    "command_stopping",
    "caller_lost",
    "cancelled",
    "pty_interrupted",
    "sweep_started",
    "sweep_reported",
    "sweep_failed",
    "process_stopped",
    "hook_started",
    "hook_finished",
    "quiesced",
    "deadline_missed",
]


@dataclass(frozen=True)
class FenceEvent:
    """One step of a turn. `at` is seconds since the epoch. Never holds command text or output."""

    kind: EventKind
    at: float
    turn: str
    command: int | None = None
    call_id: str | None = None
    sandbox: str | None = None
    data: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


EventSink = Callable[[FenceEvent], None]
