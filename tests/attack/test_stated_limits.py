"""What the fence does not cover, as the README says: tests that expect the survivor.

Each limit stands beside its nearest neighbour that is covered, so that it is no wider than stated.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fence import TurnFence
from tests.battery._tools import Tools, assert_proven, run, unix_local, until
from tests.support import procs

QUIET = ">/dev/null 2>&1 </dev/null"


def survivors_of(command: str, *, count: int = 1, brand: bool = True) -> list[procs.Process]:
    """Return what is left of a turn with one command (`{}` is its token); it is ended here."""
    token = procs.new_token()

    async def main() -> list[procs.Process]:
        async with unix_local() as session, TurnFence(brand=brand) as fence:
            tools = Tools(session, fence)
            await tools.exec_command(command.format(token), yield_time_ms=250)
            await until(
                lambda: [p.name for p in procs.find(token)].count("sleep") == count, "the sleep"
            )
            receipt = await fence.wait_for_quiescence()
            assert receipt.proven
            assert receipt.containment == ("lineage" if brand else "lineage-unbranded")
            return procs.find(token)

    try:
        return run(main)
    finally:
        procs.end(procs.find(token))


def test_environment_and_cpu_limit_and_parent_all_gone_is_missed() -> None:
    command = f"(ulimit -St unlimited; env -i setsid sleep {{}} {QUIET} &) {QUIET}; true"
    assert len(survivors_of(command)) == 1


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(f"(env -i setsid sleep {{}} {QUIET} &); true", id="limit-kept"),
        pytest.param(
            f"(ulimit -St unlimited; setsid sleep {{}} {QUIET} &); true", id="environment-kept"
        ),
    ],
)
def test_two_of_the_three_are_not_enough(command: str) -> None:
    assert survivors_of(command) == []


@pytest.mark.parametrize(
    ("leader", "missed"), [("ended", 1), ("alive", 0)], ids=["leader-ended", "leader-alive"]
)
def test_a_session_tells_whose_it_is_while_its_leader_lives(leader: str, missed: int) -> None:
    """A process of the command's own session is told by the leader; after its end by nothing."""
    command = f"(ulimit -St unlimited; env -i sleep {{0}} {QUIET} &) {QUIET}; "
    if leader == "alive":
        command += f"(sleep {{0}} {QUIET}; true) & exec sleep {{0}}"
    assert len(survivors_of(command, count=1 if missed else 3)) == missed


def test_without_a_brand_environment_and_parent_gone_is_missed() -> None:
    assert len(survivors_of(f"(env -i setsid sleep {{}} {QUIET} &); true", brand=False)) == 1


def test_without_a_brand_the_environment_alone_is_enough() -> None:
    assert survivors_of(f"(setsid sleep {{}} {QUIET} &); true", brand=False) == []


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_a_pane_of_a_server_that_was_there_before_is_not_the_turns(tmp_path: Path) -> None:
    """Delegated work: the receipt does not name it; a server that the turn starts is the turn's."""
    tmux = f"env TMUX= tmux -S {tmp_path}/socket"
    delegated, own = procs.new_token(), procs.new_token()
    hooked: list[str] = []

    async def main() -> None:
        async with unix_local() as session, TurnFence() as fence:
            tools = Tools(session, fence)

            async def stop_the_pane() -> None:
                hooked.append("asked")

            fence.on_quiesce(stop_the_pane, name="tmux pane")
            await tools.exec_command(f"{tmux} new-session -d -s late 'exec sleep {delegated}'")
            await tools.exec_command(f"{tmux}-own new-session -d -s own 'exec sleep {own}'")
            await until(
                lambda: (
                    [p.name for p in procs.find(delegated) + procs.find(own)].count("sleep") == 2
                ),
                "both panes",
            )
            receipt = await fence.wait_for_quiescence()
            assert_proven(receipt)
            assert [p.name for p in procs.find(delegated)].count("sleep") == 1
            assert [p for p in procs.find(own) if p.name == "sleep"] == []
            # What the app registered for such work was awaited, and the receipt says so.
            assert hooked == ["asked"]
            assert [(hook.name, hook.finished) for hook in receipt.hooks] == [("tmux pane", True)]

    keeper = procs.new_token()
    subprocess.run(
        [*tmux.split(), "new-session", "-d", "-s", "before", f"exec sleep {keeper}"], check=True
    )
    try:
        run(main)
        assert [p.name for p in procs.find(keeper)].count("sleep") == 1
    finally:
        subprocess.run([*tmux.split(), "kill-server"], check=False)
        procs.wait_until(
            lambda: not any(p.name == "sleep" for p in procs.find(delegated)), 10, "the pane to end"
        )
        procs.end([*procs.find(delegated), *procs.find(own), *procs.find(keeper)])


DAEMON = """
import socket, subprocess, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("ready", flush=True)
children = []
while True:
    line = server.accept()[0].makefile().readline().split()
    if line[0] == "run":
        children.append(subprocess.Popen(line[1:], start_new_session=True))
    else:
        for child in children:
            child.kill()
            child.wait()
        break
"""
ASK = """
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
s.send(sys.argv[2].encode())
"""


@pytest.mark.parametrize("hook", [False, True], ids=["alone", "with-a-hook"])
def test_work_given_to_a_daemon_is_not_the_turns(tmp_path: Path, hook: bool) -> None:
    """As with a container engine: the command only asks. The app's own step can stop it."""
    token, place = procs.new_token(), str(tmp_path / "socket")
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON, place], stdout=subprocess.PIPE, start_new_session=True
    ) as daemon:
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline() == b"ready\n"

            async def main() -> None:
                async with unix_local() as session, TurnFence() as fence:

                    async def stop() -> None:
                        subprocess.run([sys.executable, "-c", ASK, place, "stop\n"], check=True)
                        await until(lambda: not procs.find(token), "the daemon's child to end")

                    if hook:
                        fence.on_quiesce(stop, name="daemon")
                    ask = shlex.join([sys.executable, "-c", ASK, place, f"run sleep {token}\n"])
                    await Tools(session, fence).exec_command(ask)
                    await until(lambda: bool(procs.find(token)), "the daemon's child")
                    receipt = await fence.wait_for_quiescence()
                    assert_proven(receipt)
                    assert [h.name for h in receipt.hooks] == (["daemon"] if hook else [])
                    assert len(procs.find(token)) == (0 if hook else 1)

            run(main)
            assert daemon.poll() is None or hook
        finally:
            procs.end(procs.find(token))
            daemon.kill()
