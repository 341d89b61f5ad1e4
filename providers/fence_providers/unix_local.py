"""Control channel for the OpenAI Agents SDK's UnixLocal sandbox: this host itself.

It goes neither through the session nor through asyncio's default executor: every open terminal
of the session blocks a thread there, and when all are blocked nothing runs any more. All times
are seconds (float).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import platform
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from fence.control import ControlOutput
from fence.errors import ControlError

PROVIDER = "unix_local"

_MAX_THREADS = 8
_MAX_OUTPUT_BYTES = 16 << 20
_POLL = 0.05
"""How often a run looks whether the script ended while something still holds its output."""
_REAP_GRACE = 1.0
"""How long a killed script may take to die before its run gives up on it."""

# One limiter an event loop: a limiter must not be shared by two of them.
_limiter: RunVar[anyio.CapacityLimiter] = RunVar("fence_unix_local_limiter")


@dataclass(frozen=True)
class LocalControl:
    """Runs scripts on this host, as this process's user. All UnixLocal sessions share it."""

    sandbox_id: str
    provider: str = field(default=PROVIDER, init=False)

    async def run(self, argv: Sequence[str], *, timeout: float) -> ControlOutput:
        """Run `argv` and return its output.

        Works on asyncio and on trio. A cancelled caller returns at once; the script itself goes
        on until it ends or its time is over.

        Raises:
            ControlError: it could not be started, or did not end within `timeout` seconds; then
                it was killed.
        """
        try:
            limiter = _limiter.get()
        except LookupError:
            limiter = anyio.CapacityLimiter(_MAX_THREADS)
            _limiter.set(limiter)
        return await anyio.to_thread.run_sync(
            functools.partial(run_script, list(argv), timeout),
            abandon_on_cancel=True,
            limiter=limiter,
        )


def run_script(argv: list[str], timeout: float) -> ControlOutput:
    """Run `argv` on this host in the calling thread; see LocalControl.run."""
    deadline = time.monotonic() + timeout
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as error:
        raise ControlError(f"could not start the control script: {error}") from error
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        with process.stdout, process.stderr:
            output, problem = _collect(process, deadline)
            if problem is None:
                ended, code = _wait(process, deadline)
                if not ended:
                    problem = "it closed its output and did not end"
            else:
                ended, code = False, None
            if problem is not None:
                raise ControlError(f"the control script was killed after {timeout:g} s: {problem}")
            return ControlOutput(exit_code=code, stdout=output[0], stderr=output[1])
    finally:
        _kill(process)


def _collect(
    process: subprocess.Popen[bytes], deadline: float
) -> tuple[tuple[bytes, bytes], str | None]:
    """Read both pipes until they close, or until the script ended and nothing more comes."""
    assert process.stdout is not None
    assert process.stderr is not None
    chunks: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, chunks[0])
        selector.register(process.stderr, selectors.EVENT_READ, chunks[1])
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return (b"", b""), "its time was over"
            ready = selector.select(min(left, _POLL))
            if not ready and not _running(process):
                # Somebody else holds the pipe; the script has said what it had to say.
                break
            for key, _events in ready:
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fileobj)
                    continue
                size += len(chunk)
                if size > _MAX_OUTPUT_BYTES:
                    return (b"", b""), f"it printed more than {_MAX_OUTPUT_BYTES} bytes"
                key.data.append(chunk)
    return (b"".join(chunks[0]), b"".join(chunks[1])), None


def _running(process: subprocess.Popen[bytes]) -> bool:
    """Return whether the script runs; looks without reaping."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _wait(process: subprocess.Popen[bytes], deadline: float) -> tuple[bool, int | None]:
    """Reap the script: (ended, exit code); no code where another one took it.

    subprocess would report 0 then, e.g. where the host ignores SIGCHLD.
    """
    pause = 0.0005
    while True:
        try:
            pid, status = os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:
            process.returncode = 0
            return True, None
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return True, process.returncode
        if time.monotonic() > deadline:
            return False, None
        time.sleep(pause)
        pause = min(pause * 2, 0.02)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the script's process group and reap the script; nothing where it is reaped already."""
    if process.returncode is not None:
        return
    if _running(process) or _is_our_zombie(process):
        # The pid is held by a child that is not reaped, so it is still our group's number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    ended, _code = _wait(process, time.monotonic() + _REAP_GRACE)
    if not ended:  # pragma: no cover - a process in uninterruptible sleep
        raise ControlError(f"the control script (pid {process.pid}) does not die of SIGKILL")


def _is_our_zombie(process: subprocess.Popen[bytes]) -> bool:
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


@functools.cache
def host_id() -> str:
    """Return what tells this host, this boot and this pid namespace from others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM):
            raise
        return platform.node() or "localhost"
    return f"{boot}.{namespace}"


def control_for(session: object) -> LocalControl | None:
    """Return the control channel for a UnixLocalSandboxSession, None for any other session."""
    for kind in type(session).__mro__:
        if kind.__name__ == "UnixLocalSandboxSession" and kind.__module__.startswith("agents."):
            return LocalControl(host_id())
    return None
