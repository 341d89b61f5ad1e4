"""A worker for tests that look from outside: starts commands of one turn, stops it, reports.

Arguments: KIND COUNT TTY CANCELS. KIND is `fenced`, `unfenced` or `abandoned` (started, then waits
to be killed). TOKEN, which must not be in its own argv, and TURN_ID come by the environment. Prints
one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from fence import TurnFence
from tests.battery._tools import Tools, run, unix_local, until
from tests.support import procs

# One that obeys, one that left the session, one that is deaf, one whose orphan has no environment.
NASTY = (
    "sleep {0}",
    "setsid sleep {0} & wait",
    "trap '' INT TERM; while :; do sleep {0}; done",
    "(env -i setsid sleep {0} &) ; sleep {0}",
)
SLEEPS = (1, 1, 1, 2)


async def main(kind: str, token: str, count: int, tty: bool, cancels: int) -> None:
    commands = [NASTY[n % len(NASTY)].format(token) for n in range(count)]
    wanted = sum(SLEEPS[n % len(NASTY)] for n in range(count))
    async with unix_local() as session:
        fence = None if kind == "unfenced" else TurnFence(turn_id=os.environ.get("TURN_ID"))
        tools = Tools(session, fence)
        calls = [
            asyncio.ensure_future(tools.exec_command(command, tty=tty, yield_time_ms=60_000))
            for command in commands
        ]
        await until(
            lambda: sum(p.name == "sleep" for p in procs.find(token)) == wanted,
            f"{wanted} processes to be up",
        )
        if kind == "abandoned":
            print("up", flush=True)
            await asyncio.Event().wait()
        if fence is None:
            for call in calls:
                call.cancel()
            # Bounded: now and then the SDK waits here for pipes that a survivor holds.
            ending = asyncio.ensure_future(session.pty_terminate_all())
            await asyncio.wait({*calls, ending}, timeout=5)
            print(json.dumps({"wanted": wanted}), flush=True)
            os._exit(0)
        for n in range(cancels):
            fence.cancel(f"stop {n}")
        receipts = await asyncio.gather(*(fence.wait_for_quiescence() for _ in range(cancels)))
        left = [str(process) for process in procs.find(token)]
        ended = await asyncio.gather(*calls, return_exceptions=True)
        answer = {
            "left": left,
            "ended": sorted({type(one).__name__ for one in ended}),
            "receipt": json.loads(receipts[0].to_json()),
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _, kind, count, tty, cancels = sys.argv
    run(lambda: main(kind, os.environ["TOKEN"], int(count), tty == "tty", int(cancels)))
