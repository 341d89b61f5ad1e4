"""A worker dies by SIGKILL in mid-turn; another process stops the turn that it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fence.receipt import QuiescenceReceipt
from tests.battery.test_many import ENVIRONMENT, WORKER
from tests.battery.worker import SLEEPS
from tests.support import procs

QUIESCE = """
import sys
from fence import quiesce_turn
from tests.battery._tools import run, unix_local

async def main():
    async with unix_local() as session:
        print((await quiesce_turn(session, sys.argv[1])).to_json())

run(main)
"""


@pytest.mark.parametrize("tty", ["pipe", pytest.param("tty", marks=pytest.mark.slow)])
def test_quiesce_turn_from_a_new_process(tty: str, turn_id: str) -> None:
    token = procs.new_token()
    environment = {**os.environ, **ENVIRONMENT, "TURN_ID": turn_id, "TOKEN": token}
    arguments = [sys.executable, str(WORKER), "abandoned", str(len(SLEEPS)), tty, "1"]
    with (
        procs.canary() as canary,
        procs.canary(env={"FENCE_LINEAGE": f":{turn_id[:-1]}.1."}),
        subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE) as worker,
    ):
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"up\n"
            workspaces = {procs.environ(p.pid).get("HOME") for p in procs.find(token)}
            worker.kill()
            assert worker.wait() == -9
            orphans = [process for process in procs.find(token) if process.name == "sleep"]
            assert orphans != [], "the negative control: nothing outlived the worker"

            second = subprocess.run(
                [sys.executable, "-c", QUIESCE, turn_id],
                env={**os.environ, **ENVIRONMENT},
                capture_output=True,
                text=True,
                check=False,
                timeout=40,
            )
            assert second.returncode == 0, second.stderr
            left = procs.find(token)
            assert left == [], [str(process) for process in left]
            receipt = QuiescenceReceipt.from_json(second.stdout)
            assert receipt.proven
            assert receipt.origin == "other-process"
            assert receipt.containment == "lineage"
            stopped = {(p.pid, p.start) for box in receipt.sandboxes for p in box.stopped}
            assert {(p.pid, p.start) for p in orphans} <= stopped
            assert canary.pid not in {pid for pid, _ in stopped}
            assert receipt.commands != ()
            assert {command.started_at for command in receipt.commands} == {None}, "nobody knows"
        finally:
            worker.kill()
            procs.end(procs.find(token))
    for workspace in workspaces - {None, os.environ.get("HOME")}:
        # The dead worker could not remove its own.
        assert workspace is not None
        _remove(Path(workspace))


def _remove(workspace: Path) -> None:
    for path in sorted(workspace.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    workspace.rmdir()


def test_a_turn_that_never_was_is_quiet(turn_id: str) -> None:
    second = subprocess.run(
        [sys.executable, "-c", QUIESCE, turn_id],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=True,
        timeout=40,
    )
    answer = json.loads(second.stdout)
    assert answer["proven"]
    assert [box["stopped"] for box in answer["sandboxes"]] == [[]]
    # Perhaps it is only a slip of the pen in the id.
    assert "right id" in str(answer["sandboxes"][0]["notes"])
