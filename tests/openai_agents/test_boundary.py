"""What a run raises when the fence refuses: our error itself, not the SDK's wrapper around it."""

from __future__ import annotations

import shutil

import pytest
from agents import Runner
from agents.exceptions import AgentsException
from agents.run_config import RunConfig, SandboxRunConfig
from agents.sandbox import SandboxAgent
from agents.sandbox.capabilities import Shell
from agents.testing import ScriptedModel, assistant_message, function_call

from fence import TurnFence
from fence.errors import ContainmentTooWeak, FenceError, TurnReused
from tests.support import leaks

pytestmark = pytest.mark.anyio


def agent(fence: TurnFence) -> SandboxAgent:
    model = ScriptedModel(
        [
            [function_call("exec_command", {"cmd": "echo ran"}, call_id="c1")],
            [assistant_message("done")],
        ]
    )
    return SandboxAgent(name="a", model=model, capabilities=fence.wrap_capabilities([Shell()]))


async def test_a_refused_sandbox_is_a_fence_error_around_the_run(session) -> None:
    config = RunConfig(sandbox=SandboxRunConfig(session=session))
    async with TurnFence(brand=False, require="lineage") as fence:
        with pytest.raises(ContainmentTooWeak, match="require='lineage'") as caught:
            await Runner.run(agent(fence), "go", run_config=config)
    assert isinstance(caught.value, FenceError)
    assert isinstance(caught.value, AgentsException)
    assert (caught.value.have, caught.value.need) == ("lineage-unbranded", "lineage")
    # Nothing was started, so no sweep came by to remove what the prepare run made.
    for directory in leaks.FENCE_DIRECTORIES:
        for place in directory.glob(f"*/{fence.turn}"):
            shutil.rmtree(place)


async def test_an_id_that_was_stopped_before_is_a_loud_error(session, turn_id) -> None:
    """Without it every command would be refused by the old tombstone, and the run go on."""
    config = RunConfig(sandbox=SandboxRunConfig(session=session))
    async with TurnFence(turn_id=turn_id) as fence:
        await Runner.run(agent(fence), "go", run_config=config)
    async with TurnFence(turn_id=turn_id) as again:
        with pytest.raises(TurnReused, match="choose a new turn_id"):
            await Runner.run(agent(again), "go", run_config=config)
    async with TurnFence(turn_id=turn_id) as third:
        with pytest.raises(TurnReused):
            await third.run_sandbox_command(session, "true")
