"""Our errors in a form that the SDK's runner passes on unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agents.exceptions import AgentsException

from fence.errors import FenceError, TurnCancelled


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


def _for_the_runner(kind: Any) -> type[FenceError]:
    make: Any = type
    made: type[FenceError] = make(
        f"Run{kind.__name__}", (kind, AgentsException), {"run_data": None}
    )
    return made


@contextmanager
def runner_boundary() -> Iterator[None]:
    """Raise each FenceError of the block as an AgentsException of the same kind, too."""
    try:
        yield
    except AgentsException:
        raise
    except TurnCancelled as error:
        raise RunTurnCancelled(error.turn_id, error.reason) from error
    except FenceError as error:
        kind = _for_the_runner(type(error))
        twin = kind.__new__(kind)
        twin.args = error.args
        twin.__dict__.update(error.__dict__)
        raise twin from error
