"""Runs in a pid namespace with few numbers: a chain wraps around while its turn is swept.

Arguments: DIRECTORY ROUNDS. Prints one line a round: verdict, snapshot, beats before and after.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from tests.attack._bare import Bare
from tests.attack._programs import CHAIN, assert_silent, ended_at_last, new_program
from tests.battery._tools import until

PID_MAX = 1000


async def main(directory: Path, rounds: int) -> None:
    for number in range(rounds):
        bare = Bare()
        # A bystander whose number will come up again and again as a neighbour of the chain's.
        with (
            subprocess.Popen(["sleep", "600"], start_new_session=True) as bystander,
            ended_at_last(new_program(CHAIN, directory, 0.0)) as program,
        ):
            bare.start(program.command(scrubbed=bool(number % 2)))
            await until(lambda: program.beats() > 2 * PID_MAX, "the numbers to wrap around twice")
            report = bare.sweep()
            before = program.beats()
            await assert_silent([program], beats=2 * PID_MAX)
            assert bystander.poll() is None
            bystander.kill()
            Path("/tmp/.fence", f"{bare.turn}.cancelled").unlink()
            print(report.verdict, report.snapshot, before, program.beats(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
