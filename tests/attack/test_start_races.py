"""A cancel that meets a start: at any moment of it, and where the provider stalls or forgets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from agents.sandbox.errors import ExecTransportError
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxSession

from fence import EscalationPolicy, TurnCancelled, TurnFence, quiesce_turn
from tests.battery._tools import PATIENCE, Tools, assert_proven, run, unix_local, until
from tests.support import leaks, procs

FIRST = 0.04
"""The part of a start in which the cancels fall, in seconds."""


def remove_litter(turns: Iterable[str]) -> None:
    """Remove what a late prepare run or a late, refused start leaves until the weekly clean-up."""
    for turn in turns:
        # A prepare run whose turn was cancelled meanwhile is not waited for.
        procs.wait_until(lambda turn=turn: procs.find(turn) == [], PATIENCE, "control runs to end")  # type: ignore[misc]
        for directory in Path("/tmp/.fence").glob(f"[0-9]*/{turn}"):
            for marker in directory.iterdir():
                assert marker.name == "probe" or marker.read_text().split()[-1] == "refused"
            shutil.rmtree(directory)


def _nasty(token: str, sign: Path) -> str:
    return f"echo ran >> {sign}; setsid sleep {token} & (env -i setsid sleep {token} &); wait"


@pytest.mark.parametrize(
    "cancels", [pytest.param(60, id="60"), pytest.param(500, id="500", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("tty", [pytest.param(False, id="pipe"), pytest.param(True, id="pty")])
@pytest.mark.timeout(300)
def test_cancel_at_a_random_moment_of_the_start(cancels: int, tty: bool, tmp_path: Path) -> None:
    """A fifth of them in the same tick; half of them lose their caller as well."""
    chance = random.Random(20)
    turns: list[str] = []

    async def one(tools_of: Callable[[TurnFence], Tools], number: int) -> None:
        token, sign = procs.new_token(), tmp_path / f"sign-{number}"
        delay = 0.0 if chance.random() < 0.2 else chance.random() * FIRST
        lose_caller = chance.random() < 0.5
        async with TurnFence() as fence:
            call = asyncio.ensure_future(
                tools_of(fence).exec_command(_nasty(token, sign), tty=tty, yield_time_ms=30_000)
            )
            if delay:
                await asyncio.sleep(delay)
            if lose_caller:
                call.cancel()
            fence.cancel("stop")
            receipt = await fence.wait_for_quiescence()
            left = [str(process) for process in procs.find(token)]
            assert left == [], (number, delay, left)
            wrote = sign.exists()
            assert receipt.proven, receipt
            # A command whose marker nobody saw may have had no brand: then the receipt says so.
            unseen = any(command.pid is None for command in receipt.commands)
            weaker = {None, "lineage-unbranded"} if unseen or not receipt.commands else set()
            assert receipt.containment in {"lineage"} | weaker, receipt
            (end,) = await asyncio.gather(call, return_exceptions=True)
            assert isinstance(end, TurnCancelled | asyncio.CancelledError), end
            assert sign.exists() == wrote
        turns.append(fence.turn)

    async def main() -> None:
        async with unix_local() as session:
            numbers = iter(range(cancels))

            async def worker() -> None:
                for number in numbers:
                    await one(lambda fence: Tools(session, fence), number)

            await asyncio.gather(*(worker() for _ in range(4)))
            signs = {path: path.read_text() for path in tmp_path.iterdir()}
            assert set(signs.values()) <= {"ran\n"}

    with procs.canary():
        run(main)
    remove_litter(turns)


def test_without_the_fence_a_random_moment_leaves_processes(tmp_path: Path) -> None:
    chance = random.Random(20)

    async def main() -> int:
        tokens: list[str] = []
        try:
            async with unix_local() as session:
                tools = Tools(session, None)
                for number in range(20):
                    tokens.append(procs.new_token())
                    call = asyncio.ensure_future(
                        tools.exec_command(_nasty(tokens[-1], tmp_path / f"sign-{number}"))
                    )
                    await asyncio.sleep(FIRST * (1 + chance.random()))
                    call.cancel()
                    await asyncio.gather(call, return_exceptions=True)
                await session.pty_terminate_all()
                await asyncio.sleep(0.5)
            return sum(procs.find(token) != [] for token in tokens)
        finally:
            for token in tokens:
                procs.end(procs.find(token))

    assert run(main) >= 10, "the negative control no longer shows what the fence is for"


class Stall:
    """Holds every pty_exec_start of UnixLocal at one place until `release` is set."""

    def __init__(self) -> None:
        self.where = ""
        self.reached = asyncio.Event()
        self.release = asyncio.Event()


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Stall:
    state = Stall()
    original: Any = UnixLocalSandboxSession.pty_exec_start

    async def stalled(self: UnixLocalSandboxSession, *command: Any, **options: Any) -> Any:
        if state.where == "before-spawn":
            state.reached.set()
            await state.release.wait()
        if state.where == "reply-lost":
            await original(self, *command, **{**options, "yield_time_s": 0.25})
            state.reached.set()
            raise ExecTransportError(command=("sh",), context={"reason": "reply lost"})
        update = await original(self, *command, **options)
        if state.where == "after-spawn":
            state.reached.set()
            await state.release.wait()
        return update

    monkeypatch.setattr(UnixLocalSandboxSession, "pty_exec_start", stalled)
    return state


SHORT = EscalationPolicy(call_grace=0.1)


@pytest.mark.parametrize("patient", [True, False], ids=["passes-cancel-on", "swallows-cancel"])
def test_start_stalled_before_the_spawn_finds_the_tombstone(
    stall: Stall, patient: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is in the transport when the turn is proved quiet; it arrives afterwards."""
    token, sign = procs.new_token(), tmp_path / "sign"
    stall.where = "before-spawn"
    turns: list[str] = []

    async def main() -> None:
        late: list[asyncio.Task[Any]] = []
        if not patient:
            # A transport that has sent the request: to cancel its waiter does not unsend it.
            held: Any = UnixLocalSandboxSession.pty_exec_start

            async def sent(self: UnixLocalSandboxSession, *command: Any, **options: Any) -> Any:
                late.append(asyncio.ensure_future(held(self, *command, **options)))
                return await asyncio.shield(late[-1])

            monkeypatch.setattr(UnixLocalSandboxSession, "pty_exec_start", sent)
        async with unix_local() as session, TurnFence(policy=SHORT) as fence:
            call = asyncio.ensure_future(Tools(session, fence).exec_command(_nasty(token, sign)))
            await stall.reached.wait()
            receipt = await fence.wait_for_quiescence()
            assert receipt.proven
            assert procs.find(token) == []
            stall.release.set()
            ends = await asyncio.gather(*late, return_exceptions=True)
            if not patient:
                # The provider ran it after the receipt, and the tombstone refused it.
                assert [getattr(end, "exit_code", end) for end in ends] == [130]
            (end,) = await asyncio.gather(call, return_exceptions=True)
            assert isinstance(end, TurnCancelled), end
            assert procs.find(token) == []
            assert not sign.exists()
        turns.append(fence.turn)

    run(main)
    remove_litter(turns)


def test_a_tombstone_that_somebody_removed_is_told(
    stall: Stall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stated limit: who has the same uid can remove it. The late start is not silent then."""
    token = procs.new_token()
    stall.where = "before-spawn"
    held: Any = UnixLocalSandboxSession.pty_exec_start
    late: list[asyncio.Task[Any]] = []

    async def sent(self: UnixLocalSandboxSession, *command: Any, **options: Any) -> Any:
        late.append(asyncio.ensure_future(held(self, *command, **options)))
        while not late[-1].done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(late[-1])
        return late[-1].result()

    monkeypatch.setattr(UnixLocalSandboxSession, "pty_exec_start", sent)

    async def main() -> None:
        async with unix_local() as session, TurnFence(policy=SHORT) as fence:
            call = asyncio.ensure_future(
                Tools(session, fence).exec_command(f"exec sleep {token}", yield_time_ms=250)
            )
            await stall.reached.wait()
            receipt = await fence.wait_for_quiescence()
            assert (receipt.proven, receipt.unsettled_starts) == (True, (1,))
            for directory in leaks.FENCE_DIRECTORIES:
                (directory / f"{fence.turn}.cancelled").unlink(missing_ok=True)
                if (place := directory / str(os.getuid())).is_dir():
                    (place / fence.turn).mkdir(mode=0o700, exist_ok=True)
            stall.release.set()
            await until(lambda: bool(caplog.records), "the error")
            await asyncio.gather(call, *late, return_exceptions=True)
            assert len(procs.find(token)) == 1, "the case is not the case"
            assert (await quiesce_turn(session, fence.turn_id)).proven
            assert procs.find(token) == []

    run(main)
    assert "after the turn was proven quiet" in caplog.text


def test_start_stalled_after_the_spawn(stall: Stall, tmp_path: Path) -> None:
    """It runs, and nobody has its session id yet."""
    token, sign = procs.new_token(), tmp_path / "sign"
    stall.where = "after-spawn"

    async def main() -> None:
        async with unix_local() as session, TurnFence(policy=SHORT) as fence:
            call = asyncio.ensure_future(
                Tools(session, fence).exec_command(_nasty(token, sign), yield_time_ms=250)
            )
            await until(stall.reached.is_set, "the stall after the spawn")
            assert len([p for p in procs.find(token) if p.name == "sleep"]) == 2
            assert_proven(await fence.wait_for_quiescence())
            assert procs.find(token) == []
            stall.release.set()
            (end,) = await asyncio.gather(call, return_exceptions=True)
            assert isinstance(end, TurnCancelled), end

    run(main)


def test_reply_of_the_start_is_lost(stall: Stall, tmp_path: Path) -> None:
    """The caller gets the transport's error; what runs nevertheless is the turn's."""
    token, sign = procs.new_token(), tmp_path / "sign"
    stall.where = "reply-lost"

    async def main() -> None:
        async with unix_local() as session, TurnFence(policy=SHORT) as fence:
            with pytest.raises(ExecTransportError):
                await Tools(session, fence).exec_command(_nasty(token, sign))
            # The control: it does run, and the SDK has no handle that anybody was given.
            assert len([p for p in procs.find(token) if p.name == "sleep"]) == 2
            assert_proven(await fence.wait_for_quiescence())
            assert procs.find(token) == []

    run(main)


def test_caller_cancelled_before_the_yield(tmp_path: Path) -> None:
    """The caller is let go at once, its command is stopped, and the rest of the turn goes on."""
    lost, kept = procs.new_token(), procs.new_token()

    async def main() -> None:
        async with unix_local() as session, TurnFence() as fence:
            tools = Tools(session, fence)
            other = asyncio.ensure_future(
                tools.exec_command(f"setsid sleep {kept} & wait", yield_time_ms=30_000)
            )
            call = asyncio.ensure_future(
                tools.exec_command(_nasty(lost, tmp_path / "sign"), yield_time_ms=30_000)
            )
            await until(
                lambda: [p.name for p in procs.find(lost) + procs.find(kept)].count("sleep") == 3,
                "both to be up",
            )
            (before,) = [p for p in procs.find(kept) if p.name == "sleep"]
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until(lambda: procs.find(lost) == [], "the lost command to be stopped")
            assert not fence.cancelled
            assert procs.alive(before.pid, before.start)
            assert_proven(await fence.wait_for_quiescence())
            assert procs.find(kept) == []
            await asyncio.gather(other, return_exceptions=True)

    run(main)
