"""The control channel answers wrongly: each fault is retried, none of them opens the fence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fence import (
    EscalationPolicy,
    QuiescenceTimeout,
    SandboxControl,
    TurnCancelled,
    TurnFence,
)
from fence.control import ControlOutput
from fence.errors import ControlError, SandboxGone
from fence.lineage.marks import new_run_token, sweep_argv
from fence.openai_agents import session as fenced_session
from tests.battery._tools import ControlBetween, Tools, assert_proven, run, unix_local, until
from tests.support import procs

QUICK = EscalationPolicy(
    sweep=1.2, deadline=6.0, control_overhead=0.5, retry_first=0.02, retry_max=0.1
)
# A turn that never was: its report is well-formed and clear, and it is not this turn's.
OTHER_TURN = "0" * 32


class Fault:
    """What happens to the next `times` sweeps; prepare runs and looks stay healthy."""

    def __init__(self, spoil: Callable[[ControlOutput], ControlOutput], *, works: bool) -> None:
        self.spoil = spoil
        self.works = works
        """Whether the sweep does its work before its answer is spoilt."""
        self.times = 2
        self.met = 0


class FaultyControl(ControlBetween):
    """The real control channel of a sandbox with a fault on its sweeps."""

    def __init__(self, real: SandboxControl, fault: Fault) -> None:
        super().__init__(real)
        self._fault = fault

    async def run(self, argv: Sequence[str], *, timeout: float) -> ControlOutput:
        fault = self._fault
        if "fence-sweep" not in argv or fault.met >= fault.times:
            return await self._real.run(argv, timeout=timeout)
        fault.met += 1
        output = ControlOutput(0, b"", b"")
        if fault.works:
            output = await self._real.run(argv, timeout=timeout)
        else:
            # The report of a sweep that stopped nothing: of a turn that never was.
            words = sweep_argv(OTHER_TURN, new_run_token(), QUICK)
            output = await self._real.run(words, timeout=timeout)
        answer = fault.spoil(output)
        if asyncio.iscoroutine(answer):
            answer = await answer
        return answer


def _raises(output: ControlOutput) -> Any:
    raise ControlError("the connection was reset")


async def _hangs(output: ControlOutput) -> Any:
    await asyncio.Event().wait()


def _with(code: int | None, text: Callable[[bytes], bytes]) -> Callable[[ControlOutput], Any]:
    return lambda output: ControlOutput(code, text(output.stdout), output.stderr)


def _same(text: bytes) -> bytes:
    return text


FAULTS: dict[str, tuple[Callable[[ControlOutput], Any], bool]] = {
    "raises": (_raises, False),
    "hangs": (_hangs, False),
    "empty": (_with(0, lambda _: b""), False),
    "garbage": (_with(0, lambda _: b"\x00\xff clear end clear\n"), False),
    "claims-clear": (_with(0, lambda _: b"end clear lineage consistent 3 0 10\n"), False),
    "other-turns-report": (_with(0, _same), False),
    "half": (_with(0, lambda text: text[: len(text) // 2]), True),
    "no-last-line": (_with(0, lambda text: text[: text.rstrip().rfind(b"\n") + 1]), True),
    "twice": (_with(0, lambda text: text + text), True),
    "something-after": (_with(0, lambda text: text + b"bye\n"), True),
    "exit-76": (_with(76, _same), True),
    "exit-75": (_with(75, _same), True),
    "exit-137": (_with(137, _same), True),
    "no-exit-code": (_with(None, lambda text: text[: len(text) // 2]), True),
    "older-protocol": (
        _with(0, lambda text: text.replace(b"fence-sweep 1 ", b"fence-sweep 0 ")),
        True,
    ),
    "reply-lost": (_raises, True),
    "reply-late": (_hangs, True),
}


def install(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    real: Any = fenced_session.control_for

    def faulty_control_for(session: object) -> FaultyControl:
        return FaultyControl(real(session), fault)

    monkeypatch.setattr(fenced_session, "control_for", faulty_control_for)


async def _up(token: str, fence: TurnFence, session: Any) -> asyncio.Task[str]:
    call = asyncio.ensure_future(
        Tools(session, fence).exec_command(f"setsid sleep {token} & wait", yield_time_ms=60_000)
    )
    await until(lambda: any(p.name == "sleep" for p in procs.find(token)), "the sleep to be up")
    return call


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if FAULTS[name][0] is _hangs else name
        for name in FAULTS
    ],
)
def test_each_fault_is_retried_and_none_opens_the_fence(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, works = FAULTS[name]
    fault = Fault(spoil, works=works)
    install(monkeypatch, fault)
    token = procs.new_token()

    async def main() -> None:
        async with unix_local() as session, TurnFence(policy=QUICK) as fence:
            call = await _up(token, fence, session)
            receipt = await fence.wait_for_quiescence()
            # The receipt came from a sweep that was heard, after both that were not.
            assert procs.find(token) == []
            assert_proven(receipt)
            assert fault.met == 2
            (sandbox,) = receipt.sandboxes
            assert len(sandbox.errors) == 2, sandbox.errors
            assert sandbox.control_runs == 3
            await asyncio.gather(call, return_exceptions=True)

    with procs.canary():
        run(main)
    _forget(OTHER_TURN)


@pytest.mark.parametrize("name", ["garbage", "claims-clear", "other-turns-report", "exit-76"])
def test_a_fault_that_stays_is_a_timeout(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what the spoilt reports hide is still there, and nobody says clear."""
    spoil, _ = FAULTS[name]
    fault = Fault(spoil, works=False)
    fault.times = 1_000_000
    install(monkeypatch, fault)
    token = procs.new_token()

    async def main() -> None:
        async with unix_local() as session:
            fence = TurnFence(policy=QUICK)
            call = await _up(token, fence, session)
            with pytest.raises(QuiescenceTimeout) as caught:
                await fence.wait_for_quiescence(timeout=1.0)
            assert not caught.value.partial.proven
            assert procs.find(token) != []
            with pytest.raises(TurnCancelled):
                await Tools(session, fence).exec_command("true")
            fault.times = 0
            assert_proven(await fence.wait_for_quiescence())
            assert procs.find(token) == []
            await asyncio.gather(call, return_exceptions=True)

    run(main)
    _forget(OTHER_TURN)


def test_a_sandbox_that_is_gone_is_a_proof_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evidence from the provider, not a failed request, ends the wait."""

    def gone(output: ControlOutput) -> Any:
        raise SandboxGone("the container is absent")

    fault = Fault(gone, works=True)
    install(monkeypatch, fault)
    token = procs.new_token()

    async def main() -> None:
        async with unix_local() as session, TurnFence(policy=QUICK) as fence:
            call = await _up(token, fence, session)
            receipt = await fence.wait_for_quiescence()
            assert receipt.proven
            assert receipt.containment == "gone"
            assert receipt.sandboxes[0].evidence == "the container is absent"
            await asyncio.gather(call, return_exceptions=True)

    run(main)
    assert procs.find(token) == []


def _forget(turn: str) -> None:
    Path("/tmp/.fence", f"{turn}.cancelled").unlink(missing_ok=True)
