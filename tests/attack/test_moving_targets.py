"""Targets that move while they are being stopped: chains, crowds, and leaders that look dead."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from fence import QuiescenceReceipt, TurnFence
from tests.attack import _programs
from tests.attack._programs import Program, assert_silent, ended_at_last, new_program
from tests.battery._tools import Tools, assert_proven, catches_term, run, unix_local, until
from tests.support import procs

ROUNDS = [pytest.param(1, id="1-round"), pytest.param(20, id="20-rounds", marks=pytest.mark.slow)]
SCRUBBED = [pytest.param(False, id="environ-kept"), pytest.param(True, id="environ-scrubbed")]


async def stopped(programs: list[Program], *, scrubbed: bool, beats: int = 5) -> QuiescenceReceipt:
    """Start the programs in one turn, wait until each beats, and stop the turn."""
    async with unix_local() as session, TurnFence() as fence:
        tools = Tools(session, fence)
        commands = [program.command(scrubbed=scrubbed) for program in programs]
        await asyncio.gather(*(tools.exec_command(command) for command in commands))
        for program in programs:
            await until(lambda one=program: one.beats() >= beats, "the program to beat")  # type: ignore[misc]
        fence.cancel("stop")
        return await fence.wait_for_quiescence()


def rounds_of(text: str, delay: float, *, scrubbed: bool, rounds: int, directory: Path) -> None:
    async def main() -> None:
        for _ in range(rounds):
            with ended_at_last(new_program(text, directory, delay)) as program:
                receipt = await stopped([program], scrubbed=scrubbed)
                assert_proven(receipt)
                await assert_silent([program])
                for sandbox in receipt.sandboxes:
                    # Whoever came and went unseen is counted, and then the receipt says sampled.
                    assert sandbox.snapshot == "sampled" or sandbox.unseen == 0, sandbox

    with procs.canary():
        run(main)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("scrubbed", SCRUBBED)
@pytest.mark.parametrize("delay", [0.02, 0.005, 0.001, 0.0])
@pytest.mark.timeout(240)
def test_chain(delay: float, scrubbed: bool, rounds: int, tmp_path: Path) -> None:
    rounds_of(_programs.CHAIN, delay, scrubbed=scrubbed, rounds=rounds, directory=tmp_path)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("scrubbed", SCRUBBED)
@pytest.mark.timeout(240)
def test_crowd_in_which_each_forks(scrubbed: bool, rounds: int, tmp_path: Path) -> None:
    rounds_of(_programs.CROWD, 0.02, scrubbed=scrubbed, rounds=rounds, directory=tmp_path)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("scrubbed", SCRUBBED)
@pytest.mark.timeout(240)
def test_zombie_leader_with_a_live_thread(scrubbed: bool, rounds: int, tmp_path: Path) -> None:
    rounds_of(_programs.HEADLESS, 0.01, scrubbed=scrubbed, rounds=rounds, directory=tmp_path)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("scrubbed", SCRUBBED)
@pytest.mark.timeout(240)
def test_name_that_forges_the_state(scrubbed: bool, rounds: int, tmp_path: Path) -> None:
    rounds_of(_programs.MISNAMED, 0.01, scrubbed=scrubbed, rounds=rounds, directory=tmp_path)


def test_the_headless_one_looks_dead_to_a_naive_look(tmp_path: Path) -> None:
    """The control of the test above: state Z, no argv to find it by, and yet it writes."""

    async def main() -> None:
        with ended_at_last(new_program(_programs.HEADLESS, tmp_path, 0.01)) as program:
            async with unix_local() as session:
                start = program.command(scrubbed=False) + " echo $!"
                answer = await Tools(session, None).exec_command(start)
                pid = int(re.findall(r"\d+", answer)[-1])
                stat = Path(f"/proc/{pid}/stat")
                await until(lambda: ") Z " in stat.read_text(), "the main thread to end")
                assert procs.find(program.token) == []
                now = program.beats()
                await until(lambda: program.beats() > now + 5, "the other thread to go on")
                program.stop.touch()
                await until(lambda: procs.read(pid) is None or not _beats(pid), "its end")

    def _beats(pid: int) -> bool:
        process = procs.read(pid)
        return process is not None and procs.alive(pid, process.start)

    run(main)


@pytest.mark.parametrize(
    ("text", "delay"),
    [
        pytest.param(_programs.CHAIN, 0.005, id="chain"),
        pytest.param(_programs.CROWD, 0.02, id="crowd"),
        pytest.param(_programs.HEADLESS, 0.01, id="headless"),
        pytest.param(_programs.MISNAMED, 0.01, id="misnamed"),
    ],
)
def test_without_the_fence_it_goes_on(text: str, delay: float, tmp_path: Path) -> None:
    async def main() -> None:
        with ended_at_last(new_program(text, tmp_path, delay)) as program:
            async with unix_local() as session:
                await Tools(session, None).exec_command(program.command(scrubbed=False))
                await until(lambda: program.beats() >= 5, "the program to beat")
                await session.pty_terminate_all()
            now = program.beats()
            await until(lambda: program.beats() > now + 5, "the survivor to go on")

    run(main)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.timeout(120)
def test_child_forked_300_ms_after_term(rounds: int) -> None:
    """The child is younger than every scan that came before its parent's end."""

    async def main() -> None:
        for _ in range(rounds):
            token = procs.new_token()
            late = f"trap '' INT; trap 'sleep 0.3; setsid sleep {token} & exit 0' TERM"
            command = f"{late}; while :; do sleep 0.05; done"
            async with unix_local() as session, TurnFence() as fence:
                call = asyncio.ensure_future(Tools(session, fence).exec_command(command))
                await until(lambda token=token: _traps_term(token), "the trap to be set")  # type: ignore[misc]
                receipt = await fence.wait_for_quiescence()
                assert procs.find(token) == []
                assert_proven(receipt)
                await asyncio.gather(call, return_exceptions=True)

    run(main)


def _traps_term(token: str) -> bool:
    return any(catches_term(process) for process in procs.find(token))
