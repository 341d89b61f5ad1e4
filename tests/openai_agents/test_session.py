"""The fenced session: same results, every operation owned, nothing after the cancel."""

from __future__ import annotations

import asyncio
import io
import os
import pwd
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from agents.editor import ApplyPatchOperation
from agents.sandbox.errors import ExecTimeoutError, PtySessionNotFoundError
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient
from agents.sandbox.session import SandboxSession
from agents.sandbox.session.manager import Instrumentation
from agents.sandbox.session.sinks import CallbackSink

from fence import EscalationPolicy, FenceError, TurnCancelled, TurnFence
from fence.errors import FenceUsageError
from fence.openai_agents import FencedSandboxSession, control_for
from fence.openai_agents.session import ENDED_WITHOUT_CODE, SessionDirectory, bind
from tests.support import procs


async def content(session, name: str) -> bytes:
    handle = await session.read(Path(name))
    with handle:
        data: bytes = handle.read()
        return data


def archive() -> io.BytesIO:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        info = tarfile.TarInfo("late.txt")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    data.seek(0)
    return data


# Same results.


SAME = [
    (("printf out; printf err >&2; exit 3",), {}),
    (('pwd; echo "$0 $#"; echo $OLDPWD',), {}),
    (("echo", "a b", "it's"), {}),
    (("printf", "%s|", "a b", "$x"), {"shell": False}),
    (
        ("echo $BASH_VERSION | grep -c .; shopt -q login_shell; echo $?",),
        {"shell": ["bash", "-lc"]},
    ),
    (("kill -TERM $$",), {}),
    (("umask; ulimit -n; ulimit -v; echo $PPID | grep -c .",), {}),
    (("cat; echo end",), {}),
]


@pytest.mark.parametrize(("command", "settings"), SAME)
async def test_exec_gives_the_same_result(session, fence, command, settings):
    fenced = fence.wrap_session(session)
    with_fence = await fenced.exec(*command, timeout=20, **settings)
    without = await session.exec(*command, timeout=20, **settings)
    assert (with_fence.stdout, with_fence.stderr, with_fence.exit_code) == (
        without.stdout,
        without.stderr,
        without.exit_code,
    )


@pytest.mark.parametrize(
    ("command", "settings", "tty"),
    # `cat` would wait for its terminal.
    [(c, s, tty) for c, s in SAME for tty in (False, True) if not (tty and "cat" in c[0])],
)
async def test_pty_exec_start_gives_the_same_result(session, fence, command, settings, tty):
    fenced = fence.wrap_session(session)
    got = [
        await s.pty_exec_start(*command, tty=tty, yield_time_s=20, **settings)
        for s in (fenced, session)
    ]
    assert got[0].exit_code is not None
    assert (got[0].output, got[0].exit_code, got[0].process_id) == (
        got[1].output,
        got[1].exit_code,
        got[1].process_id,
    )


async def test_a_program_of_the_workspace_sees_its_own_name(session, fence, workspace):
    program = workspace / "tool"
    program.write_text('#!/bin/sh\necho "$0 $1"\n')
    program.chmod(0o755)
    fenced = fence.wrap_session(session)
    with_fence = await fenced.exec(str(program), "x", shell=False)
    without = await session.exec(str(program), "x", shell=False)
    assert with_fence.stdout == without.stdout


async def test_files_go_through(session, fence, workspace):
    fenced = fence.wrap_session(session)
    await fenced.write(Path("a.txt"), io.BytesIO(b"hello"))
    assert await content(fenced, "a.txt") == b"hello"
    assert await fenced.read_bounded(Path("a.txt"), max_bytes=2) == b"he"
    await fenced.mkdir("d", parents=True)
    await fenced.mv("a.txt", "d/b.txt")
    assert [Path(e.path).name for e in await fenced.ls("d")] == ["b.txt"]
    assert await fenced.same_file("d/b.txt", "d/../d/b.txt")
    await fenced.extract("x.tar", archive())
    assert (workspace / "late.txt").exists()
    await fenced.apply_patch(ApplyPatchOperation(type="create_file", path="p.txt", diff="+one\n"))
    assert (workspace / "p.txt").read_text() == "one"
    (await fenced.persist_workspace()).close()
    await fenced.rm("d", recursive=True)
    assert not (workspace / "d").exists()
    counts = (await fence.wait_for_quiescence()).operations
    assert counts.admitted == counts.settled == 11


async def test_errors_are_the_sessions_own(session, fence):
    fenced = fence.wrap_session(session)
    errors = []
    for s in (fenced, session):
        with pytest.raises(ExecTimeoutError) as caught:
            await s.exec("sleep 30", timeout=0.2)
        errors.append(caught.value)
        with pytest.raises(PtySessionNotFoundError):
            await s.pty_write_stdin(session_id=7, chars="")
    assert errors[0].command == errors[1].command == ("sh", "-c", "sleep 30")
    assert errors[0].context == errors[1].context


async def test_audit_events_name_the_users_command(h):
    events: list[tuple[str, object, object]] = []

    def note(event, _session):
        # The banner of what was run: not times, not ids.
        events.append((event.op, type(event), event.data.get("command")))

    client = UnixLocalSandboxClient(
        instrumentation=Instrumentation(sinks=[CallbackSink(note, mode="sync")])
    )
    seen = []
    async with await client.create() as session, TurnFence() as fence:
        for s in (session, fence.wrap_session(session)):
            events.clear()
            await s.exec("echo hello", timeout=20)
            await s.write(Path("a"), io.BytesIO(b"x"))
            (await s.read(Path("a"))).close()
            seen.append(list(events))
    await client.delete(session)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 6


# Lifecycle.


async def test_lifecycle_goes_to_the_wrapped_session(fence):
    client = UnixLocalSandboxClient()
    session = await client.create()
    fenced = fence.wrap_session(session)
    ran = []

    async def hook():
        ran.append("hook")

    async with fenced as entered:
        assert entered is fenced
        assert await session.running()
        assert fenced.state is session.state
        assert fenced.dependencies is session.dependencies
        assert fenced.supports_pty() is True
        assert fenced.normalize_path("x") == session.normalize_path("x")
        assert fenced.describe() == session.describe()
        fenced.register_pre_stop_hook(hook)
        fenced._max_manifest_entry_concurrency = 3
        assert session._max_manifest_entry_concurrency == 3
        await fence.wait_for_quiescence()
        assert await fenced.running()
    assert ran == ["hook"]
    assert not await session.running()
    # The SDK's client deletes by the provider's session inside.
    await client.delete(fenced)
    assert not Path(session.state.manifest.root).exists()


async def test_wrapping_is_idempotent_and_checks_what_it_gets(session, fence):
    fenced = fence.wrap_session(session)
    assert isinstance(fenced, SandboxSession)
    assert fence.wrap_session(fenced) is fenced
    async with TurnFence() as other:
        outer = other.wrap_session(fenced)
        assert fence.wrap_session(outer) is outer
        assert other.wrap_session(outer) is outer
    with pytest.raises(FenceUsageError) as caught:
        fence.wrap_session("session")
    assert caught.value.field == "session"
    assert control_for(outer).sandbox_id == control_for(session._inner).sandbox_id


async def test_a_providers_own_session_can_be_wrapped(session, fence):
    fenced = fence.wrap_session(session._inner)
    assert (await fenced.exec("echo x")).stdout == b"x\n"
    await fenced.write(Path("a"), io.BytesIO(b"1"))
    assert await content(fenced, "a") == b"1"


# Stopping.


@pytest.mark.parametrize("tty", [False, True])
async def test_cancel_stops_what_was_started(session, fence, h, tty):
    fenced = fence.wrap_session(session)
    token = procs.new_token()
    update = await fenced.pty_exec_start(
        f"setsid sleep {token} & sleep {token}", tty=tty, yield_time_s=0.25
    )
    assert update.process_id is not None
    await h.running(token, 2)
    receipt = await fence.wait_for_quiescence()
    assert procs.find(token) == []
    assert [c.tty for c in receipt.commands] == [tty]
    assert receipt.commands[0].outcome == "stopped"


async def test_negative_control_the_sdk_alone_leaves_survivors(session, h):
    token = procs.new_token()
    await session.pty_exec_start(f"setsid sleep {token} & sleep {token}", yield_time_s=0.25)
    left = await h.running(token, 2)
    await session.pty_terminate_all()
    survivors = [p for p in left if procs.alive(p.pid, p.start)]
    assert survivors
    procs.end(survivors)


async def test_a_cancelled_caller_of_exec_gets_its_command_stopped(session, fence, h):
    fenced = fence.wrap_session(session)
    token = procs.new_token()
    task = asyncio.create_task(fenced.exec(f"setsid sleep {token} & wait"))
    await h.running(token)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await h.until(lambda: procs.find(token) == [], "the command's end")
    assert not fence.cancelled


async def test_negative_control_a_cancelled_caller_of_the_sdks_exec_leaves_it_running(session, h):
    token = procs.new_token()
    task = asyncio.create_task(session.exec(f"setsid sleep {token} & wait"))
    left = await h.running(token)
    # Cancelled inside asyncio's process start, CPython 3.11 waits for the pipe's last holder.
    await session.exec("true")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # A round trip through the session: whatever the SDK does on cancel, it had its chance.
    await session.exec("true")
    assert all(procs.alive(p.pid, p.start) for p in left)
    procs.end(procs.find(token))


async def test_an_exec_in_flight_ends_with_turn_cancelled(session, fence, h):
    fenced = fence.wrap_session(session)
    token = procs.new_token()
    task = asyncio.create_task(fenced.exec(f"sleep {token}"))
    await h.running(token)
    assert fence.cancel("stop")
    with pytest.raises(TurnCancelled) as caught:
        await task
    assert caught.value.reason == "stop"
    await fence.wait_for_quiescence()


async def test_write_stdin_in_flight_ends_with_turn_cancelled(session, fence, h):
    fenced = fence.wrap_session(session)
    token = procs.new_token()
    update = await fenced.pty_exec_start(f"sleep {token}", tty=True, yield_time_s=0.25)
    task = asyncio.create_task(
        fenced.pty_write_stdin(session_id=update.process_id, chars="", yield_time_s=30)
    )
    await h.until(lambda: "1 in flight" in repr(fence), "the poll")
    fence.cancel()
    with pytest.raises(TurnCancelled):
        await task
    await fence.wait_for_quiescence()
    assert procs.find(token) == []


async def test_a_session_of_somebody_else_is_adopted_and_ends(session, fence, h):
    token = procs.new_token()
    update = await session.pty_exec_start(f"sleep {token}", tty=True, yield_time_s=0.25)
    fenced = fence.wrap_session(session)
    await fenced.pty_write_stdin(session_id=update.process_id, chars="x", yield_time_s=0.25)
    receipt = await fence.wait_for_quiescence()
    assert receipt.adopted == (update.process_id,)
    assert procs.find(token) == []


async def test_an_adopted_session_that_was_never_there_holds_nothing_up(session, fence):
    fenced = fence.wrap_session(session)
    with pytest.raises(PtySessionNotFoundError):
        await fenced.pty_write_stdin(session_id=5, chars="")
    assert (await fence.wait_for_quiescence()).proven


async def test_two_sessions_on_one_host_may_use_one_number(session, fence, h, monkeypatch):
    # The provider draws its numbers at random per session; here both draw the same.
    monkeypatch.setattr(
        "agents.sandbox.sandboxes.unix_local.allocate_pty_process_id", lambda _used: 4321
    )
    client = UnixLocalSandboxClient()
    other = await client.create()
    async with other:
        first, second = procs.new_token(), procs.new_token()
        for s, token in ((session, first), (other, second)):
            # Only a byte from the terminal ends it within the test: raw mode, signals ignored.
            update = await fence.wrap_session(s).pty_exec_start(
                f"stty -isig; trap '' INT; sleep {token}", tty=True, yield_time_s=0.25
            )
            assert update.process_id == 4321
        out = await fence.wrap_session(other).pty_write_stdin(
            session_id=4321, chars="to-second", yield_time_s=0.25
        )
        assert b"to-second" in out.output
        receipt = await fence.wait_for_quiescence()
        assert [c.outcome for c in receipt.commands] == ["stopped", "stopped"]
        assert receipt.adopted == ()
        assert procs.find(first) == procs.find(second) == []
    await client.delete(other)


async def test_a_directory_names_each_session_once():
    directory = SessionDirectory()
    ran: list[str] = []

    def callbacks(word):
        async def interrupt():
            ran.append(word)

        async def probe():
            return 3

        return interrupt, probe

    one, two = object(), object()
    assert directory.started(one, 7, *callbacks("one")) == 7
    fresh = directory.started(two, 7, *callbacks("two"))
    assert fresh != 7
    assert directory.known(one, 7, *callbacks("x")) == 7
    assert directory.known(two, 7, *callbacks("x")) == fresh
    await directory.interrupt(fresh)
    await directory.interrupt(99)
    assert ran == ["two"]
    assert await directory.probe(7) == 3
    assert await directory.probe(99) == ENDED_WITHOUT_CODE
    # The provider may use a number again: a new command, a new name.
    assert directory.started(one, 7, *callbacks("again")) not in (7, fresh)


async def test_every_operation_is_refused_after_the_cancel(session, h, workspace):
    fence = TurnFence()
    fenced = fence.wrap_session(session)
    (workspace / "there").write_text("there")
    before = sorted(p.name for p in workspace.iterdir())
    await fence.wait_for_quiescence()
    calls = {
        "exec": lambda: fenced.exec("echo x > late"),
        "pty_exec_start": lambda: fenced.pty_exec_start("echo x > late"),
        "pty_write_stdin": lambda: fenced.pty_write_stdin(session_id=1, chars="x"),
        "write": lambda: fenced.write(Path("late"), io.BytesIO(b"x")),
        "write_new_file": lambda: fenced._write_new_file(Path("late"), io.BytesIO(b"x")),
        "read": lambda: fenced.read(Path("there")),
        "_read": lambda: fenced._read(Path("there")),
        "read_bounded": lambda: fenced.read_bounded(Path("there"), max_bytes=1),
        "ls": lambda: fenced.ls("."),
        "rm": lambda: fenced.rm("there"),
        "mv": lambda: fenced.mv("there", "late"),
        "mkdir": lambda: fenced.mkdir("late"),
        "same_file": lambda: fenced.same_file("there", "there"),
        "extract": lambda: fenced.extract("late.tar", archive()),
        "hydrate": lambda: fenced.hydrate_workspace(archive()),
        "persist": lambda: fenced.persist_workspace(),
        "apply_manifest": lambda: fenced.apply_manifest(),
        "provision": lambda: fenced.provision_manifest_accounts(),
        "checked": lambda: fenced._exec_checked_nonzero("touch", "late"),
        "apply_patch": lambda: fenced.apply_patch(
            ApplyPatchOperation(type="create_file", path="late", diff="+x\n")
        ),
        "run_sandbox_command": lambda: fence.run_sandbox_command(session, "touch late"),
    }
    for name, call in calls.items():
        with pytest.raises(TurnCancelled):
            await call()
            pytest.fail(name)
    for wrap in (
        lambda: fence.wrap_session(session),
        lambda: fence.wrap_tools([]),
        lambda: fence.wrap_capabilities([]),
    ):
        with pytest.raises(TurnCancelled):
            wrap()
    assert sorted(p.name for p in workspace.iterdir()) == before
    assert (workspace / "there").read_text() == "there"


async def test_nested_fences_each_stop_their_own(session, h):
    token = procs.new_token()
    async with TurnFence() as outer:
        around = outer.wrap_session(session)
        async with TurnFence() as inner:
            inside = inner.wrap_session(around)
            await inside.pty_exec_start(f"setsid sleep {token} & wait", yield_time_s=0.25)
            await around.pty_exec_start(f"sleep {token}", yield_time_s=0.25)
            await h.running(token, 2)
            receipt = await inner.wait_for_quiescence()
            assert len([p for p in procs.find(token) if p.name == "sleep"]) == 1
            assert not outer.cancelled
            assert receipt.containment == "lineage-unbranded", receipt.to_json()
        # The inner fence is closed, the outer one goes on.
        assert (await around.exec("echo x")).stdout == b"x\n"
        with pytest.raises(TurnCancelled):
            await inside.exec("true")
    assert procs.find(token) == []


async def test_closing_the_outer_fence_first_stops_the_inner_turn_too(session, h):
    token = procs.new_token()
    async with TurnFence() as inner:
        async with TurnFence() as outer:
            inside = inner.wrap_session(outer.wrap_session(session))
            await inside.pty_exec_start(f"setsid sleep {token} & wait", tty=True, yield_time_s=0.25)
            await h.running(token)
        assert procs.find(token) == []
        with pytest.raises(TurnCancelled):
            await inside.exec("true")


@pytest.mark.parametrize("terminals", [6, 12])
async def test_terminals_that_block_the_default_executor_do_not_block_the_stop(h, terminals):
    # As many threads as asyncio would make here on two cores; all of them end up in os.read.
    executor = ThreadPoolExecutor(6)
    asyncio.get_running_loop().set_default_executor(executor)
    client = UnixLocalSandboxClient()
    session = await client.create()
    token = procs.new_token()
    async with session:
        fence = TurnFence()
        fenced = fence.wrap_session(session)
        starts = [
            asyncio.create_task(
                fenced.pty_exec_start(f"sleep {token}", tty=True, yield_time_s=0.25)
            )
            for _ in range(terminals)
        ]
        await h.running(token, min(terminals, 6) - 1)
        receipt = await fence.wait_for_quiescence()
        assert receipt.proven
        assert procs.find(token) == []
        done = await asyncio.gather(*starts, return_exceptions=True)
        assert all(not isinstance(d, Exception) or isinstance(d, TurnCancelled) for d in done)
    await client.delete(session)
    executor.shutdown(wait=True)


async def test_a_pty_timeout_of_the_sdk_does_not_bind_the_deadline(session, h):
    # The SDK's own exec timeout stays what it was; the fence has its own.
    fence = TurnFence(policy=EscalationPolicy(deadline=20))
    fenced = fence.wrap_session(session)
    token = procs.new_token()
    with pytest.raises(ExecTimeoutError):
        await fenced.exec(f"setsid sleep {token} & wait", timeout=2.0)
    # The SDK killed the group; what left the group lives on within the turn.
    procs.wait_until(lambda: len(procs.find(token)) == 1, 5, "the group to die of its KILL")
    assert (await fence.wait_for_quiescence()).proven
    assert procs.find(token) == []


async def test_run_sandbox_command(session, fence, h):
    result = await fence.run_sandbox_command(session, "echo out; echo err >&2; exit 4")
    assert (result.stdout, result.stderr, result.exit_code, result.ok) == (
        b"out\n",
        b"err\n",
        4,
        False,
    )
    assert result.wall_time > 0
    words = await fence.run_sandbox_command(session, ["printf", "%s", "a b"], shell=False)
    assert words.stdout == b"a b"
    commands: list[Any] = ["", [], "a\x00b"]
    for bad in commands:
        with pytest.raises(FenceError):
            await fence.run_sandbox_command(session, bad)


async def test_run_sandbox_command_stops_at_its_timeout_with_all_it_started(session, fence, h):
    token = procs.new_token()
    with pytest.raises(TimeoutError):
        await fence.run_sandbox_command(session, f"setsid sleep {token} & wait", timeout=1.0)
    await h.until(lambda: procs.find(token) == [], "the command's end")


async def test_the_sandbox_under_a_session_is_bound_once(session, fence):
    fenced = fence.wrap_session(session)
    assert isinstance(fenced, FencedSandboxSession)
    one, first = bind(fence, fenced)
    two, second = bind(fence, session)
    assert one is two
    assert first is second


async def test_a_command_as_another_user(session, fence, h, tmp_path, monkeypatch, workspace):
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv to become somebody else")
    if shutil.which("sudo") is None:
        # What the SDK calls, in three lines: `sudo -u USER -- ARGV...`.
        sudo = tmp_path / "bin" / "sudo"
        sudo.parent.mkdir()
        sudo.write_text(
            "#!/bin/sh\nuser=$2; shift 3\n"
            'exec setpriv --reuid="$user" --regid=nogroup --clear-groups -- "$@"\n'
        )
        sudo.chmod(0o755)
        for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent, workspace):
            folder.chmod(0o755)
        workspace.parent.chmod(0o755)
        monkeypatch.setenv("PATH", f"{sudo.parent}:{os.environ['PATH']}")
    fenced = fence.wrap_session(session)
    with_fence = await fenced.exec("id -un; pwd", user="nobody")
    without = await session.exec("id -un; pwd", user="nobody")
    assert vars(with_fence) == vars(without)
    assert with_fence.stdout.startswith(b"nobody\n")
    token = procs.new_token()
    await fenced.pty_exec_start(
        f"env -i setsid sleep {token} & sleep {token}", user="nobody", yield_time_s=0.3
    )
    left = await h.running(token, 2)
    assert {Path(f"/proc/{p.pid}").stat().st_uid for p in left} == {pwd.getpwnam("nobody").pw_uid}
    receipt = await fence.wait_for_quiescence()
    assert procs.find(token) == []
    assert receipt.commands[1].outcome == "stopped"


IGNORING = """
import asyncio, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient
from fence import TurnFence

async def main():
    client = UnixLocalSandboxClient()
    async with await client.create() as session:
        fence = TurnFence()
        fenced = fence.wrap_session(session)
        await fenced.pty_exec_start(f"setsid sleep {sys.argv[1]} & wait", yield_time_s=1)
        receipt = await fence.wait_for_quiescence()
        print(receipt.proven, [c.outcome for c in receipt.commands], receipt.sandboxes[0].errors)
    await client.delete(session)

asyncio.run(main())
"""


def test_a_host_that_ignores_sigchld():
    token = procs.new_token()
    done = subprocess.run(
        [sys.executable, "-c", IGNORING, token], capture_output=True, text=True, timeout=50
    )
    assert done.stdout == "True ['stopped'] ()\n", done.stderr
    assert procs.find(token) == []
