"""The control channel of this host: bounded, out of band, and it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import pytest

from fence.control import SandboxControl
from fence.errors import ControlError
from fence_providers.unix_local import PROVIDER, LocalControl, control_for, host_id, run_script
from tests.support import procs

CONTROL = LocalControl("this-host")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


async def test_output_exit_code_and_place():
    out = await CONTROL.run(["sh", "-c", "pwd; echo err >&2; exit 75"], timeout=10)
    assert (out.exit_code, out.stdout, out.stderr) == (75, b"/\n", b"err\n")
    assert isinstance(CONTROL, SandboxControl)


async def test_a_signal_is_a_negative_code():
    out = await CONTROL.run(["sh", "-c", "kill -KILL $$"], timeout=10)
    assert out.exit_code == -signal.SIGKILL


async def test_the_script_leads_a_session_of_its_own():
    out = await CONTROL.run(["sh", "-c", "cat /proc/$$/stat; exit 0"], timeout=10)
    fields = out.stdout.rpartition(b")")[2].split()
    pid = int(out.stdout.split()[0])
    assert int(fields[2]) == pid  # group
    assert int(fields[3]) == pid  # session
    assert int(fields[3]) != os.getsid(0)


async def test_a_missing_program_is_an_error_of_the_control():
    with pytest.raises(ControlError, match="could not start"):
        await CONTROL.run(["/nonexistent/sh"], timeout=10)


async def test_a_timeout_leaves_no_process():
    token = procs.new_token()
    with pytest.raises(ControlError, match="time was over"):
        await CONTROL.run(["sh", "-c", f"sleep {token} & sleep {token}"], timeout=0.3)
    assert procs.find(token) == []


def test_negative_control_the_same_script_does_outlive_its_starter():
    # What the timeout test must be able to see: without the kill the children stay.
    token = procs.new_token()
    subprocess.run(["sh", "-c", f"sleep {token} >/dev/null 2>&1 &"], check=True)
    left = procs.find(token)
    assert len(left) == 1
    procs.end(left)


async def test_a_script_that_closes_its_output_and_stays_is_killed():
    token = procs.new_token()
    with pytest.raises(ControlError, match="closed its output"):
        await CONTROL.run(["sh", "-c", f"exec >&- 2>&-; exec sleep {token}"], timeout=0.3)
    assert procs.find(token) == []


async def test_a_stranger_that_holds_the_pipe_does_not_hold_the_answer():
    token = procs.new_token()
    # In a session of its own: not the control's to kill, but it inherits the pipe.
    out = await CONTROL.run(["sh", "-c", f"setsid sleep {token} & echo said; exit 3"], timeout=20)
    assert (out.exit_code, out.stdout) == (3, b"said\n")
    left = procs.find(token)
    assert len(left) == 1
    procs.end(left)


async def test_too_much_output_is_an_error(monkeypatch):
    monkeypatch.setattr("fence_providers.unix_local._MAX_OUTPUT_BYTES", 1000)
    with pytest.raises(ControlError, match="more than 1000"):
        await CONTROL.run(["sh", "-c", "while :; do echo 0123456789; done"], timeout=10)


async def test_a_cancelled_caller_returns_at_once_and_the_script_goes_on(tmp_path):
    gate, done = tmp_path / "gate", tmp_path / "done"
    os.mkfifo(gate)
    began = tmp_path / "began"
    script = f": > {began}; read line < {gate}; : > {done}"
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: CONTROL.run(["sh", "-c", script], timeout=30))
        while not began.exists():
            await anyio.sleep(0.005)
        group.cancel_scope.cancel()
    # The caller is back while the script still waits at its gate.
    assert not done.exists()
    gate.write_text("go\n")
    with anyio.fail_after(10):
        while not done.exists():
            await anyio.sleep(0.005)


async def test_many_at_once_leak_no_descriptor():
    before = len(list(Path("/proc/self/fd").iterdir()))
    async with anyio.create_task_group() as group:
        for _ in range(24):
            group.start_soon(lambda: CONTROL.run(["sh", "-c", "echo x"], timeout=20))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_runs_in_two_event_loops_of_two_threads_at_once():
    codes = []

    def work():
        codes.append(anyio.run(lambda: CONTROL.run(["sh", "-c", "exit 4"], timeout=20)).exit_code)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [4, 4, 4, 4]


IGNORING = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from fence_providers.unix_local import run_script
from fence.errors import ControlError
out = run_script(["sh", "-c", "echo report; exit 75"], 20)
print(out.exit_code, out.stdout)
try:
    run_script(["sh", "-c", "sleep %s & sleep %s"], 0.3)
except ControlError as error:
    print("killed")
"""


def test_where_the_host_ignores_sigchld_no_exit_code_is_invented():
    token = procs.new_token()
    done = subprocess.run(
        [sys.executable, "-c", IGNORING % (token, token)],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.stdout == "None b'report\\n'\nkilled\n", done.stderr
    assert procs.find(token) == []


def test_negative_control_subprocess_itself_reports_zero_there():
    program = (
        "import signal, subprocess; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "print(subprocess.run(['sh', '-c', 'exit 75']).returncode)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "0\n"


def test_the_host_is_named_by_boot_and_pid_namespace():
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert host_id().startswith(boot + ".")
    assert host_id() == host_id()


def test_only_unix_local_sessions_have_it():
    from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxSession

    one, two = object.__new__(UnixLocalSandboxSession), object.__new__(UnixLocalSandboxSession)
    first, second = control_for(one), control_for(two)
    assert first == second
    assert first is not None
    assert (first.provider, first.sandbox_id) == (PROVIDER, host_id())
    assert control_for(object()) is None


def test_the_environment_is_the_hosts_but_in_the_c_locale():
    out = run_script(["sh", "-c", 'echo "$LC_ALL:$PATH"'], 20)
    assert out.stdout.decode() == f"C:{os.environ['PATH']}\n"
