"""The battery's instruments: a sandbox, the SDK's tools in it, and gates on what a case has done.

Everything here runs the same with and without a fence; `fence=None` is the negative control. All
times are seconds (float).
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from agents.sandbox.capabilities import Shell
from agents.sandbox.manifest import Environment, Manifest
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient
from agents.sandbox.session import SandboxSession
from agents.tool_context import ToolContext

from fence import QuiescenceReceipt, SandboxControl, TurnFence
from tests.support import procs
from tests.support.battery import StopCase

T = TypeVar("T")

PATIENCE = 20.0
"""How long a gate waits for something that must come; only a failing test ever waits that long."""


def run(main: Callable[[], Coroutine[Any, Any, T]], *, threads: int | None = 64) -> T:
    """Run `main` on a fresh loop.

    Each open PTY of UnixLocal occupies a thread of the default executor, so it gets `threads` of
    them; None leaves it as asyncio makes it.
    """

    async def with_executor() -> T:
        if threads is not None:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads))
        return await main()

    return asyncio.run(with_executor())


async def until(condition: Callable[[], T], what: str, *, patience: float = PATIENCE) -> T:
    """Wait until `condition()` is true and return its value; fail naming `what` was waited for."""
    deadline = time.monotonic() + patience
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never came: {what}"
        await asyncio.sleep(0.01)
    return value


# The sandbox and the SDK's tools


@asynccontextmanager
async def unix_local(**environment: str) -> AsyncIterator[SandboxSession]:
    """A started UnixLocal session owned by the test; its workspace is removed at the end."""
    client = UnixLocalSandboxClient()
    manifest = Manifest(environment=Environment(value=dict(environment)))
    session = await client.create(manifest=manifest)
    try:
        await session.start()
        yield session
    finally:
        await session.aclose()
        await client.delete(session)


@dataclass
class Tools:
    """exec_command and write_stdin of one session, as the SDK makes them, fenced or not."""

    session: SandboxSession
    fence: TurnFence | None
    _by_name: dict[str, Any] = field(default_factory=dict)
    _calls: int = 0

    def __post_init__(self) -> None:
        capability = Shell()
        if self.fence is not None:
            capability = self.fence.wrap_capability(capability)
        capability.bind(self.session)
        self._by_name = {tool.name: tool for tool in capability.tools()}

    def _call(self, name: str, arguments: dict[str, Any]) -> Awaitable[str]:
        self._calls += 1
        raw = json.dumps(arguments)
        context = ToolContext(
            context=None,
            tool_name=name,
            tool_call_id=f"call-{self._calls}",
            tool_arguments=raw,
        )
        answer: Awaitable[str] = self._by_name[name].on_invoke_tool(context, raw)
        return answer

    def exec_command(self, cmd: str, **arguments: Any) -> Awaitable[str]:
        return self._call("exec_command", {"cmd": cmd, **arguments})

    def write_stdin(self, session_id: int, **arguments: Any) -> Awaitable[str]:
        return self._call("write_stdin", {"session_id": session_id, **arguments})


@dataclass(frozen=True)
class Banner:
    """What the SDK's formatted answer says; the body is the command's own output."""

    exit_code: int | None
    session_id: int | None
    body: str


def banner(answer: str) -> Banner:
    """Split an answer of exec_command or write_stdin at its first `Output:` line."""
    head, _, body = answer.partition("\nOutput:\n")
    code = re.search(r"^Process exited with code (-?\d+)$", head, re.M)
    running = re.search(r"^Process running with session ID (\d+)$", head, re.M)
    return Banner(int(code[1]) if code else None, int(running[1]) if running else None, body)


# A case of the battery, started


@dataclass
class Started:
    """A case that was started: its call in flight, and how to find what it started."""

    case: StopCase
    out: Path
    call: asyncio.Task[str]

    def running(self) -> list[procs.Process]:
        return procs.find(self.case.token)


def start(tools: Tools, case: StopCase, *, tty: bool, directory: Path) -> Started:
    """Start a case through exec_command, without waiting for anything."""
    out = directory / f"{case.id}-{case.token}"
    cmd = case.cmd
    if "$OUT" in cmd:
        cmd = f"OUT={out}; export OUT; {cmd}"
    call = asyncio.ensure_future(tools.exec_command(cmd, tty=tty, yield_time_ms=30_000))
    return Started(case, out, call)


def _named(token: str, *names: str) -> bool:
    have = [process.name for process in procs.find(token)]
    return all(have.count(name) >= names.count(name) for name in set(names))


def catches_term(process: procs.Process) -> bool:
    """Say whether the process has a handler for SIGTERM, as the kernel sees it."""
    with suppress(FileNotFoundError, ProcessLookupError):
        status = Path(f"/proc/{process.pid}/status").read_text(errors="replace")
        caught = re.search(r"^SigCgt:\s*(\w+)$", status, re.M)
        return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def _sleeps(process: procs.Process) -> bool:
    # 230 is clock_nanosleep on x86-64, 115 on aarch64.
    with suppress(OSError, IndexError):
        return Path(f"/proc/{process.pid}/syscall").read_text().split()[0] in ("230", "115")
    return False


_SLEEPERS = dict.fromkeys(
    ("setsid-orphan", "env-scrubbed", "double-fork", "job-control", "own-marker-removed"), 2
)


def is_up(started: Started) -> bool:
    """Whether a case has got so far that stopping it is worth something.

    A command that ended counts as up: the end of a PTY hangs up on what it left in the foreground.
    """
    token, case = started.case.token, started.case.id
    if case == "tmux-like":  # exits with 3 while its server starts
        return started.call.done() and _named(token, "sleep", "sleep")
    if case == "late-writer" or started.call.done():
        return started.call.done()
    if case in ("graceful", "spawns-on-term"):
        return any(catches_term(process) for process in procs.find(token))
    if case in ("zombie-maker", "raw-terminal"):
        return any(p.name.startswith("python") and _sleeps(p) for p in procs.find(token))
    if case == "stopped":
        return any(process.state == "T" for process in procs.find(token))
    if case in ("pipeline", "flood"):
        return _named(token, "yes")
    if case == "timeout-group":
        return _named(token, "timeout", "sleep")
    return _named(token, *["sleep"] * _SLEEPERS.get(case, 1))


class ControlBetween:
    """Stands in front of a sandbox's real control channel; a subclass says what `run` does."""

    def __init__(self, real: SandboxControl) -> None:
        self._real = real

    @property
    def provider(self) -> str:
        return self._real.provider

    @property
    def sandbox_id(self) -> str:
        return self._real.sandbox_id


async def stop_unfenced(session: SandboxSession, started: Iterable[Started]) -> None:
    """Stop as the SDK alone can: cancel the calls, then end all its sessions."""
    calls = [one.call for one in started]
    for call in calls:
        call.cancel()
    ending = asyncio.ensure_future(session.pty_terminate_all())
    # Bounded: now and then the SDK waits here for pipes that a survivor holds.
    _, open_still = await asyncio.wait({*calls, ending}, timeout=5)
    for one in open_still:
        one.cancel()


def assert_proven(receipt: QuiescenceReceipt) -> None:
    """The receipt proves what it should on a normal Linux, and says how."""
    assert receipt.proven, receipt
    assert receipt.containment == "lineage", receipt
    assert receipt.unsettled_starts == (), receipt
    assert receipt.open_operations == (), receipt
    for sandbox in receipt.sandboxes:
        assert sandbox.proven, sandbox
        assert all(process.look == "gone" for process in sandbox.stopped), sandbox
