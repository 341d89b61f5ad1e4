"""A sandbox in memory: it speaks the scripts' protocol, and fails by name.

Only for the policy of the drain (retries, graces, deadlines, bounds). What a sweep does to real
processes is tested with the real one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

from fence import EscalationPolicy, TurnFence
from fence.control import ControlOutput
from fence.errors import ControlError, SandboxGone
from fence.events import FenceEvent
from fence.turn import CommandOutcome, Sandbox

# A drain that fails has to end soon, and one that works has to have time on a busy machine.
QUICK = EscalationPolicy(
    int_grace=0.05,
    term_grace=0.05,
    sweep=5.0,
    deadline=20.0,
    call_grace=0.05,
    control_overhead=2.0,
    retry_first=0.005,
    retry_max=0.02,
)

# A drain that is to miss its own deadline.
SHORT = EscalationPolicy(
    int_grace=0.01,
    term_grace=0.01,
    sweep=0.05,
    deadline=0.1,
    call_grace=0.02,
    retry_first=0.005,
    retry_max=0.02,
)


@dataclass
class FakeProcess:
    pid: int
    turn: str
    command: int
    lives: float = 0
    """How many sweeps it survives."""
    look: str = "alive"


@dataclass
class FakeRun:
    """One control run, as an observer outside of the fence sees it."""

    script: str
    turn: str
    command: str = "-"
    mode: str = ""
    no_int: tuple[int, ...] = ()
    timeout: float = 0.0


@dataclass
class FakeSandbox:
    """A control and the sandbox behind it. `faults` are used up by sweeps, one each."""

    sandbox_id: str = "box"
    provider: str = "fake"
    containment: str = "lineage"
    brand: bool = True
    snapshot: str = "consistent"
    faults: list[str] = field(default_factory=list)
    prepare_faults: list[str] = field(default_factory=list)
    always: str | None = None
    runs: list[FakeRun] = field(default_factory=list)
    processes: dict[int, FakeProcess] = field(default_factory=dict)
    refused: list[int] = field(default_factory=list)
    tombstones: set[str] = field(default_factory=set)
    gate: anyio.Event | None = None
    """Where set, a sweep waits here before it does anything."""
    release_deaf: bool = False
    exiting: dict[int, int] = field(default_factory=dict)

    @property
    def sweeps(self) -> list[FakeRun]:
        return [r for r in self.runs if r.script == "fence-sweep" and r.mode == "stop"]

    @property
    def turn_sweeps(self) -> list[FakeRun]:
        return [r for r in self.sweeps if r.command == "-"]

    def alive(self, turn: str | None = None) -> list[int]:
        return [p.pid for p in self.processes.values() if turn in (None, p.turn)]

    # The provider's side.

    def spawn(self, argv: Sequence[str], *, lives: float = 0, look: str = "alive") -> int | None:
        """Start a marked command; None where its preamble finds a tombstone."""
        turn, number = argv[7], int(argv[8])
        if turn in self.tombstones or f"{turn}.{number}" in self.tombstones:
            self.refused.append(number)
            return None
        pid = 1000 + len(self.processes) + len(self.refused) + number
        self.processes[pid] = FakeProcess(pid, turn, number, lives, look)
        return pid

    # The control's side.

    async def run(self, argv: Sequence[str], *, timeout: float) -> ControlOutput:
        at = next(i for i, word in enumerate(argv) if word in ("fence-prepare", "fence-sweep"))
        # A sweep is `sh -c LAUNCH fence-sweep SCRIPT PROTOCOL ...`, prepare has no launcher.
        name = argv[at]
        first = at + 2 if name == "fence-sweep" else at + 1
        _protocol, turn, run, *rest = argv[first:]
        if name == "fence-prepare":
            self.runs.append(FakeRun(name, turn, timeout=timeout))
            text = f"{name} 1 {turn} {run}\n"
            end = f"end /tmp/.fence 0 boot:ns {self.containment} {int(self.brand)}\n"
            fault = self.prepare_faults.pop(0) if self.prepare_faults else None
            return await self._answer(fault, text + end, 0, name, turn, run)
        command, mode, no_int = rest[0], rest[1], rest[6]
        spared = tuple(int(n) for n in no_int.split(",") if n)
        self.runs.append(FakeRun(name, turn, command, mode, spared, timeout))
        if self.gate is not None:
            await self.gate.wait()
        fault = self.faults.pop(0) if self.faults else self.always
        if fault in ("raise", "hang", "deaf", "oserror", "gone", "nothing"):
            return await self._answer(fault, "", 0, name, turn, run)
        text, code = self._sweep(turn, run, command, mode, fault)
        return await self._answer(fault, text, code, name, turn, run)

    def _sweep(
        self, turn: str, run: str, command: str, mode: str, fault: str | None
    ) -> tuple[str, int]:
        if mode == "stop":
            self.tombstones.add(turn if command == "-" else f"{turn}.{command}")
        lines = [f"fence-sweep 1 {turn} {run}"]
        verdict = "clear"
        for process in list(self.processes.values()):
            if process.turn != turn or command not in ("-", str(process.command)):
                continue
            look, signals, gone_at = process.look, "-", "-"
            if mode == "stop":
                signals = "INT@0,TERM@5"
                if process.lives < 1:
                    del self.processes[process.pid]
                    look, gone_at = "gone", "9"
                else:
                    process.lives -= 1
            if look != "gone" and verdict != "unknown":
                verdict = look
            state = "Z" if look == "gone" else "S"
            lines.append(
                f"p {process.pid} 77 1 {process.pid} {process.pid} 0 {process.command} environ"
                f" {look} {state} {signals} {gone_at} - fake"
            )
            lines.append(f"m {process.command} 0 {process.pid} 77 1 run")
        if fault == "unknown":
            verdict = "unknown"
        code = {"clear": 0, "alive": 75, "unknown": 76}[verdict]
        lines.append(f"end {verdict} {self.containment} {self.snapshot} 2 0 12")
        return "\n".join(lines) + "\n", code

    async def _answer(
        self, fault: str | None, text: str, code: int, name: str, turn: str, run: str
    ) -> ControlOutput:
        match fault:
            case "raise" | "lost":
                raise ControlError("the transport failed")
            case "oserror":
                raise OSError("connection reset")
            case "hang":
                await anyio.sleep_forever()
            case "deaf":
                while not self.release_deaf:
                    try:
                        with anyio.CancelScope(shield=True):
                            await anyio.sleep(0.01)
                    except BaseException:
                        if self.release_deaf:
                            raise
                raise ControlError("late")
            case "gone":
                raise SandboxGone("its container is absent")
            case "nothing":
                return None  # type: ignore[return-value]
            case "garbage":
                return ControlOutput(0, b"\xff\x00 clear", b"")
            case "half":
                return ControlOutput(code, text[: len(text) // 2].encode(), b"")
            case "twice":
                return ControlOutput(code, (text * 2).encode(), b"")
            case "exit 76":
                return ControlOutput(76, text.encode(), b"")
            case "exit 75":
                return ControlOutput(75, text.encode(), b"")
            case "exit 1":
                return ControlOutput(1, text.encode(), b"")
            case "other turn":
                return ControlOutput(code, text.replace(turn, "f" * 32).encode(), b"")
            case "late":
                return ControlOutput(code, text.replace(run, "0" * 16).encode(), b"")
            case "old protocol":
                old = text.replace(f"{name} 1 ", f"{name} 0 ", 1)
                return ControlOutput(code, old.encode(), b"")
        return ControlOutput(code, text.encode(), b"")


@dataclass
class FakeSession:
    """What the fake provider's start returned."""

    session_id: int | None
    exit_code: int | None


def outcome(session: FakeSession) -> CommandOutcome:
    return CommandOutcome(session.session_id, session.exit_code)


async def start(
    fence: TurnFence,
    sandbox: Sandbox,
    world: FakeSandbox,
    *,
    lives: float = 0,
    look: str = "alive",
    before: anyio.Event | None = None,
    after: anyio.Event | None = None,
    exit_code: int | None = None,
    tty: bool = False,
    call_id: str | None = None,
    entered: anyio.Event | None = None,
) -> FakeSession:
    """Start a command; `before` and `after` hold the provider's call around the spawn."""

    async def call(argv: list[str]) -> FakeSession:
        if entered is not None:
            entered.set()
        if before is not None:
            await before.wait()
        pid = world.spawn(argv, lives=lives, look=look)
        if after is not None:
            await after.wait()
        if pid is None:
            return FakeSession(None, 130)
        if exit_code is not None:
            return FakeSession(None, exit_code)
        return FakeSession(pid, None)

    return await fence.start_command(
        sandbox, ["sh", "-c", "true"], call, outcome, tty=tty, call_id=call_id
    )


@dataclass
class Sink:
    """Keeps every event; raises on demand."""

    events: list[FenceEvent] = field(default_factory=list)
    broken: bool = False

    def __call__(self, event: FenceEvent) -> None:
        self.events.append(event)
        if self.broken:
            raise RuntimeError("the sink is broken")

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def of(self, kind: str) -> list[FenceEvent]:
        return [event for event in self.events if event.kind == kind]


FOREVER = math.inf
