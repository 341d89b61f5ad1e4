"""Who is the turn's: two turns in one sandbox, nested fences, and markers that lie.

The bystanders are canaries: each reports every signal that reaches it, and who sent it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fence import EscalationPolicy, QuiescenceTimeout, TurnCancelled, TurnFence
from fence.errors import InvalidReport
from fence.lineage.marks import brand
from tests.attack._bare import Bare
from tests.battery._tools import Tools, assert_proven, run, unix_local, until
from tests.support import procs

# Two turn keys that share all but the last digit, and with that their brands.
TWINS = ("a" * 31 + "1", "a" * 31 + "2")


def _sleeps(token: str) -> list[procs.Process]:
    return [process for process in procs.find(token) if process.name == "sleep"]


def _start(fence: TurnFence, session: object, token: str) -> asyncio.Task[str]:
    tools = Tools(session, fence)  # type: ignore[arg-type]
    command = f"setsid sleep {token} & (env -i setsid sleep {token} &); wait"
    return asyncio.ensure_future(tools.exec_command(command, yield_time_ms=60_000))


def test_cancelling_one_turn_leaves_the_other_in_the_same_sandbox() -> None:
    mine, other = procs.new_token(), procs.new_token()

    async def main() -> None:
        async with unix_local() as session, TurnFence() as second:
            first = TurnFence()
            calls = [_start(first, session, mine), _start(second, session, other)]
            await until(lambda: len(_sleeps(mine)) == len(_sleeps(other)) == 2, "both turns")
            before = {(p.pid, p.start) for p in _sleeps(other)}
            assert_proven(await first.wait_for_quiescence())
            assert procs.find(mine) == []
            assert {(p.pid, p.start) for p in _sleeps(other)} == before
            assert not second.cancelled
            assert_proven(await second.wait_for_quiescence())
            assert procs.find(other) == []
            await asyncio.gather(*calls, return_exceptions=True)

    run(main)


def test_turn_ids_that_share_a_prefix(turn_id: str) -> None:
    """`attempt-1` and `attempt-11`: nothing is matched by its beginning alone."""
    mine, other = procs.new_token(), procs.new_token()

    async def main() -> None:
        async with (
            unix_local() as session,
            TurnFence(turn_id=f"{turn_id}-1") as short,
            TurnFence(turn_id=f"{turn_id}-11") as long,
        ):
            calls = [_start(short, session, mine), _start(long, session, other)]
            await until(lambda: len(_sleeps(mine)) == len(_sleeps(other)) == 2, "both turns")
            before = {(p.pid, p.start) for p in _sleeps(other)}
            assert_proven(await short.wait_for_quiescence())
            assert procs.find(mine) == []
            assert {(p.pid, p.start) for p in _sleeps(other)} == before
            assert_proven(await long.wait_for_quiescence())
            await asyncio.gather(*calls, return_exceptions=True)

    run(main)


def test_two_turns_with_the_same_brands_are_told_apart_or_refused() -> None:
    """One chance in 16 million: what names only the other turn is not signalled."""
    mine, other = procs.new_token(), procs.new_token()

    async def main() -> None:
        async with unix_local() as session:
            quick = EscalationPolicy(sweep=1.2, deadline=1.3)
            first, second = (TurnFence(turn_id=turn, policy=quick) for turn in TWINS)
            assert brand(first.turn, 1) == brand(second.turn, 1)
            # The other one keeps its environment: it says whose it is.
            tools = Tools(session, second)
            call = asyncio.ensure_future(tools.exec_command(f"setsid sleep {other} & wait"))
            calls = [_start(first, session, mine), call]
            await until(lambda: len(_sleeps(mine)) == 2 and len(_sleeps(other)) == 1, "both turns")
            before = {(p.pid, p.start) for p in _sleeps(other)}
            with pytest.raises(QuiescenceTimeout) as caught:
                await first.wait_for_quiescence()
            receipt = caught.value.partial
            assert {(p.pid, p.start) for p in _sleeps(other)} == before
            signalled = {p.pid for box in receipt.sandboxes for p in box.stopped if p.signals}
            assert signalled.isdisjoint({pid for pid, _ in before})
            assert_proven(await second.wait_for_quiescence())
            assert procs.find(other) == []
            assert_proven(await first.wait_for_quiescence())
            assert procs.find(mine) == []
            await asyncio.gather(*calls, return_exceptions=True)

    run(main)


def test_a_fence_inside_a_fence() -> None:
    """The inner cancel leaves the outer turn; the outer cancel takes the inner turn along."""
    inner_token, outer_token = procs.new_token(), procs.new_token()

    async def main() -> None:
        async with unix_local() as session:
            outer = TurnFence()
            around = outer.wrap_session(session)
            one, two = TurnFence(), TurnFence()
            calls = [
                _start(outer, session, outer_token),
                _start(one, around, inner_token),
            ]
            await until(
                lambda: len(_sleeps(inner_token)) == len(_sleeps(outer_token)) == 2, "both turns"
            )
            before = {(p.pid, p.start) for p in _sleeps(outer_token)}
            receipt = await one.wait_for_quiescence()
            assert receipt.proven
            assert {(p.pid, p.start) for p in _sleeps(outer_token)} == before
            # An inherited brand is no evidence for the inner turn, and the receipt says so.
            assert receipt.containment == "lineage-unbranded"
            kept = [p for p in _sleeps(inner_token) if procs.environ(p.pid)]
            assert kept == []

            again = procs.new_token()
            calls.append(_start(two, around, again))
            await until(lambda: len(_sleeps(again)) == 2, "the second inner turn")
            assert_proven(await outer.wait_for_quiescence())
            for token in (again, outer_token, inner_token):
                assert procs.find(token) == []
            with pytest.raises(TurnCancelled):
                await Tools(around, two).exec_command("true")
            assert (await two.wait_for_quiescence()).proven
            await asyncio.gather(*calls, return_exceptions=True)

    run(main)


# Markers that lie


@contextmanager
def forged(turn: str, text: bytes, *, uid: int = 0, name: str = "7") -> Iterator[Path]:
    """A marker that somebody else wrote for this turn."""
    directory = Path("/tmp/.fence") / str(uid) / turn
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    os.chown(directory.parent, uid, uid)
    os.chown(directory, uid, uid)
    marker = directory / name
    marker.write_bytes(text)
    os.chown(marker, uid, uid)
    try:
        yield marker
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _space() -> str:
    return "i" + str(Path("/proc/self/ns/pid").readlink()).split("[")[1].rstrip("]")


LIES = {
    "pid-reused": "fence1 {pid} {start_before} {boot} {space} -\nrun\n",
    "other-boot": "fence1 {pid} {start} 00000000-0000-0000-0000-000000000000 {space} -\nrun\n",
    "other-namespace": "fence1 {pid} {start} {boot} i4026531999 -\nrun\n",
    "foreign-brand": "fence1 {pid} {start} {boot} {space} {brand}\nrun\n",
    "older-protocol": "fence0 {pid} {start} {boot} {space} -\nrun\n",
    "pid-0": "fence1 0 {start} {boot} {space} -\nrun\n",
    "pid-1": "fence1 1 {start_of_1} {boot} {space} -\nrun\n",
    "pid-minus-1": "fence1 -1 {start} {boot} {space} -\nrun\n",
    "pid-minus": "fence1 -{pid} {start} {boot} {space} -\nrun\n",
    "pid-octal": "fence1 0{pid} {start} {boot} {space} -\nrun\n",
    "pid-many": "fence1 {pid},{pid} {start} {boot} {space} -\nrun\n",
    "pid-glob": "fence1 * * {boot} {space} -\nrun\n",
    "pid-shell": "fence1 $({pid}) `{pid}` {boot} {space} -\nrun\n",
    "empty": "",
    "huge": "fence1 {pid} {start} {boot} {space} - " + "x" * 4_000_000 + "\nrun\n",
    "binary": "\x00\x01\x02fence1 {pid}\x00 {start} {boot} {space} -\x00\nrun\n\x00",
    "no-newline": "fence1 {pid} {start}",
    "many-lines": "fence1 {pid} {start} {boot} {space} -\n" * 1000,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_marker_that_lies_signals_nobody(lie: str, turn_id: str) -> None:
    """The sweep says clear or could not tell; it never signals whom the marker names."""
    with procs.canary() as canary:
        facts = {
            "pid": canary.pid,
            "start": canary.start,
            "start_before": canary.start - 1,
            "start_of_1": getattr(procs.read(1), "start", 0),
            "boot": _boot(),
            "space": _space(),
            "brand": brand(turn_id, 7),
        }
        bare = Bare(turn=turn_id)
        bare.prepare()
        with forged(turn_id, LIES[lie].format(**facts).encode("latin-1")):
            report = bare.sweep()
        assert report.verdict in ("clear", "unknown"), report
        assert all(not process.signals for process in report.processes), report
        canary.assert_untouched()
    assert bare.sweep().verdict == "clear"


def test_the_control_a_marker_that_tells_the_truth_is_believed(turn_id: str) -> None:
    """Otherwise the test above would pass because markers are never read."""
    bare = Bare(turn=turn_id, branded=False)
    token = procs.new_token()
    # No brand, no environment, and its own session: only its marker names it.
    child = bare.start(f"exec env -i sleep {token}")
    procs.wait_until(lambda: _sleeps(token) != [], 20, "the sleep")
    report = bare.sweep()
    assert report.verdict == "clear"
    assert procs.find(token) == []
    assert child.wait(20) != 0
    assert [p.evidence for p in report.processes if p.pid == child.pid] == ["marker"]


def test_another_users_process_is_not_named_by_my_marker(turn_id: str) -> None:
    """Control as root, marker of uid 65534: it can point only at what is that uid's already."""
    with procs.canary() as canary:
        bare = Bare(turn=turn_id)
        bare.prepare()
        text = f"fence1 {canary.pid} {canary.start} {_boot()} {_space()} -\nrun\n"
        with forged(turn_id, text.encode(), uid=65534):
            report = bare.sweep()
        assert all(not process.signals for process in report.processes), report
        assert report.verdict in ("clear", "unknown")


def test_a_mark_of_another_turn_in_the_environment_is_not_ours(turn_id: str) -> None:
    other = turn_id[:-1] + ("0" if turn_id[-1] != "0" else "1")
    neighbours = (
        {"FENCE_LINEAGE": f":{other}.1."},
        {"FENCE_LINEAGE": f":{turn_id}"},
        {"FENCE_LINEAGE": f":{turn_id[1:]}.1."},
        {"SOMETHING": turn_id},
    )
    for environment in neighbours:
        with procs.canary(env=environment):
            report = Bare(turn=turn_id).sweep()
            assert report.verdict == "clear"
            assert report.processes == ()


def test_without_prefix_checks_this_would_be_ours(turn_id: str) -> None:
    """The control: the same bystander with this very turn's mark is stopped."""
    bare = Bare(turn=turn_id)
    child = bare.start(f"exec sleep {procs.new_token()}")
    report = bare.sweep()
    assert [p.pid for p in report.processes] == [child.pid]
    assert child.wait(20) != 0


@pytest.mark.parametrize("kind", ["symlink", "directory", "fifo"])
def test_a_tombstone_that_is_something_else(kind: str, turn_id: str, tmp_path: Path) -> None:
    """A hostile command put something where the tombstone belongs: refused starts stay refused."""
    bare = Bare(turn=turn_id)
    directory = Path(bare.prepare().directory)
    stone = directory / f"{turn_id}.cancelled"
    target = tmp_path / "target"
    target.write_text("untouched")
    if kind == "symlink":
        stone.symlink_to(target)
    elif kind == "directory":
        stone.mkdir()
    else:
        os.mkfifo(stone)
    try:
        try:
            assert bare.sweep().verdict in ("clear", "unknown")
        except InvalidReport as error:
            pytest.fail(f"the sweep hung or broke: {error}")
        assert bare.start("true").wait(20) == 130
        assert target.read_text() == "untouched"
    finally:
        if stone.is_symlink() or stone.is_fifo() or stone.is_file():
            stone.unlink()
        elif stone.is_dir():
            stone.rmdir()
        shutil.rmtree(directory / "0" / turn_id, ignore_errors=True)
