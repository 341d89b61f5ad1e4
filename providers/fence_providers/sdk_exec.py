"""Control channel for any session of the OpenAI Agents SDK, over its own `exec`.

The last resort: it shares the session's transport, and with it whatever blocks that. All times
are seconds (float).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from fence.control import ControlOutput
from fence.errors import ControlError

PROVIDER = "sdk_exec"

_abandoned: set[asyncio.Task[Any]] = set()


class SdkExecControl:
    """Runs scripts with `session.exec(argv, shell=False)`, bounded on this side."""

    provider = PROVIDER

    def __init__(self, session: Any) -> None:
        self._session = session
        state = session.state
        self.sandbox_id = f"{getattr(state, 'type', 'session')}:{state.session_id}"

    def __repr__(self) -> str:
        return f"SdkExecControl({self.sandbox_id!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SdkExecControl) and other.sandbox_id == self.sandbox_id

    def __hash__(self) -> int:
        return hash((PROVIDER, self.sandbox_id))

    async def run(self, argv: Sequence[str], *, timeout: float) -> ControlOutput:
        """Run `argv` in the sandbox and return its output; asyncio only, as the SDK.

        No timeout is passed on: some providers end the whole sandbox when one expires. A call
        that does not react to its cancellation is left behind and watched until it ends.

        Raises:
            ControlError: it failed, or did not answer within `timeout` seconds.
        """
        task = asyncio.ensure_future(self._session.exec(*argv, shell=False))
        try:
            done, _pending = await asyncio.wait({task}, timeout=timeout)
        finally:
            if not task.done():
                task.cancel()
                _abandoned.add(task)
                task.add_done_callback(_forget)
        if not done:
            raise ControlError(f"session.exec did not answer within {timeout:g} s")
        if task.cancelled():
            raise ControlError("session.exec was cancelled")
        error = task.exception()
        if error is not None:
            raise ControlError(f"session.exec failed: {type(error).__name__}: {error}") from error
        result = task.result()
        return ControlOutput(
            exit_code=result.exit_code, stdout=result.stdout or b"", stderr=result.stderr or b""
        )


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    # Read the outcome, or asyncio reports it as never retrieved.
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()


def control_for(session: object) -> SdkExecControl | None:
    """Return a control channel for any session of the SDK, None for another object."""
    try:
        from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
    except ImportError:
        return None
    if not isinstance(session, BaseSandboxSession):
        return None
    return SdkExecControl(session)
