"""The generic control channel: any session's exec, bounded on our side."""

from __future__ import annotations

import asyncio
import logging

import pytest
from agents.sandbox.sandboxes.unix_local import (
    UnixLocalSandboxClient,
    UnixLocalSandboxSession,
)
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession

from fence import SandboxControl, TurnFence
from fence.errors import ControlError
from fence.openai_agents import control_for
from fence_providers.sdk_exec import SdkExecControl
from fence_providers.sdk_exec import control_for as sdk_control_for
from tests.support import procs


async def test_runs_words_as_they_are(session):
    control = sdk_control_for(session._inner)
    assert control is not None
    assert isinstance(control, SandboxControl)
    assert control.provider == "sdk_exec"
    assert control.sandbox_id == f"unix_local:{session.state.session_id}"
    out = await control.run(
        ["sh", "-c", 'printf "%s|" "$@"; echo err >&2; exit 75', "name", "a b", "$x"], timeout=20
    )
    assert (out.exit_code, out.stdout, out.stderr) == (75, b"a b|$x|", b"err\n")


async def test_a_run_that_does_not_answer_is_an_error_in_time(session, h):
    token = procs.new_token()
    control = sdk_control_for(session._inner)
    assert control is not None
    with pytest.raises(ControlError, match="did not answer"):
        await control.run(["sleep", token], timeout=0.3)
    # The channel cannot end it: that is why it is the last resort.
    procs.end(procs.find(token))


async def test_a_session_that_swallows_its_cancellation_holds_nobody_up(session):
    release = asyncio.Event()

    class Stubborn(UnixLocalSandboxSession):
        async def exec(self, *command, **settings):
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
            raise RuntimeError("late")

    control = SdkExecControl(Stubborn.from_state(session.state))
    with pytest.raises(ControlError, match="did not answer"):
        await control.run(["true"], timeout=0.1)
    run = asyncio.create_task(control.run(["true"], timeout=60))
    await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    release.set()


async def test_errors_of_the_session_are_errors_of_the_control(session):
    class Broken(UnixLocalSandboxSession):
        async def exec(self, *command, **settings):
            raise ConnectionError("gone")

    class Cancelled(UnixLocalSandboxSession):
        async def exec(self, *command, **settings):
            raise asyncio.CancelledError

    for kind, words in ((Broken, "ConnectionError: gone"), (Cancelled, "was cancelled")):
        with pytest.raises(ControlError, match=words):
            await SdkExecControl(kind.from_state(session.state)).run(["true"], timeout=10)


async def test_equal_for_two_wrappers_of_one_session(session):
    one, two = SdkExecControl(session), SdkExecControl(session._inner)
    assert one == two
    assert hash(one) == hash(two)
    assert one != "x"
    assert sdk_control_for(object()) is None


async def test_a_session_of_no_known_provider_gets_it_and_a_note(h, caplog):
    client = UnixLocalSandboxClient()
    local = await client.create()

    async with local:

        class ThirdParty(BaseSandboxSession):
            """Everything but the class is the local session's."""

            def __init__(self):
                self.state = local.state

            async def _exec_internal(self, *command, timeout=None):
                return await local._inner._exec_internal(*command, timeout=timeout)

            async def read(self, path, *, user=None):
                return await local.read(path, user=user)

            async def write(self, path, data, *, user=None):
                await local.write(path, data, user=user)

            async def running(self):
                return True

            async def persist_workspace(self):
                raise NotImplementedError

            async def hydrate_workspace(self, data):
                raise NotImplementedError

        theirs = ThirdParty()
        with caplog.at_level(logging.WARNING):
            assert control_for(theirs).provider == "sdk_exec"
        assert len([r for r in caplog.records if "no provider knows" in r.getMessage()]) == 1
        fence = TurnFence()
        token = procs.new_token()
        result = await fence.wrap_session(theirs).exec(
            f"setsid sleep {token} >/dev/null 2>&1 & echo x"
        )
        assert result.stdout == b"x\n"
        await h.running(token)
        receipt = await fence.wait_for_quiescence()
        assert [box.provider for box in receipt.sandboxes] == ["sdk_exec"]
        assert procs.find(token) == []
    await client.delete(local)
