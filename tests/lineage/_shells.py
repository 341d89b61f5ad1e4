"""Runs the three scripts in a bare shell, as a provider's control channel would."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fence.control import ControlOutput
from fence.escalation import EscalationPolicy
from fence.lineage import marks, report
from tests.support import procs

SHELLS = {"dash": ["dash"], "bash": ["bash"], "ash": ["busybox", "ash"]}
NOBODY = 65534
SECONDS = 40


@dataclass
class Box:
    """One turn in the bare sandbox that this machine is; `shell` runs our scripts."""

    turn: str
    shell: list[str] = field(default_factory=lambda: ["dash"])
    uid: int = 0
    policy: EscalationPolicy = field(default_factory=EscalationPolicy)
    env: Mapping[str, str] | None = None
    number: int = 0

    def words(self, argv: Sequence[str]) -> list[str]:
        """Put the shell under test in the place of `sh`, and the user under test in front."""
        as_user = (
            ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
            if self.uid
            else []
        )
        return [*as_user, *self.shell, *argv[1:]]

    def control(self, argv: Sequence[str], prefix: Sequence[str] = ()) -> ControlOutput:
        done = subprocess.run(
            [*prefix, *self.words(argv)],
            capture_output=True,
            start_new_session=True,
            timeout=SECONDS,
            env=self.env,
            check=False,
        )
        return ControlOutput(done.returncode, done.stdout, done.stderr)

    def prepare(self, prefix: Sequence[str] = ()) -> report.PrepareReport:
        run = marks.new_run_token()
        output = self.control(marks.prepare_argv(self.turn, run), prefix)
        return report.parse_prepare(output, self.turn, run)

    def sweep(
        self,
        *,
        command: int | None = None,
        look: bool = False,
        no_int: Sequence[int] = (),
        branded: bool = True,
        prefix: Sequence[str] = (),
        launcher: bool = False,
    ) -> report.SweepReport:
        """Sweep in the shell under test; `launcher` lets the sweep choose the shell itself."""
        run = marks.new_run_token()
        argv = marks.sweep_argv(
            self.turn,
            run,
            self.policy,
            command=command,
            look=look,
            no_int=no_int,
            branded=branded,
        )
        if not launcher:
            argv = ["sh", "-c", argv[4], argv[3], *argv[5:]]
        return report.parse_sweep(self.control(argv, prefix), self.turn, run)

    def mark(self, prepared: report.PrepareReport, **changes: object) -> marks.CommandMark:
        self.number += 1
        values = {
            "turn": self.turn,
            "number": self.number,
            "directory": prepared.directory,
            "uid": prepared.uid,
            "namespace": prepared.namespace,
        }
        return marks.CommandMark(**(values | changes))  # type: ignore[arg-type]

    @contextmanager
    def command(
        self,
        text: str,
        *,
        prepared: report.PrepareReport | None = None,
        uid: int | None = None,
        branded: bool = True,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start a marked command; when the block ends it is ended and reaped, whatever happened.

        A command that prints something has been started when its first line was read.
        """
        prepared = prepared or self.prepare()
        argv = marks.preamble_argv(self.mark(prepared, branded=branded), ["sh", "-c", text])
        words = [*prefix, *self.shell, *argv[1:]]
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=env,
            user=uid if uid is not None else (self.uid or None),
        )
        try:
            yield child
        finally:
            if child.stdout is not None:
                child.stdout.close()
            if child.poll() is None and (p := procs.read(child.pid)) is not None:
                procs.kill(p.pid, p.start)
            child.wait(timeout=SECONDS)


def run_marked(
    box: Box, argv: Sequence[str], prepared: report.PrepareReport, **keywords: object
) -> subprocess.CompletedProcess[bytes]:
    """Run a marked command to its end in the shell under test."""
    changes = keywords.pop("mark", {})
    prefix = keywords.pop("prefix", [])
    words = marks.preamble_argv(box.mark(prepared, **changes), argv)  # type: ignore[arg-type]
    return subprocess.run(
        [*prefix, *box.words(words)],  # type: ignore[misc]
        capture_output=True,
        timeout=SECONDS,
        check=False,
        **({"start_new_session": True} | keywords),  # type: ignore[call-overload]
    )


def marker(prepared: report.PrepareReport, turn: str, number: int, uid: int | None = None) -> Path:
    """Where the marker of a command lies."""
    owner = prepared.uid if uid is None else uid
    return Path(prepared.directory) / str(owner) / turn / str(number)


def first_line(child: subprocess.Popen[bytes]) -> str:
    """Wait until the command printed a line: it has been exec'd and is where the test needs it."""
    assert child.stdout is not None
    return child.stdout.readline().decode().strip()


def tools(directory: Path, *names: str) -> dict[str, str]:
    """An environment whose PATH holds only these programs."""
    directory.mkdir(exist_ok=True)
    for name in names:
        found = next(
            Path(p, name) for p in ("/usr/bin", "/bin", "/usr/sbin") if Path(p, name).exists()
        )
        (directory / name).symlink_to(found)
    return {**os.environ, "PATH": str(directory)}
