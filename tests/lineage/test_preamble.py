"""The preamble in a bare shell: what it marks, what it refuses, what it leaves alone."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

import pytest

from fence.lineage import marks
from tests.lineage._shells import NOBODY, Box, marker, run_marked, tools


def test_marks_the_command_and_gives_back_its_exit_code(box_of_user: Box) -> None:
    """Variable, brand and marker are there, and nothing else of ours."""
    box = box_of_user
    prepared = box.prepare()
    done = run_marked(
        box, ["sh", "-c", "echo $FENCE_LINEAGE; ulimit -S -t; echo err >&2; exit 7"], prepared
    )
    assert done.returncode == 7
    assert done.stderr == b"err\n"
    assert done.stdout.decode().split() == [f":{box.turn}.1.", str(marks.brand(box.turn, 1))]
    version, pid, start, boot, namespace, brand = (
        marker(prepared, box.turn, 1).read_text().splitlines()[0].split()
    )
    assert version == "fence1"
    assert int(pid) > 1
    assert int(start) > 0
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert namespace == f"i{Path('/proc/self/ns/pid').stat().st_ino}"
    assert brand == str(marks.brand(box.turn, 1))
    assert marker(prepared, box.turn, 1).read_text().count("\n") == 1


def test_an_outer_lineage_is_kept_and_its_brand_too(box: Box) -> None:
    """Inside another fence the variable grows; the brand stays the outer one's."""
    prepared = box.prepare()
    outer = 1_234_567_890
    done = run_marked(
        box,
        ["sh", "-c", "echo $FENCE_LINEAGE; ulimit -S -t"],
        prepared,
        env={**os.environ, "FENCE_LINEAGE": ":outer.3."},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (outer, resource.RLIM_INFINITY)),
    )
    assert done.stdout.decode().split() == [f":outer.3.:{box.turn}.1.", str(outer)]
    assert marker(prepared, box.turn, 1).read_text().splitlines()[0].split()[5] == "-"


@pytest.mark.parametrize("hard", [3600, 999_999_999])
def test_a_hard_limit_that_is_too_low_gets_no_brand(box: Box, hard: int) -> None:
    """dash would exit where ulimit fails; the command has to run."""
    prepared = box.prepare()
    done = run_marked(
        box,
        ["sh", "-c", "ulimit -H -t; echo ran"],
        prepared,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (hard, hard)),
    )
    assert (done.returncode, done.stdout) == (0, f"{hard}\nran\n".encode())


def test_no_brand_when_none_is_wanted(box: Box) -> None:
    prepared = box.prepare()
    done = run_marked(box, ["sh", "-c", "ulimit -S -t"], prepared, mark={"branded": False})
    assert done.stdout == b"unlimited\n"


@pytest.mark.parametrize("which", ["turn", "command"])
def test_a_tombstone_refuses_before_the_command(box: Box, which: str, tmp_path: Path) -> None:
    """Exit 130, one line, and the marker says it was us."""
    prepared = box.prepare()
    name = f"{box.turn}.cancelled" if which == "turn" else f"{box.turn}.1.cancelled"
    stone = Path(prepared.directory, name)
    stone.touch()
    try:
        done = run_marked(box, ["sh", "-c", f"touch {tmp_path}/ran"], prepared)
    finally:
        stone.unlink()
    assert done.returncode == marks.Exit.REFUSED
    assert done.stderr == b"fence: the turn is cancelled; the command was not started\n"
    assert not (tmp_path / "ran").exists()
    assert marker(prepared, box.turn, 1).read_text().splitlines()[1] == "refused"
    # The twin: without the tombstone the same command does run.
    assert run_marked(box, ["sh", "-c", f"touch {tmp_path}/ran"], prepared).returncode == 0
    assert (tmp_path / "ran").exists()


def test_a_tombstone_of_a_turn_with_a_like_key_refuses_nothing(box: Box) -> None:
    prepared = box.prepare()
    other = Path(
        prepared.directory, f"{box.turn[:31]}{'0' if box.turn[31] != '0' else '1'}.cancelled"
    )
    other.touch()
    try:
        assert run_marked(box, ["true"], prepared).returncode == 0
    finally:
        other.unlink()


def test_a_second_delivery_of_the_same_start_runs_nothing(box: Box, tmp_path: Path) -> None:
    """A transport that repeats a request after a lost reply must not run the command twice."""
    prepared = box.prepare()
    log = tmp_path / "log"
    argv = ["sh", "-c", f"echo ran >> {log}"]
    assert run_marked(box, argv, prepared, mark={"number": 5}).returncode == 0
    again = run_marked(box, argv, prepared, mark={"number": 5})
    assert again.returncode == marks.Exit.PREAMBLE_FAILED
    assert b"was started before" in again.stderr
    assert log.read_text() == "ran\n"


def test_a_missing_directory_fails_closed(box: Box, tmp_path: Path) -> None:
    prepared = box.prepare()
    done = run_marked(
        box,
        ["sh", "-c", f"touch {tmp_path}/ran"],
        prepared,
        mark={"directory": str(tmp_path / "gone")},
    )
    assert done.returncode == marks.Exit.PREAMBLE_FAILED
    assert done.stderr.startswith(b"fence: ")
    assert done.stderr.count(b"\n") == 1
    assert not (tmp_path / "ran").exists()


def test_a_tmp_of_its_own_fails_closed(box: Box, tmp_path: Path) -> None:
    """The tombstone would be written where the command cannot see it."""
    prepared = box.prepare()
    own = 'mount -t tmpfs none /tmp; mkdir -p -m 1777 /tmp/.fence; exec "$@"'
    argv = ["sh", "-c", f"touch {tmp_path}/ran"]
    done = run_marked(box, argv, prepared, prefix=["unshare", "--mount", "sh", "-c", own, "sh"])
    assert done.returncode == marks.Exit.PREAMBLE_FAILED
    assert b"does not see the directory" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_start_after_the_proof_is_refused(box: Box) -> None:
    """The markers went with the turn; the tombstone stays."""
    prepared = box.prepare()
    assert box.sweep().verdict == "clear"
    done = run_marked(box, ["true"], prepared)
    assert (done.returncode, done.stderr.count(b"cancelled")) == (marks.Exit.REFUSED, 1)


def test_another_pid_namespace_than_the_controls_fails_closed(box: Box, tmp_path: Path) -> None:
    """A control that cannot see the command could prove nothing about it."""
    prepared = box.prepare()
    inner = ["unshare", "--pid", "--fork", "--mount-proc"]
    done = run_marked(box, ["sh", "-c", f"touch {tmp_path}/ran"], prepared, prefix=inner)
    assert done.returncode == marks.Exit.PREAMBLE_FAILED
    assert b"another pid namespace" in done.stderr
    # And where /proc itself is the other namespace's.
    done = run_marked(
        box, ["sh", "-c", f"touch {tmp_path}/ran"], prepared, prefix=["unshare", "--pid", "--fork"]
    )
    assert done.returncode == marks.Exit.PREAMBLE_FAILED
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("helper", ["setsid", "busybox", "perl", "python3"])
def test_becomes_a_group_leader_where_it_is_none(one: Box, helper: str, tmp_path: Path) -> None:
    """With whatever the sandbox has; the exit code is still the command's."""
    prepared = one.prepare()
    env = tools(tmp_path / "bin", "dash", "sh", "cut", helper)
    if helper == "python3":
        (tmp_path / "bin" / helper).unlink()
        (tmp_path / "bin" / helper).symlink_to(os.path.realpath("/proc/self/exe"))
    done = run_marked(
        one,
        ["/bin/sh", "-c", "echo $$ $(cut -d' ' -f5 /proc/$$/stat); exit 9"],
        prepared,
        start_new_session=False,
        env=env,
    )
    pid, group = done.stdout.split()
    assert (done.returncode, pid == group) == (9, True), done


def test_without_any_setsid_it_says_so(one: Box, tmp_path: Path) -> None:
    prepared = one.prepare()
    env = tools(tmp_path / "bin", "dash", "sh")
    done = run_marked(
        one, ["/bin/sh", "-c", "echo ran"], prepared, start_new_session=False, env=env
    )
    assert done.returncode == marks.Exit.PREAMBLE_FAILED
    assert done.stdout == b""
    assert b"there is no setsid" in done.stderr


def test_leaves_a_controlling_terminal_alone(one: Box) -> None:
    """A member of a terminal's foreground group stays one: setsid would take the terminal away."""
    prepared = one.prepare()
    words = marks.preamble_argv(one.mark(prepared), ["sh", "-c", "ps -o tty= -p $$ >&2; echo ok"])
    script = "exec 2>&1; " + " ".join(_quoted(w) for w in words) + "; true"
    done = subprocess.run(
        ["script", "-qec", script, "/dev/null"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert b"pts/" in done.stdout, done
    assert b"ok" in done.stdout


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\"'\"'") + "'"


def test_another_user_makes_a_marker_directory_of_its_own(box: Box) -> None:
    """The control is root, the command is not: its marker is its own, and private."""
    prepared = box.prepare()
    box.uid = NOBODY
    done = run_marked(box, ["sh", "-c", "id -u; umask"], prepared)
    assert done.stdout.split() == [str(NOBODY).encode(), b"0022"], done
    path = marker(prepared, box.turn, 1, NOBODY)
    assert path.stat().st_uid == NOBODY
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "probe",
    [
        "umask",
        "trap",
        "echo $0 $# $@",
        "echo $-",
        "ls /proc/self/fd | wc -l",
        "cat",
        "env | cut -d= -f1 | grep -v FENCE | sort",
        "set | cut -d= -f1 | grep _fence_",
        "exec 9>&1; echo nine >&9",
        "read x; echo got:$x",
        "kill -SEGV $$",
    ],
)
def test_the_command_sees_no_other_trace(box: Box, probe: str) -> None:
    """The same argv with and without the preamble, by its output and exit code."""
    prepared = box.prepare()
    argv = [*box.shell, "-c", probe, "zero", "one", "two words"]
    plain = subprocess.run(
        argv, input=b"line 1\nline 2", capture_output=True, start_new_session=True, check=False
    )
    fenced = run_marked(box, argv, prepared, input=b"line 1\nline 2")
    assert (fenced.returncode, fenced.stdout, fenced.stderr) == (
        plain.returncode,
        plain.stdout,
        plain.stderr,
    )


def test_an_argument_may_be_as_long_as_the_kernel_allows(one: Box) -> None:
    prepared = one.prepare()
    text = ": '" + "x" * (marks.MAX_ARGUMENT_BYTES - 4) + "'"
    assert len(text) == marks.MAX_ARGUMENT_BYTES
    assert run_marked(one, ["sh", "-c", text], prepared).returncode == 0
    with pytest.raises(OSError, match="too long"):
        run_marked(one, ["sh", "-c", text + " "], prepared)
