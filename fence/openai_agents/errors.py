"""TurnCancelled in a form that the SDK's runner passes on unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agents.exceptions import AgentsException

from fence.errors import TurnCancelled


class RunTurnCancelled(TurnCancelled, AgentsException):
    """The turn is cancelled, raised from inside a Runner run.

    The runner wraps foreign exceptions of a tool in UserError; an AgentsException it passes on,
    so `except TurnCancelled` around the run catches it.
    """

    def __init__(self, turn_id: str, reason: str | None) -> None:
        super().__init__(turn_id, reason)
        self.run_data = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (RunTurnCancelled, (self.turn_id, self.reason))


@contextmanager
def runner_boundary() -> Iterator[None]:
    """Raise RunTurnCancelled where the block raises TurnCancelled."""
    try:
        yield
    except RunTurnCancelled:
        raise
    except TurnCancelled as error:
        raise RunTurnCancelled(error.turn_id, error.reason) from error
