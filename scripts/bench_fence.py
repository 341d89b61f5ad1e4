"""Ratios, side by side in one run: the cost of a start through the fence, and of a stop.

A figure alone says more about the machine than about the fence; compare the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient
from agents.sandbox.session import SandboxSession
from rich.console import Console
from rich.table import Table

from fence import TurnFence

KINDS = {
    "obeys Ctrl-C": "exec sleep 300",
    "ignores INT": "trap '' INT; sleep 300",
    "ignores INT and TERM": "trap '' INT TERM; sleep 300; :",
}


async def start(session: SandboxSession, text: str, *, tty: bool = False) -> None:
    """Run one command to its end."""
    update = await session.pty_exec_start(text, tty=tty, yield_time_s=10)
    assert update.exit_code == 0, update


async def timed(call: Callable[[], Awaitable[object]]) -> float:
    """Return how many ms a call took."""
    begun = time.perf_counter()
    await call()
    return (time.perf_counter() - begun) * 1000


async def side_by_side(
    plain: SandboxSession, fenced: SandboxSession, text: str, rounds: int, *, tty: bool = False
) -> tuple[float, float, float]:
    """Return the medians, in ms, and the ratio; they take turns, so both see the same machine."""
    a: list[float] = []
    b: list[float] = []
    for _ in range(rounds):
        a.append(await timed(lambda: start(plain, text, tty=tty)))
        b.append(await timed(lambda: start(fenced, text, tty=tty)))
    one, other = statistics.median(a), statistics.median(b)
    return one, other, other / one


async def stop(client: UnixLocalSandboxClient, text: str, count: int) -> tuple[float, int]:
    """Return ms from cancel() to the receipt, and how many control runs the drain made."""
    session = await client.create()
    try:
        await session.start()
        fence = TurnFence()
        fenced = fence.wrap_session(session)
        await asyncio.gather(
            *(fenced.pty_exec_start(text, tty=False, yield_time_s=0.25) for _ in range(count))
        )
        begun = time.perf_counter()
        fence.cancel("bench")
        receipt = await fence.wait_for_quiescence()
        took = (time.perf_counter() - begun) * 1000
        assert receipt.proven
        return took, sum(box.control_runs for box in receipt.sandboxes)
    finally:
        await session.aclose()
        await client.delete(session)


async def measure(rounds: int, console: Console) -> dict[str, object]:
    """Measure everything, print the tables, and return the figures."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(64))
    client = UnixLocalSandboxClient()
    plain = await client.create()

    async def floor() -> None:
        words = ("sh", "-c", 'exec "$@"', "sh", "sh", "-c", "true")
        update = await plain.pty_exec_start(*words, shell=False, tty=False, yield_time_s=10)
        assert update.exit_code == 0, update

    result: dict[str, object] = {"cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    starts: dict[str, dict[str, float]] = {}
    table = Table("start", "SDK alone, ms", "fenced, ms", "ratio", title="Starting a command")
    async with plain, TurnFence() as fence:
        fenced = fence.wrap_session(plain)
        await start(fenced, "true")  # the prepare run is once per turn and sandbox
        for name, text, tty, n in (
            ("true, pipe", "true", False, rounds),
            ("true, PTY", "true", True, rounds // 2),
            ("100 ms, pipe", "sleep 0.1", False, max(5, rounds // 5)),
        ):
            with console.status(f"starting: {name}"):
                a, b, ratio = await side_by_side(plain, fenced, text, n, tty=tty)
            starts[name] = {"sdk_ms": a, "fenced_ms": b, "ratio": ratio, "rounds": n}
            table.add_row(name, f"{a:.2f}", f"{b:.2f}", f"{ratio:.2f}")
        # What any preamble costs: one more exec of a shell that does nothing.
        bare = statistics.median([await timed(floor) for _ in range(rounds)])
        alone = starts["true, pipe"]["sdk_ms"]
        starts["floor: one more exec"] = {"ms": bare, "ratio": bare / alone}
        table.add_row(
            "floor: one more exec",
            f"{alone:.2f}",
            f"{bare:.2f}",
            f"{bare / alone:.2f}",
            style="dim",
        )
    await client.delete(plain)
    console.print(table)
    result["start"] = starts
    stops: dict[str, object] = {}
    table = Table(
        "commands", "n", "ms to proof", "per command", "control runs", title="Cancel to receipt"
    )
    for name, text in KINDS.items():
        for count in (1, 8, 60):
            with console.status(f"stopping: {count} x {name}"):
                runs = [await stop(client, text, count) for _ in range(3)]
            gc.collect()
            took = statistics.median(ms for ms, _ in runs)
            controls = max(n for _, n in runs)
            stops[f"{name} x {count}"] = {"ms": took, "control_runs": controls}
            table.add_row(name, str(count), f"{took:.0f}", f"{took / count:.1f}", str(controls))
    console.print(table)
    result["stop"] = stops
    return result


def main() -> None:
    """Read the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="starts of each kind (default 60)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    args = parser.parse_args()
    result = asyncio.run(measure(args.rounds, Console()))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
