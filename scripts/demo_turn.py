"""Runs one agent turn twice, presses Stop in the middle, and shows what is left each time.

First through a TurnFence, then with the SDK alone. The agent run, the sandbox, the commands and
the processes are real; only the model is scripted. Everything that is shown as running or gone was
seen in /proc by this program itself.

Exit code 0 only if the fence left nothing and the SDK alone left something; 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from agents import Runner
from agents.result import RunResultStreaming
from agents.run_config import RunConfig, SandboxRunConfig
from agents.sandbox import SandboxAgent
from agents.sandbox.capabilities import Capability, Shell
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient
from agents.sandbox.session import SandboxSession
from agents.testing import ScriptedModel, function_call
from demo_record import Eyes, Lane, Recording, common_window
from demo_svg import draw
from demo_text import ASCII, Glyphs, timeline
from rich.console import Console, Group
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from fence import FenceError, QuiescenceReceipt, TurnFence
from fence.events import FenceEvent
from tests.support import procs

START_PATIENCE = 15.0
"""How long all commands may take to be seen running."""
BEFORE_STOP = 0.5
"""How long the turn goes on after that, so that a person sees it run."""
AFTER_ANSWER = 1.0
"""How long survivors are watched after everything said that it had stopped."""
LONGEST_YIELD_MS = 600_000

DAEMON = """python3 -c "import os
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
os.execvp('sleep',['sleep','U'])"; sleep U"""

# Title, command, and whether the agent waits for it, so that its tool call is in flight at Stop.
COMMANDS = [
    ("child in own session", "setsid sleep U & wait", False),
    ("empty environment", "(env -i setsid sleep U &) ; sleep U", False),
    ("deaf to Ctrl-C, TERM", "trap '' INT TERM; while :; do sleep U; done", True),
    ("daemon (double fork)", DAEMON, False),
    ("forks on TERM", "trap '' INT; trap 'setsid sleep U &' TERM; W", False),
    ("left behind (nohup)", "nohup sleep U >/dev/null 2>&1 & echo started", False),
    ("saves work on TERM", "trap '' INT; trap 'sleep 0.3; : U >OUT; exit 0' TERM; W", False),
]
# `: U` keeps the number in the argv of the shell, so that it is seen.
WAIT = "while : U; do sleep 0.05; done"
SAVES = len(COMMANDS)

SIGNAL_WORDS = {"INT": "Ctrl-C (INT)", "TERM": "TERM", "KILL": "KILL"}


def lanes(folder: Path) -> list[Lane]:
    """Return the turn's commands, each with a number of its own in the argv of all it starts."""
    made = []
    for number, (title, command, waits) in enumerate(COMMANDS, 1):
        token = procs.new_token()
        text = command.replace("W", WAIT) if command.endswith("W") else command
        text = text.replace("OUT", str(folder / f"saved-{token}")).replace("U", token)
        made.append(Lane(number, title, text, token, f"call-{number}", waits))
    return made


@asynccontextmanager
async def local_sandbox() -> AsyncIterator[SandboxSession]:
    """Open a sandbox on this machine, and close everything of it that the SDK closes."""
    client = UnixLocalSandboxClient()
    session = await client.create()
    try:
        await session.start()
        yield session
    finally:
        await session.aclose()
        await client.delete(session)


def start_turn(
    record: Recording, session: SandboxSession, capabilities: list[Capability]
) -> RunResultStreaming:
    """Start the agent run: one model answer that calls the shell tool for every command at once."""
    calls = [
        function_call(
            "exec_command",
            json.dumps({"cmd": lane.cmd, "yield_time_ms": LONGEST_YIELD_MS if lane.waits else 250}),
            call_id=lane.call_id,
        )
        for lane in record.lanes
    ]
    agent = SandboxAgent(
        name="demo",
        instructions="Start everything.",
        model=ScriptedModel([calls]),
        capabilities=capabilities,
    )
    return Runner.run_streamed(
        agent,
        "Start everything.",
        run_config=RunConfig(sandbox=SandboxRunConfig(session=session), tracing_disabled=True),
    )


async def consume(result: RunResultStreaming) -> None:
    """Read the run's events to its end; a stop may end it with an error of ours."""
    try:
        async for _ in result.stream_events():
            pass
    except FenceError:
        pass


async def until_running(record: Recording, run: asyncio.Task[None]) -> None:
    """Wait until each command is seen running what it is there for.

    Raises:
        RuntimeError: one is not after START_PATIENCE, or the run ended before.
    """
    deadline = record.now() + START_PATIENCE
    while not all(_is_up(lane) for lane in record.lanes):
        if run.done() and (error := run.exception()) is not None:
            raise RuntimeError("the agent run ended before Stop") from error
        if record.now() > deadline:
            missing = ", ".join(lane.title for lane in record.lanes if not _is_up(lane))
            raise RuntimeError(f"not running after {START_PATIENCE:g} s: {missing}")
        await asyncio.sleep(0.02)
    await asyncio.sleep(BEFORE_STOP)


def _is_up(lane: Lane) -> bool:
    """Say whether the process that the command is there for runs, not only its shell."""
    shell_only = lane.number in (5, SAVES)
    return any(shell_only or seen.process.argv[0] == "sleep" for seen in lane.running)


def note_saved(record: Recording, folder: Path) -> None:
    """Look whether the command that saves its work could."""
    lane = record.lanes[SAVES - 1]
    lane.saved = (folder / f"saved-{lane.token}").exists()


class Listener:
    """Takes from the fence's events when it swept, and which signals it says it sent."""

    def __init__(self, record: Recording) -> None:
        self._record = record
        self._began = 0.0
        self._of_this_sweep: list[tuple[int, int, str]] = []
        self.signals: list[tuple[float, int, str]] = []
        """(when, number of the command, name of the signal)."""

    def __call__(self, event: FenceEvent) -> None:
        """Note one event."""
        at = self._record.since_day(event.at)
        if event.kind == "sweep_started":
            self._began, self._of_this_sweep = at, []
        elif event.kind == "process_stopped" and event.command is not None:
            for signal in str(event.data["signals"]).split():
                name, _, at_ms = signal.partition("@")
                self._of_this_sweep.append((int(at_ms), event.command, name))
        elif event.kind in ("sweep_reported", "sweep_failed"):
            self._record.sweeps.append((self._began, at))
            took = event.data.get("elapsed_ms")
            # The sweep's own clock starts some milliseconds after the fence asked for it.
            began = at - took / 1000 if isinstance(took, int) else self._began
            self.signals += [(began + ms / 1000, n, name) for ms, n, name in self._of_this_sweep]


async def with_fence(record: Recording, folder: Path) -> QuiescenceReceipt:
    """Run the turn through a fence and press Stop.

    Raises:
        QuiescenceTimeout: the fence could not prove that the turn is quiet.
    """
    listener = Listener(record)
    async with local_sandbox() as session:
        async with TurnFence(on_event=listener) as fence:
            result = start_turn(record, session, fence.wrap_capabilities([Shell()]))
            run = asyncio.create_task(consume(result))
            await until_running(record, run)

            record.stop = record.now()
            fence.cancel("user pressed Stop")
            receipt = await fence.wait_for_quiescence()
            record.answered, record.answer, record.proved = record.now(), "proved", receipt.proven

            result.cancel()
            await run
        note_saved(record, folder)
    call_of = {command.number: command.call_id for command in receipt.commands}
    for lane in record.lanes:
        # One letter for each signal: the lane's processes get it within a few milliseconds.
        first: dict[str, float] = {}
        for at, number, name in sorted(listener.signals):
            if call_of[number] == lane.call_id and name in SIGNAL_WORDS:
                first.setdefault(name, at)
        lane.signals = sorted((at, name) for name, at in first.items())
    return receipt


async def with_sdk_alone(record: Recording, folder: Path) -> None:
    """Run the same turn without a fence, cancel the run, and close what the SDK closes."""
    async with local_sandbox() as session:
        result = start_turn(record, session, [Shell()])
        run = asyncio.create_task(consume(result))
        await until_running(record, run)

        record.stop = record.now()
        result.cancel()
        await run
    record.answered, record.answer = record.now(), "closed"
    note_saved(record, folder)
    await asyncio.sleep(AFTER_ANSWER)


class Show:
    """Shows a recording while it is made: a live timeline in a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = console.is_terminal and not console.is_dumb_terminal
        encoding = (console.encoding or "ascii").lower()
        self.glyphs = Glyphs() if encoding.startswith("utf") else ASCII

    @contextmanager
    def watch(self, record: Recording) -> Iterator[None]:
        """Show the recording until the block ends; in a log, tell its story then."""
        title = Text(record.title, style="bold")
        if not self.live:
            self.console.print(Rule(title, characters=self.glyphs.rule))
        with Eyes(record) as eyes:
            if self.live:
                with Live(
                    get_renderable=lambda: Group(title, *self._lines(record)),
                    console=self.console,
                    refresh_per_second=15,
                    transient=True,
                ):
                    yield
            else:
                yield
            eyes.look()
        record.finish()
        if not self.live:
            for at, words in sorted(story(record)):
                self.console.print(f"{at:6.2f} s  {words}", highlight=False, soft_wrap=True)
            self.console.print()

    def final(self, record: Recording, window: tuple[float, float]) -> None:
        """Print the finished timeline, in the same scale as its neighbour."""
        if self.live:
            self.console.print(Text(record.title, style="bold"))
        else:
            self.console.print(record.title)
        for line in self._lines(record, window):
            line.rstrip()
            self.console.print(line, no_wrap=True, overflow="ellipsis", highlight=False)
        self.console.print(Text(f"{' ' * 25}{self.glyphs.legend}", style="dim"), no_wrap=True)
        self.console.print()

    def _lines(self, record: Recording, window: tuple[float, float] | None = None) -> list[Text]:
        width = min(self.console.width, 118)
        return timeline(record, width=width, glyphs=self.glyphs, window=window)


def story(record: Recording) -> list[tuple[float, str]]:
    """Return what happened as (time, words), for a log."""
    lines: list[tuple[float, str]] = []
    for lane in record.lanes:
        name = f"command {lane.number} ({lane.title})"
        if lane.began is not None:
            lines.append((lane.began, f"{name}: running"))
        lines += [(at, f"{name}: {SIGNAL_WORDS[signal]} sent") for at, signal in lane.signals]
        if lane.gone is not None:
            saved = {True: ", its work saved", False: ", its work lost", None: ""}[lane.saved]
            lines.append((lane.gone, f"{name}: gone{saved}"))
        elif lane.running:
            pids = ", ".join(str(seen.process.pid) for seen in lane.running)
            lines.append((record.now(), f"{name}: STILL RUNNING (pid {pids})"))
    if record.stop is not None:
        lines.append((record.stop, "Stop pressed"))
    for since, until in record.sweeps:
        lines.append((since, "sweep: started in the sandbox"))
        lines.append((until, "sweep: reported"))
    if record.answered is not None:
        words = "PROVED: nothing of the turn is running" if record.proved else "everything closed"
        lines.append((record.answered, words))
    return lines


def proof_table(receipt: QuiescenceReceipt, left: int) -> Table:
    """Return what the receipt says, and what this program saw for itself."""
    table = Table(title="The proof (receipt)", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("turn", f"{receipt.turn_id[:8]}..., {receipt.reason}")
    table.add_row(
        "proved", f"{'yes' if receipt.proven else 'NO'}, {receipt.elapsed_ms} ms after Stop"
    )
    for box in receipt.sandboxes:
        table.add_row("sandbox", box.provider)
        table.add_row("containment", f"{box.containment}, snapshot {box.snapshot}")
        table.add_row("control runs", f"{box.control_runs} ({box.scans} scans)")
        last = [(p.last_signal or "").removeprefix("SIG") for p in box.stopped]
        words = {"INT": "on Ctrl-C", "TERM": "on TERM", "KILL": "by KILL", "": "by themselves"}
        ways = [f"{last.count(name)} {word}" for name, word in words.items() if name in last]
        table.add_row("processes", f"{len(last)} ended: {', '.join(ways) or 'none'}")
    counts = receipt.operations
    table.add_row(
        "tool calls",
        f"{counts.admitted} admitted, {counts.settled} settled, {counts.rejected} refused",
    )
    table.add_row("seen in /proc", f"{left} processes left (by this program, not by the fence)")
    return table


def plural(count: int, one: str, many: str) -> str:
    """Return `1 process`, `2 processes`."""
    return f"{count} {one if count == 1 else many}"


def verdict(fenced: Recording, alone: Recording) -> tuple[bool, str]:
    """Return whether the demo shows what it is there to show, and one line that says it."""
    total = len(fenced.lanes)
    left_lanes = sum(bool(lane.running) for lane in fenced.lanes)
    alone_lanes = sum(bool(lane.running) for lane in alone.lanes)
    took = (fenced.answered or 0.0) - (fenced.stop or 0.0)
    proof = f"proved in {took:.1f} s" if fenced.proved else "NOT PROVED"
    words = (
        f"With the fence: {left_lanes} of {total} commands left anything running ({proof}). "
        f"SDK alone: {alone_lanes} of {total} did; "
        f"{plural(len(alone.survivors), 'process', 'processes')} survived Stop."
    )
    return fenced.proved and left_lanes == 0 and alone_lanes > 0, words


async def run_both(
    show: Show, folder: Path, records: list[Recording]
) -> tuple[Recording, Recording, QuiescenceReceipt]:
    """Run the turn with the fence and then with the SDK alone; each recording joins `records`.

    Raises:
        QuiescenceTimeout: the fence could not prove that its turn is quiet.
    """
    try:
        fenced = Recording("With the fence", "fence: sweep, proof", lanes(folder))
        records.append(fenced)
        with show.watch(fenced):
            receipt = await with_fence(fenced, folder)
        alone = Recording("The same turn, SDK alone", "SDK: cancel, close", lanes(folder))
        records.append(alone)
        with show.watch(alone):
            await with_sdk_alone(alone, folder)
        return fenced, alone, receipt
    finally:
        # Ended while the loop runs, so that the SDK's transports see their pipes close.
        end_all(records)
        await asyncio.sleep(0.1)


def end_all(records: list[Recording]) -> None:
    """End what is left of these turns, by pid and start time."""
    procs.end(process for r in records for lane in r.lanes for process in procs.find(lane.token))


def demo(show: Show, svg: Path | None, receipt_file: Path | None) -> bool:
    """Run both turns, show them, and say whether the result is the expected one.

    Whatever survived is ended by pid and start time, also after an error.
    """
    show.console.print(
        f"An agent turn starts {len(COMMANDS)} commands in a sandbox on this machine. "
        "Then somebody presses Stop.\n",
        highlight=False,
    )
    folder = Path(tempfile.mkdtemp(prefix="turnfence-demo-"))
    records: list[Recording] = []
    try:
        fenced, alone, receipt = asyncio.run(run_both(show, folder, records))
    finally:
        end_all(records)
        shutil.rmtree(folder)

    window = common_window(fenced, alone)
    show.final(fenced, window)
    show.console.print(proof_table(receipt, len(fenced.survivors)))
    show.console.print()
    show.final(alone, window)
    if alone.survivors:
        ended = plural(len(alone.survivors), "survivor", "survivors")
        show.console.print(f"(The demo has ended the {ended} by pid and start time.)\n")
    if svg is not None:
        svg.write_text(draw(fenced, alone), encoding="utf-8")
    if receipt_file is not None:
        receipt_file.write_text(receipt.to_json(indent=2) + "\n", encoding="utf-8")
    good, words = verdict(fenced, alone)
    show.console.print(
        Text(words, style="bold green" if good else "bold red"), soft_wrap=not show.live
    )
    return good


def main() -> int:
    """Read the arguments, run the demo, and return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the timelines as SVG")
    parser.add_argument("--receipt", type=Path, metavar="FILE", help="also write the receipt")
    arguments = parser.parse_args()
    # In a pipe or a log: plain text of a width that fits most of them.
    piped = not sys.stdout.isatty()
    console = Console(
        width=100 if piped else None,
        force_terminal=False if piped else None,
        color_system=None if piped else "auto",
    )
    try:
        return 0 if demo(Show(console), arguments.svg, arguments.receipt) else 1
    except (FenceError, RuntimeError) as error:
        console.print(f"The demo failed: {error}", style="bold red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
