"""A turn in bare shells, without the library's async part: for sandboxes that are hard to come by.

`Bare` runs the three scripts under any prefix: another uid, another namespace. The
argument vectors and the parser are the library's; who lives is decided by /proc.
"""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from fence import EscalationPolicy
from fence.control import ControlOutput
from fence.lineage.marks import CommandMark, new_run_token, preamble_argv, prepare_argv, sweep_argv
from fence.lineage.report import PrepareReport, SweepReport, parse_prepare, parse_sweep

NOBODY = (
    "setpriv",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    "--inh-caps=-all",
    "--bounding-set=-all",
)
"""Runs what follows as an ordinary user."""


@dataclass
class Bare:
    """One turn. `control` and `command` are put before the scripts' and the commands' argv."""

    turn: str = field(default_factory=lambda: secrets.token_hex(16))
    control: Sequence[str] = ()
    command: Sequence[str] = ()
    branded: bool = True
    policy: EscalationPolicy = field(default_factory=EscalationPolicy)
    prepared: PrepareReport | None = None
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def _control(self, argv: Sequence[str]) -> ControlOutput:
        done = subprocess.run(
            [*self.control, *argv],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=self.policy.sweep + 20,
            cwd="/",
        )
        return ControlOutput(done.returncode, done.stdout, done.stderr)

    def prepare(self) -> PrepareReport:
        run = new_run_token()
        self.prepared = parse_prepare(self._control(prepare_argv(self.turn, run)), self.turn, run)
        return self.prepared

    def start(self, cmd: str, *, command: Sequence[str] | None = None) -> subprocess.Popen[bytes]:
        """Start `sh -c cmd` as the next command of the turn, in a session of its own."""
        prepared = self.prepared or self.prepare()
        mark = CommandMark(
            turn=self.turn,
            number=len(self.started) + 1,
            directory=prepared.directory,
            uid=prepared.uid,
            namespace=prepared.namespace,
            branded=self.branded and prepared.brand,
        )
        argv = [
            *(self.command if command is None else command),
            *preamble_argv(mark, ["/bin/sh", "-c", cmd]),
        ]
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        self.started.append(child)
        return child

    def sweep(self, *, look: bool = False, policy: EscalationPolicy | None = None) -> SweepReport:
        run = new_run_token()
        argv = sweep_argv(self.turn, run, policy or self.policy, look=look)
        return parse_sweep(self._control(argv), self.turn, run)

    def reap(self) -> list[int]:
        """Wait for the commands' first processes, which must be at their end, and return codes."""
        return [child.wait(20) for child in self.started]
