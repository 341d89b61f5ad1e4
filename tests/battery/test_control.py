"""The control channel fails: the fence says so in time, stays closed, and recovers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from fence import EscalationPolicy, QuiescenceTimeout, SandboxControl, TurnCancelled, TurnFence
from fence.control import ControlOutput
from fence.errors import ControlError
from fence.openai_agents import session as fenced_session
from tests.battery._tools import ControlBetween, Tools, assert_proven, run, unix_local, until
from tests.support import procs

SHORT = EscalationPolicy(
    sweep=1.2, deadline=1.5, control_overhead=0.3, retry_first=0.05, retry_max=0.2
)


class FailingControl(ControlBetween):
    """The real control channel of a sandbox; refuses, and counts, while `broken` is set."""

    def __init__(self, real: SandboxControl, state: State) -> None:
        super().__init__(real)
        self._state = state

    async def run(self, argv: Sequence[str], *, timeout: float) -> ControlOutput:
        if self._state.broken:
            self._state.refused += 1
            raise ControlError(f"refused {self._state.refused}")
        return await self._real.run(argv, timeout=timeout)


class State:
    broken = False
    refused = 0


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> State:
    """Puts the switch between every fence of the test and its sandbox."""
    state = State()
    real: Any = fenced_session.control_for

    def broken_control_for(session: object) -> FailingControl:
        return FailingControl(real(session), state)

    monkeypatch.setattr(fenced_session, "control_for", broken_control_for)
    return state


def test_always_fails_then_healthy_again(channel: State) -> None:
    token = procs.new_token()

    async def main() -> None:
        async with unix_local() as session:
            fence = TurnFence(policy=SHORT)
            try:
                tools = Tools(session, fence)
                call = asyncio.ensure_future(
                    tools.exec_command(f"setsid sleep {token} & wait", yield_time_ms=30_000)
                )
                await until(
                    lambda: any(p.name == "sleep" for p in procs.find(token)), "the sleep to be up"
                )
                channel.broken = True
                fence.cancel("stop")
                with pytest.raises(QuiescenceTimeout) as caught:
                    async with asyncio.timeout(10):
                        await fence.wait_for_quiescence(timeout=1.5)
                partial = caught.value.partial
                assert not partial.proven
                (sandbox,) = partial.sandboxes
                assert not sandbox.proven
                # Every error, in order, as the channel gave them out.
                assert channel.refused >= 2
                seen = [error for error in sandbox.errors if "refused" in error]
                assert len(seen) == channel.refused, (sandbox.errors, channel.refused)
                assert all(f"refused {n + 1}" in error for n, error in enumerate(seen))
                # The control of this test: it still runs, and the fence does not open on a guess.
                assert procs.find(token) != []
                with pytest.raises(TurnCancelled):
                    await tools.exec_command(f"sleep {token}")

                channel.broken = False
                assert_proven(await fence.wait_for_quiescence(timeout=10))
                assert procs.find(token) == []
                with pytest.raises(TurnCancelled):
                    await call
                assert fence.receipt is not None
                assert fence.receipt.proven
            finally:
                procs.end(procs.find(token))

    run(main)
