"""Runs a set-up command of the app itself as part of the turn. All times are seconds (float)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession

from fence.control import SandboxCommandResult
from fence.errors import FenceUsageError
from fence.openai_agents.session import wrap_session

if TYPE_CHECKING:
    from fence.turn import TurnFence


async def run_sandbox_command(
    fence: TurnFence,
    session: BaseSandboxSession,
    cmd: str | Sequence[str],
    *,
    shell: bool | list[str] = True,
    user: str | None = None,
    timeout: float | None = None,
) -> SandboxCommandResult:
    """Run a command of the turn in the sandbox and return its output and exit code.

    Args:
        fence: the turn's fence.
        session: the sandbox session.
        cmd: text for the shell, or words.
        shell: as in `session.exec`: True for the provider's own shell, False to run the words
            themselves, a list for a shell of your own.
        user: run as this user of the sandbox.
        timeout: seconds until the command is stopped, by the fence and with all that it started.

    Raises:
        TimeoutError: it did not end within `timeout`.
        TurnCancelled: the turn was cancelled before the start, or while it ran.
        FenceUsageError: `cmd` is empty or has a NUL character.
    """
    if not isinstance(cmd, str | Sequence):
        raise FenceUsageError("cmd", cmd, "a str, or a sequence of words")
    words = [cmd] if isinstance(cmd, str) else [str(word) for word in cmd]
    if not words or not words[0] or any("\x00" in word for word in words):
        raise FenceUsageError("cmd", cmd, "a non-empty command without NUL characters")
    started = time.perf_counter()
    fenced = wrap_session(fence, session)
    # Not the session's own timeout: it ends one process group, or, with some, the whole sandbox.
    # A cancelled caller makes the fence stop the command's lineage.
    with anyio.move_on_after(timeout) as scope:
        result = await fenced.exec(*words, shell=shell, user=user)
    if scope.cancelled_caught:
        raise TimeoutError(f"the command did not end within {timeout:g} s and is being stopped")
    return SandboxCommandResult(
        stdout=result.stdout,
        stderr=result.stderr,
        exit_code=result.exit_code,
        wall_time=time.perf_counter() - started,
    )
