"""The sweep in a bare shell: what it takes for the turn's, how it stops it, what it proves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fence.lineage import marks, report
from tests.lineage._shells import NOBODY, Box, first_line, marker, run_marked, tools
from tests.support import procs

PYTHON = sys.executable


def by_pid(found: report.SweepReport, pid: int) -> report.ProcessReport:
    return next(p for p in found.processes if p.pid == pid)


def names(process: report.ProcessReport) -> list[str]:
    return [name for name, _ in process.signals]


@contextmanager
def left_behind(token: str) -> Iterator[None]:
    """End what carries `token`, by pid and start time, also when the test fails."""
    try:
        yield
    finally:
        procs.end(procs.find(token))


UNREADABLE = r"""
#include <stdio.h>
#include <sys/prctl.h>
#include <unistd.h>
int main(void) { prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); puts("up"); fflush(stdout); sleep(100); }
"""


@pytest.fixture
def unreadable() -> Iterator[Path]:
    """A program that every user can run and whose environment only root can read."""
    with tempfile.TemporaryDirectory(prefix="fence-test-", dir="/var/tmp") as folder:
        source = Path(folder, "unreadable.c")
        source.write_text(UNREADABLE)
        program = Path(folder, "unreadable")
        subprocess.run(["cc", "-O1", "-o", program, source], check=True)
        Path(folder).chmod(0o755)
        yield program


def test_nothing_there_is_clear_and_leaves_a_tombstone(box_of_user: Box) -> None:
    box = box_of_user
    prepared = box.prepare()
    found = box.sweep()
    assert (found.verdict, found.containment, found.processes) == ("clear", "lineage", ())
    assert Path(prepared.directory, f"{box.turn}.cancelled").stat().st_mode & 0o777 == 0o644
    assert not marker(prepared, box.turn, 1).parent.exists(), "markers go with their turn"


def test_stops_what_the_turn_started_and_nothing_else(box_of_user: Box) -> None:
    """A detached orphan with an empty environment too; a look-alike of the same user stays."""
    box = box_of_user
    token = procs.new_token()
    with procs.canary() as canary, left_behind(token):
        text = f"(env -i setsid sleep {token} >/dev/null 2>&1 &); echo up; exec sleep {token}"
        with box.command(text) as child:
            assert first_line(child) == "up"
            procs.wait_until(lambda: len(procs.find(token)) == 2, 10, "both sleepers")
            found = box.sweep()
            assert found.verdict == "clear"
            assert [p.look for p in found.processes] == ["gone", "gone"]
            assert {p.command for p in found.processes} == {1}
            assert procs.find(token) == []
        canary.assert_untouched()


def test_a_look_touches_nothing(box: Box) -> None:
    with box.command("echo up; exec sleep 100") as child:
        assert first_line(child) == "up"
        found = box.sweep(look=True)
        assert (found.verdict, [p.pid for p in found.processes]) == ("alive", [child.pid])
        assert child.poll() is None
        assert not Path(f"/tmp/.fence/{box.turn}.cancelled").exists()
        assert box.sweep().verdict == "clear"
    assert box.sweep(look=True).verdict == "clear"


def test_one_command_of_several(box: Box) -> None:
    """Its own tombstone, its own processes; command 12 is not command 1."""
    prepared = box.prepare()
    box.number = 0
    with box.command("echo up; exec sleep 100", prepared=prepared) as first:
        box.number = 11
        with box.command("echo up; exec sleep 100", prepared=prepared) as twelfth:
            first_line(first), first_line(twelfth)
            found = box.sweep(command=1)
            assert (found.verdict, [p.pid for p in found.processes]) == ("clear", [first.pid])
            assert twelfth.poll() is None
            late = run_marked(box, ["true"], prepared, mark={"number": 1})
            assert late.returncode in (marks.Exit.REFUSED, marks.Exit.PREAMBLE_FAILED)
            assert run_marked(box, ["true"], prepared, mark={"number": 13}).returncode == 0
            assert box.sweep().verdict == "clear"
    assert not list(Path(prepared.directory).glob(f"{box.turn}.*.cancelled")), "one for all is left"


def test_without_brands_the_environment_speaks(box: Box) -> None:
    """And the report says so, with the number of the command."""
    with box.command("setsid sleep 100 >/dev/null & echo up; wait", branded=False) as child:
        assert first_line(child) == "up"
        found = box.sweep(branded=False)
        assert (found.verdict, found.containment) == ("clear", "lineage-unbranded")
        assert {(p.evidence, p.command) for p in found.processes} == {("environ", 1)}


def test_a_child_without_any_mark_is_found_by_its_parent(box: Box) -> None:
    """Environment scrubbed and CPU limit changed, but still a child, in a session of its own."""
    text = "env -i prlimit --cpu=5000 setsid sleep 100 >/dev/null & echo up; wait"
    with box.command(text) as child:
        assert first_line(child) == "up"
        found = box.sweep()
        assert found.verdict == "clear"
        assert [p.evidence for p in found.processes if p.name == "sleep"] in (["parent"], ["brand"])
        assert len(found.processes) == 2


def test_a_member_of_the_session_is_found_after_its_parent_ended(box: Box) -> None:
    text = "(env -i prlimit --cpu=5000 sleep 100 >/dev/null &) ; echo up; exec sleep 100"
    with box.command(text) as child:
        assert first_line(child) == "up"
        found = box.sweep()
        assert found.verdict == "clear"
        assert len(found.processes) == 2


ZOMBIE_LEADER = """
import ctypes, sys, threading, time
def work():
    while True:
        with open(sys.argv[1], "a") as f: f.write("x")
        time.sleep(0.01)
threading.Thread(target=work).start()
print("up", flush=True)
ctypes.CDLL(None).syscall(60, 0)
"""


def test_a_leader_whose_main_thread_ended_still_runs(box: Box, tmp_path: Path) -> None:
    """proc(5): its state is Z while the other threads go on writing."""
    program = tmp_path / "leader.py"
    program.write_text(ZOMBIE_LEADER)
    log = tmp_path / "log"
    with box.command(f"exec {PYTHON} {program} {log}") as child:
        assert first_line(child) == "up"
        stat = Path(f"/proc/{child.pid}/stat")
        procs.wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", 10, "Z")
        found = box.sweep()
        assert found.verdict == "clear"
        assert names(by_pid(found, child.pid)) != []
        size = log.stat().st_size
        assert not Path(f"/proc/{child.pid}/task").exists() or child.wait(10) != 0
        assert log.stat().st_size == size


def test_a_zombie_does_not_run(box: Box) -> None:
    """Nobody reaps it: no signal, and quiet at once."""
    code = "import os,time\nos.fork() or os._exit(0)\nprint(1,flush=True)\ntime.sleep(100)"
    text = f"exec {PYTHON} -c '{code}'"
    with box.command(text) as child:
        first_line(child)
        found = box.sweep()
        assert found.verdict == "clear"
        assert [p.pid for p in found.processes if p.signals] == [child.pid]


@pytest.mark.parametrize("name", [") Z 1\n", "a) S 1 1 1", "x\ny", "é\x01", " "])
def test_a_name_cannot_hide_a_process(box: Box, name: str, tmp_path: Path) -> None:
    """/proc/PID/stat escapes nothing."""
    program = tmp_path / "named.py"
    program.write_text(
        textwrap.dedent(f"""
        import ctypes, time
        ctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0)
        print("up", flush=True)
        time.sleep(100)
        """)
    )
    with box.command(f"exec {PYTHON} {program}") as child:
        assert first_line(child) == "up"
        found = box.sweep()
        assert (found.verdict, by_pid(found, child.pid).look) == ("clear", "gone")


def test_the_ladder_is_climbed_only_as_far_as_needed(box: Box) -> None:
    """Obeys Ctrl-C: INT. Ignores it: TERM. Ignores both: KILL. Nobody gets a signal twice."""
    prepared = box.prepare()
    with (
        box.command("echo up; exec sleep 100", prepared=prepared) as obeys,
        box.command("trap '' INT; echo up; exec sleep 100", prepared=prepared) as no_int,
        box.command("trap '' INT TERM; echo up; exec sleep 100", prepared=prepared) as deaf,
    ):
        for child in (obeys, no_int, deaf):
            assert first_line(child) == "up"
        found = box.sweep()
        assert found.verdict == "clear"
        assert names(by_pid(found, obeys.pid)) == ["INT"]
        assert names(by_pid(found, no_int.pid)) == ["INT", "TERM"]
        assert names(by_pid(found, deaf.pid)) == ["INT", "TERM", "STOP", "KILL"]
        assert [obeys.wait(9), no_int.wait(9), deaf.wait(9)] == [-2, -15, -9]


def test_who_needs_its_grace_gets_it(box: Box, tmp_path: Path) -> None:
    """300 ms of a 750 ms grace: its trap runs to the end, no KILL."""
    done = tmp_path / "done"
    text = (
        f"trap '' INT; trap 'sleep 0.3; echo bye >{done}; exit 0' TERM; echo up; "
        "while :; do sleep 0.05; done"
    )
    with box.command(text) as child:
        assert first_line(child) == "up"
        found = box.sweep()
        assert found.verdict == "clear"
        assert "KILL" not in names(by_pid(found, child.pid))
        assert child.wait(9) == 0
    assert done.read_text() == "bye\n"


def test_a_stopped_process_runs_its_term_handler_first(box: Box, tmp_path: Path) -> None:
    done = tmp_path / "done"
    text = (
        f"trap '' INT; trap 'echo bye >{done}; exit 0' TERM; echo up; while :; do sleep 0.02; done"
    )
    with box.command(text) as child:
        assert first_line(child) == "up"
        os.kill(child.pid, signal.SIGSTOP)
        found = box.sweep()
        assert found.verdict == "clear"
        assert names(by_pid(found, child.pid))[:3] == ["INT", "TERM", "CONT"]
    assert done.read_text() == "bye\n"


SIGWAIT = """
import signal, sys, threading, time
signal.pthread_sigmask(signal.SIG_BLOCK, {2, 15})
def wait():
    got = signal.sigwait({2, 15})
    time.sleep(0.2)
    open(sys.argv[1], "w").write(signal.Signals(got).name)
    import os; os._exit(0)
threading.Thread(target=wait).start()
print("up", flush=True)
time.sleep(100)
"""


def test_a_blocked_signal_that_a_thread_waits_for_is_heard(box: Box, tmp_path: Path) -> None:
    """SigBlk of the main thread alone does not mean deaf."""
    program = tmp_path / "waits.py"
    program.write_text(SIGWAIT)
    with box.command(f"exec {PYTHON} {program} {tmp_path}/got") as child:
        assert first_line(child) == "up"
        found = box.sweep()
        assert (found.verdict, names(by_pid(found, child.pid))) == ("clear", ["INT"])
    assert (tmp_path / "got").read_text() == "SIGINT"


def test_a_terminal_that_was_just_interrupted_gets_no_second_int(one: Box) -> None:
    """Only the foreground group of a command whose PTY was sent Ctrl-C is spared."""
    main, side = os.openpty()
    prepared = one.prepare()
    argv = marks.preamble_argv(
        one.mark(prepared), ["sh", "-c", "trap '' INT; echo up; exec sleep 100"]
    )
    child = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *argv], stdin=side, stdout=side, stderr=side
    )
    os.close(side)
    try:
        assert b"up" in os.read(main, 100)
        found = one.sweep(no_int=[1])
        sleeper = next(p for p in found.processes if p.name == "sleep")
        assert (found.verdict, names(sleeper)) == ("clear", ["PTY", "TERM"])
    finally:
        os.close(main)
        child.wait(9)


def test_a_process_of_another_user_is_named_and_stops_nobody(one: Box) -> None:
    """EPERM (kill(2)): the others are stopped; the report says why this one is not."""
    one.uid = NOBODY
    prepared = one.prepare()
    one.number = 0
    words = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
    # Root starts it, so the other user's process can carry the turn's brand and environment.
    argv = marks.preamble_argv(
        marks.CommandMark(one.turn, 7, prepared.directory, NOBODY, prepared.namespace),
        ["sh", "-c", "echo up; exec sleep 100"],
    )
    child = subprocess.Popen(
        [*words, *argv], stdout=subprocess.PIPE, start_new_session=True, stdin=subprocess.DEVNULL
    )
    try:
        assert first_line(child) == "up"
        with one.command("echo up; exec sleep 100", prepared=prepared) as own:
            assert first_line(own) == "up"
            found = one.sweep()
            assert found.verdict == "alive"
            assert by_pid(found, own.pid).look == "gone"
            assert (by_pid(found, child.pid).look, by_pid(found, child.pid).problem) == (
                "alive",
                "EPERM",
            )
            assert child.poll() is None
        one.uid = 0
        assert one.sweep().verdict == "clear"
    finally:
        assert child.stdout is not None
        child.stdout.close()
        if (p := procs.read(child.pid)) is not None:
            procs.kill(p.pid, p.start)
        child.wait(9)


def test_an_unreadable_environment_does_not_hide(one: Box, unreadable: Path) -> None:
    """A non-dumpable process (ssh-agent, setgid): its brand speaks."""
    one.uid = NOBODY
    with one.command(f"exec {unreadable}") as child:
        assert first_line(child) == "up"
        seen = subprocess.run(
            ["setpriv", f"--reuid={NOBODY}", "--clear-groups", "cat", f"/proc/{child.pid}/environ"],
            capture_output=True,
            check=False,
        )
        assert b"Permission denied" in seen.stderr, "the case is not the case"
        found = one.sweep()
        assert (found.verdict, by_pid(found, child.pid).evidence) == ("clear", "brand")


def test_a_brand_that_another_turn_claims_is_neither_stopped_nor_cleared(box: Box) -> None:
    """Two keys with the same first 24 bits: 1 in 16,777,216, so it has to be made."""
    other = box.turn[:6] + "f" * 26
    twin = Box(other, box.shell)
    with twin.command("echo up; exec sleep 100") as child:
        assert first_line(child) == "up"
        found = box.sweep()
        assert found.verdict == "unknown"
        assert (by_pid(found, child.pid).problem, names(by_pid(found, child.pid))) == (
            "other-turn",
            [],
        )
        assert child.poll() is None
        assert twin.sweep().verdict == "clear"
    Path(f"/tmp/.fence/{other}.cancelled").unlink()
    assert box.sweep().verdict == "clear"


def test_a_forged_claim_does_not_hide_a_process(box: Box) -> None:
    """A command that names another turn in its variable keeps its brand."""
    text = "FENCE_LINEAGE=:00000000000000000000000000000000.1. exec sleep 100"
    with box.command(f"echo up; {text}") as child:
        assert first_line(child) == "up"
        found = box.sweep()
        assert (found.verdict, by_pid(found, child.pid).look) == ("clear", "gone")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\n",
        "fence1\n",
        "fence1 0 1 - - -\n",
        "fence1 1 1 - - -\n",
        "fence1 -1 1 - - -\n",
        "fence1 99999999999999999999 1 - - -\n",
        "fence1 {pid} 1 {boot} {ns} -\n",
        "fence1 {pid} {start} 00000000-0000-0000-0000-000000000000 {ns} -\n",
        "fence1 {pid} {start} {boot} {ns} 4242424242\n",
        "fence9 {pid} {start} {boot} {ns} -\n",
        "\0\xff\x80garbage $(touch /tmp/fence-evil) `x`\n",
        "fence1 $(kill\t{pid}) {start} {boot} {ns} -\n",
        "x" * 100_000,
    ],
)
def test_a_marker_that_lies_signals_nobody(one: Box, content: str) -> None:
    """Reused pid, other boot, foreign brand, pid 0, 1, -1, huge, empty, binary."""
    prepared = one.prepare()
    with procs.canary() as canary:
        text = content.format(
            pid=canary.pid,
            start=canary.start,
            boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            ns=f"i{Path('/proc/self/ns/pid').stat().st_ino}",
        )
        marker(prepared, one.turn, 3).write_bytes(text.encode("latin-1"))
        found = one.sweep()
        assert (found.verdict, found.processes) == ("clear", ())
        canary.assert_untouched()
    assert not Path("/tmp/fence-evil").exists()


@pytest.mark.parametrize("kind", ["fifo", "symlink", "directory", "number"])
def test_a_marker_of_another_kind_is_not_read(one: Box, kind: str, tmp_path: Path) -> None:
    prepared = one.prepare()
    place = marker(prepared, one.turn, 3)
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "symlink":
        place.symlink_to("/dev/zero")
    elif kind == "directory":
        place.mkdir()
    else:
        place.with_name("3;touch x").write_text("x")
    assert one.sweep().verdict == "clear"


def test_a_forged_marker_cannot_make_root_kill_another_users_process(one: Box) -> None:
    """The control is root; the marker is nobody's: it counts for nobody's processes only."""
    prepared = one.prepare()
    place = marker(prepared, one.turn, 3, NOBODY)
    place.parent.mkdir(parents=True, mode=0o700)
    with procs.canary() as canary:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        ns = Path("/proc/self/ns/pid").stat().st_ino
        place.write_text(f"fence1 {canary.pid} {canary.start} {boot} i{ns} -\n")
        for path in (place, place.parent, place.parent.parent):
            os.chown(path, NOBODY, NOBODY)
        found = one.sweep()
        assert (found.verdict, found.processes) == ("clear", ())
        canary.assert_untouched()


@pytest.mark.parametrize(
    "claim", ["fence1 12345 1 {boot} i9 -\n", "fence1 12345 1 {boot} {ns} -\nrefused\n"]
)
def test_another_uid_can_neither_block_nor_rewrite_the_proof(one: Box, claim: str) -> None:
    """The turn's key is no secret: any uid may make a marker directory for it."""
    prepared = one.prepare()
    place = marker(prepared, one.turn, 1, NOBODY)
    place.parent.mkdir(parents=True, mode=0o700)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    place.write_text(claim.format(boot=boot, ns=prepared.namespace))
    (place.parent / "2").write_text(claim.format(boot=boot, ns="i9"))
    for path in (place, place.parent / "2", place.parent, place.parent.parent):
        os.chown(path, NOBODY, NOBODY)
    with one.command("echo up; exec sleep 100", prepared=prepared) as child:
        assert first_line(child) == "up"
        found = one.sweep()
        assert found.verdict == "clear"
        first = next(m for m in found.markers if m.command == 1)
        assert (first.pid, first.outcome, first.branded) == (child.pid, "run", True)
        assert len([m for m in found.markers if m.command == 1]) == 1


def test_a_marker_names_a_process_that_shows_no_other_mark(one: Box) -> None:
    """Between tombstone test and exec nothing else can be seen of an unbranded command."""
    prepared = one.prepare()
    child = subprocess.Popen(["sleep", "100"], start_new_session=True)
    try:
        process = procs.read(child.pid)
        assert process is not None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        ns = Path("/proc/self/ns/pid").stat().st_ino
        marker(prepared, one.turn, 3).write_text(
            f"fence1 {child.pid} {process.start} {boot} i{ns} -\n"
        )
        found = one.sweep()
        assert (found.verdict, found.containment) == ("clear", "lineage-unbranded")
        assert (by_pid(found, child.pid).evidence, by_pid(found, child.pid).command) == (
            "marker",
            3,
        )
    finally:
        child.kill()
        child.wait(9)


def test_a_marker_of_another_pid_namespace_is_never_clear(one: Box) -> None:
    prepared = one.prepare()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    marker(prepared, one.turn, 3).write_text(f"fence1 77 1 {boot} i1 -\n")
    found = one.sweep()
    assert found.verdict == "unknown"
    assert any("another pid namespace" in note for note in found.notes)


@pytest.mark.parametrize("missing", ["grep", "sleep", "everything"])
def test_works_with_fewer_tools(
    shell: list[str], turn_id: str, tmp_path: Path, missing: str
) -> None:
    """Without grep it looks at each process by itself and says so."""
    box = Box(turn_id, shell)
    kept = (
        []
        if missing == "everything"
        else [t for t in ("grep", "ls", "rm", "sleep") if t != missing]
    )
    text = "trap '' INT; (env -i setsid sleep 100 >/dev/null 2>&1 &); echo up; exec sleep 100"
    with box.command(text) as child:
        assert first_line(child) == "up"
        shell_path = next(
            Path(p, shell[0]) for p in ("/usr/bin", "/bin") if Path(p, shell[0]).exists()
        )
        box.env = tools(tmp_path / "bin", *kept)
        box.shell = [str(shell_path), *shell[1:]]
        found = box.sweep()
        assert (found.verdict, len(found.processes)) == ("clear", 2)
        if shell[0] != "busybox" and missing != "sleep":
            assert any("no grep" in note for note in found.notes)
    box.env, box.shell = None, shell
    assert box.sweep().verdict == "clear"


def test_two_sweeps_at_once_and_one_more_are_safe(box: Box) -> None:
    """Its reply was lost, so it is run again; another process runs it, too."""
    with box.command("trap '' INT TERM; echo up; while :; do sleep 100; done") as child:
        assert first_line(child) == "up"
        run = [marks.new_run_token() for _ in range(3)]
        argvs = [marks.sweep_argv(box.turn, r, box.policy) for r in run]
        sweeps = [
            subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
            for argv in argvs
        ]
        for token, sweep in zip(run, sweeps, strict=True):
            out, err = sweep.communicate(timeout=30)
            found = report.parse_sweep(
                report.ControlOutput(sweep.returncode, out, err), box.turn, token
            )
            assert found.verdict == "clear"
    assert box.sweep().processes == ()


def test_the_sweep_never_signals_its_own_ancestors(one: Box) -> None:
    """A sweep of the turn that is run from inside the turn: it says that it cannot, and lives."""
    prepared = one.prepare()
    run = marks.new_run_token()
    argv = marks.sweep_argv(one.turn, run, one.policy)
    done = run_marked(one, ["sh", "-c", '"$@"; exit $?', "sh", *argv], prepared)
    found = report.parse_sweep(
        report.ControlOutput(done.returncode, done.stdout, done.stderr), one.turn, run
    )
    assert found.verdict == "alive"
    assert {p.problem for p in found.processes} == {"ancestor"}
    assert not any(p.signals for p in found.processes)


def test_a_tombstone_that_cannot_be_written_is_not_clear(one: Box) -> None:
    everywhere = "".join(f"mount -o remount,ro {p}; " for p in ("/tmp", "/var/tmp", "/dev/shm"))
    private = "".join(f"mount -t tmpfs none {p}; " for p in ("/tmp", "/var/tmp", "/dev/shm"))
    found = one.sweep(
        prefix=["unshare", "--mount", "sh", "-c", f'{private}{everywhere}exec "$@"', "sh"]
    )
    assert found.verdict == "unknown"
    assert any("tombstone" in note for note in found.notes)


def test_the_launcher_takes_the_fastest_shell_and_works_without_it(
    one: Box, tmp_path: Path
) -> None:
    with one.command("echo up; exec sleep 100") as child:
        assert first_line(child) == "up"
        assert one.sweep(launcher=True).verdict == "clear"
    one.env = tools(tmp_path / "bin", "dash", "sh", "grep", "ls", "rm", "sleep")
    one.shell = ["dash"]
    assert one.sweep(launcher=True).verdict == "clear"
    one.env = {**os.environ, "BASH_ENV": str(tmp_path / "evil"), "BASH_FUNC_kill%%": "() { :; }"}
    (tmp_path / "evil").write_text(f"touch {tmp_path}/ran")
    assert one.sweep(launcher=True).verdict == "clear"
    assert not (tmp_path / "ran").exists()


# Ends by itself after 15 s: no mistake of ours may leave one running.
CHAIN = r"""
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
int main(int n, char **v) {
  int us = atoi(v[1]);
  int beat = open(v[2], O_WRONLY | O_APPEND | O_CREAT, 0600);
  time_t end = time(0) + 15;
  while (time(0) < end && write(beat, ".", 1) == 1) {
    pid_t p = fork();
    if (p != 0) _exit(0);
    setsid();
    if (us) usleep(us);
  }
}
"""


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forks, detaches and exits, for ever: a live process is always younger than the listing."""
    folder = tmp_path_factory.mktemp("chain")
    (folder / "chain.c").write_text(CHAIN)
    subprocess.run(["cc", "-O1", "-o", folder / "chain", folder / "chain.c"], check=True)
    return folder / "chain"


@pytest.mark.parametrize("scrubbed", [False, True], ids=["environ", "scrubbed"])
@pytest.mark.parametrize("microseconds", [20_000, 5_000, 1_000])
def test_a_chain_that_always_moves_is_caught(
    one: Box, chain: Path, microseconds: int, scrubbed: bool, tmp_path: Path
) -> None:
    beat = tmp_path / "beat"

    def beats() -> int:
        return beat.stat().st_size if beat.exists() else 0

    command = f"{'env -i ' if scrubbed else ''}{chain} {microseconds} {beat}"
    with one.command(f"{command} >/dev/null 2>&1 & echo up") as child:
        assert first_line(child) == "up"
        child.wait(9)
        procs.wait_until(lambda: beats() > 3, 9, "the chain")
        before = beats()
        one.sweep(look=True, launcher=True)
        assert beats() > before, "a look takes long enough for a living chain to beat"
        while (found := one.sweep(launcher=True)).verdict != "clear":
            assert found.verdict == "alive"
        before = beats()
        one.sweep(look=True, launcher=True)
        assert beats() == before


def test_nobody_gets_a_second_int_from_a_second_sweep(box: Box, tmp_path: Path) -> None:
    """The reply of the first was lost in its middle; a handler that aborts on the second Ctrl-C."""
    log = tmp_path / "log"
    text = (
        f"trap 'echo INT >>{log}' INT; trap 'sleep 3' TERM; echo up; while :; do sleep 0.02; done"
    )
    with box.command(text) as child:
        assert first_line(child) == "up"
        argv = marks.sweep_argv(box.turn, marks.new_run_token(), box.policy)
        first = subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True)
        procs.wait_until(log.exists, 9, "the first INT")
        first.kill()
        first.wait(9)
        found = box.sweep()
        assert found.verdict == "clear"
        assert "INT" not in names(by_pid(found, child.pid))
    assert log.read_text() == "INT\n"


def test_a_command_that_was_stopped_alone_gets_no_second_int(box: Box, tmp_path: Path) -> None:
    log = tmp_path / "log"
    text = (
        f"trap 'echo INT >>{log}' INT; trap 'sleep 3' TERM; echo up; while :; do sleep 0.02; done"
    )
    with box.command(text) as child:
        assert first_line(child) == "up"
        argv = marks.sweep_argv(box.turn, marks.new_run_token(), box.policy, command=1)
        first = subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True)
        procs.wait_until(log.exists, 9, "the first INT")
        first.kill()
        first.wait(9)
        assert "INT" not in names(by_pid(box.sweep(), child.pid))
    assert log.read_text() == "INT\n"


@pytest.fixture
def freezer(tmp_path: Path) -> Iterator[Path]:
    """A cgroup whose members can be put into uninterruptible sleep (cgroup v1 freezer)."""
    mount = tmp_path / "freezer"
    mount.mkdir()
    subprocess.run(["mount", "-t", "cgroup", "-o", "freezer", "none", mount], check=True)
    group = mount / f"fence-test-{os.getpid()}"
    try:
        group.mkdir()
        yield group
        (group / "freezer.state").write_text("THAWED")
        for pid in (group / "cgroup.procs").read_text().split():
            (mount / "cgroup.procs").write_text(pid)
        procs.wait_until(lambda: not (group / "cgroup.procs").read_text(), 9, "an empty group")
        group.rmdir()
    finally:
        subprocess.run(["umount", mount], check=True)


def test_a_process_that_even_kill_cannot_end_is_bounded_and_named(one: Box, freezer: Path) -> None:
    """State D: the other is stopped, the sweep ends in time, and later the same turn is clear."""
    prepared = one.prepare()
    with (
        one.command("echo up; exec sleep 100", prepared=prepared) as stuck,
        one.command("echo up; exec sleep 100", prepared=prepared) as other,
    ):
        assert (first_line(stuck), first_line(other)) == ("up", "up")
        (freezer / "cgroup.procs").write_text(str(stuck.pid))
        (freezer / "freezer.state").write_text("FROZEN")
        state = Path(f"/proc/{stuck.pid}/stat")
        procs.wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "D", 9, "D")
        found = one.sweep()
        assert found.verdict == "alive"
        assert (by_pid(found, stuck.pid).look, by_pid(found, stuck.pid).state) == ("alive", "D")
        assert by_pid(found, other.pid).look == "gone"
        assert found.elapsed_ms < one.policy.sweep * 1000
        assert names(by_pid(found, stuck.pid))[-1] == "KILL"
        (freezer / "freezer.state").write_text("THAWED")
        assert one.sweep().verdict == "clear"


@pytest.mark.parametrize("branded", [True, False])
def test_a_second_sweep_knows_what_the_markers_said(box: Box, branded: bool) -> None:
    """The first one's reply was lost after it had removed them: the proof is not a weaker one."""
    with box.command("echo up; exec sleep 100", branded=branded) as child:
        assert first_line(child) == "up"
        first = box.sweep()
        second, third = box.sweep(), box.sweep()
    assert first.verdict == second.verdict == third.verdict == "clear"
    assert first.markers[0].branded is branded
    assert first.markers == second.markers == third.markers
    assert first.containment == third.containment


@pytest.mark.parametrize(
    "line", ["m x 0 1 1 1 run", "m 1 0 1 1 1 gone", "m", "end clear", "m 1 0 *"]
)
def test_a_tombstone_that_was_written_on_is_read_with_care(one: Box, line: str) -> None:
    prepared = one.prepare()
    Path(prepared.directory, f"{one.turn}.cancelled").write_text(f"fence1\n{line}\n")
    found = one.sweep()
    assert (found.verdict, found.markers) == ("clear", ())


@pytest.mark.parametrize("branded", [True, False])
def test_an_entry_that_cannot_be_read_is_not_gone(box: Box, branded: bool) -> None:
    """It bears the mark and its stat says nothing: could not tell, and no signal on a guess."""
    with box.command("echo up; exec sleep 100", branded=branded) as child:
        assert first_line(child) == "up"
        hide = f'mount --bind /dev/null /proc/{child.pid}/stat; exec "$@"'
        found = box.sweep(branded=branded, prefix=["unshare", "--mount", "sh", "-c", hide, "sh"])
        assert found.verdict == "unknown"
        assert any("cannot be read" in note for note in found.notes)
        assert child.poll() is None
        assert box.sweep(branded=branded).verdict == "clear"
        assert child.wait(9) != 0
