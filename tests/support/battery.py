"""The battery of commands: hostile ones that must stop, and ones that must not be disturbed.

`U` in a command stands for a unique number; each load puts a fresh one in its place, so that what
the command started is found by its argv. `$OUT` names a file that the caller provides.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support import procs

_FILE = Path(__file__).with_name("cases.json")
_UNIQUE = re.compile(r"\bU\b")


@dataclass(frozen=True)
class StopCase:
    """A command that must not outlive its turn. `token` is in the argv of all that it starts."""

    id: str
    what: str
    cmd: str
    needs: tuple[str, ...]
    token: str

    @property
    def missing(self) -> list[str]:
        """Programs that the command needs and this machine lacks."""
        return [program for program in self.needs if shutil.which(program) is None]


@dataclass(frozen=True)
class SameCase:
    """A command whose output, exit code and files must not depend on the fence."""

    cmd: str
    shell: str | None = None


@cache
def _raw() -> dict[str, Any]:
    raw = json.loads(_FILE.read_text(encoding="utf-8"))
    assert isinstance(raw, dict)
    return raw


def stop_ids() -> list[str]:
    """Return the ids of the hostile commands, for parametrize."""
    return [case["id"] for case in _raw()["stop"]]


def stop_case(case_id: str) -> StopCase:
    """Return a hostile command with a fresh unique number in place of `U`."""
    (raw,) = [case for case in _raw()["stop"] if case["id"] == case_id]
    token = procs.new_token()
    return StopCase(
        id=case_id,
        what=raw["what"],
        cmd=_UNIQUE.sub(token, raw["cmd"]),
        needs=tuple(raw["needs"]),
        token=token,
    )


def same_cases() -> list[SameCase]:
    """Return the commands that must behave the same with and without the fence."""
    plain = [SameCase(cmd) for cmd in _raw()["same"]]
    shells = [SameCase(case["cmd"], case["shell"]) for case in _raw()["same_with_shell"]]
    return plain + shells


def heredoc(size: int, *, quotes: bool) -> str:
    """Return a command of exactly `size` bytes that counts and hashes its own heredoc."""
    head, tail = "cat <<'EOF' | cksum\n", "\nEOF\n"
    body = "'" if quotes else "x"
    return head + body * (size - len(head) - len(tail)) + tail
