"""How a script runs in a sandbox out of band: the contract every provider fulfils.

All times are seconds (float).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class ControlOutput:
    """What one control run answered. `exit_code` is None where the channel cannot tell it."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes


@runtime_checkable
class SandboxControl(Protocol):
    """Runs a script in one sandbox, beside the session and not through it.

    Two controls with equal `(provider, sandbox_id)` name the same sandbox: the fence then makes
    one control run for both.
    """

    @property
    def provider(self) -> str:
        """The provider's name as in the entry point group `fence.providers`."""

    @property
    def sandbox_id(self) -> str:
        """What tells this sandbox from others of the provider, stable over its life."""

    async def run(self, argv: Sequence[str], *, timeout: float) -> ControlOutput:
        """Run `argv` in the sandbox and return its output.

        Runs as the user that may signal most (root where there is one). Bounded by `timeout`
        seconds on our side, whatever the transport does. Cancelling the caller returns at once.

        Raises:
            ControlError: the run failed or its outcome is not known; it is safe to repeat.
            SandboxGone: positive evidence that the sandbox no longer exists.
        """


@dataclass(frozen=True)
class SandboxCommandResult:
    """What `TurnFence.run_sandbox_command` returns. `wall_time` is in seconds."""

    stdout: bytes
    stderr: bytes
    exit_code: int
    wall_time: float

    @property
    def ok(self) -> bool:
        """Whether the command exited with code 0."""
        return self.exit_code == 0
