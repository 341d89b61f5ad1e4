"""Process numbers that wrap around while a turn is stopped, in a pid namespace of 1,000 numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attack.wrap_worker import PID_MAX

ROOT = Path(__file__).parents[2]
# The shell stays as the namespace's first process: it reaps the orphans of the chain.
INSIDE = f'echo {PID_MAX} >/proc/sys/kernel/pid_max && "$@"; exit $?'


def _own_pid_max() -> bool:
    """Whether a pid namespace has its own pid_max; before Linux 6.14 it is the whole machine's."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return os.geteuid() == 0 and found is not None and (int(found[1]), int(found[2])) >= (6, 14)


@pytest.mark.skipif(not _own_pid_max(), reason="needs root and a pid_max of its own")
@pytest.mark.parametrize("rounds", [20])
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_chain_that_wraps_around(rounds: int, tmp_path: Path) -> None:
    worker = [sys.executable, "-m", "tests.attack.wrap_worker", str(tmp_path), str(rounds)]
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    done = subprocess.run(
        [*unshare, "sh", "-c", INSIDE, "sh", *worker],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    answers = [line.split() for line in done.stdout.splitlines()]
    assert len(answers) == rounds
    for verdict, snapshot, beats, later in answers:
        assert verdict == "clear"
        assert snapshot in ("consistent", "sampled")
        assert int(beats) > 2 * PID_MAX
        assert beats == later
