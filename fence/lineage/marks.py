"""What makes a lineage visible, and the argument vectors of the three scripts.

A mark is inherited: the variable FENCE_LINEAGE, the brand (a soft CPU-time limit nobody would
choose, setrlimit(2) RLIMIT_CPU), and the marker file that names a command's first process.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib.resources import files

from fence.errors import FenceUsageError
from fence.escalation import EscalationPolicy

PROTOCOL = 1
"""Version of the files in the sandbox, of the scripts' arguments and of their reports."""

MARK_VARIABLE = "FENCE_LINEAGE"
BRANDS_PER_TURN = 1000

# One argument may have MAX_ARG_STRLEN - 1 bytes (execve(2), 32 pages of 4 KiB).
MAX_ARGUMENT_BYTES = 131_071

_TURN_KEY = re.compile(r"[0-9a-f]{32}")


class Exit(IntEnum):
    """Exit codes of the three scripts; tests hold the .sh files to this table."""

    CLEAR = 0
    ALIVE = 75
    UNKNOWN = 76
    PREAMBLE_FAILED = 125
    REFUSED = 130


def turn_key(turn_id: str | None) -> str:
    """Return the 32 hex digits that stand for a turn in the sandbox.

    A new random key for None; a key given as such stays itself, anything else is hashed, so a
    worker can use its own id and another process can find the same key.

    Raises:
        FenceUsageError: `turn_id` is neither None nor a non-empty str.
    """
    if turn_id is None:
        return secrets.token_hex(16)
    if not isinstance(turn_id, str) or not turn_id:
        raise FenceUsageError("turn_id", turn_id, "None or a non-empty str")
    if _TURN_KEY.fullmatch(turn_id):
        return turn_id
    return hashlib.sha256(turn_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def brand_prefix(turn: str) -> int:
    """Return what all brands of a turn start with; brand n is `prefix * 1000 + n % 1000`.

    The prefix is 1,000,000 plus the key's first 24 bits, so brands lie in 1.0e9 .. 1.78e10 seconds
    (below 1.8e10, where the kernel's nanoseconds would overflow). Two turns in one sandbox share a
    prefix with probability 1 in 16,777,216; the sweep then says "could not tell", never signals.
    """
    return 1_000_000 + int(turn[:6], 16)


def brand(turn: str, number: int) -> int:
    """Return the brand, in seconds of CPU time, of the turn's command `number`."""
    return brand_prefix(turn) * BRANDS_PER_TURN + number % BRANDS_PER_TURN


# bash reads a file of /proc in one call where dash and busybox make one for each byte: a sweep of
# 60 commands takes half the time. -p: no BASH_ENV, no functions from the environment.
_FASTEST_SHELL = """script=$1
shift
command -v bash >/dev/null 2>&1 && exec bash -p -c "$script" "$0" "$@"
eval "$script"
"""


@cache
def script(name: str) -> str:
    """Return the text of one of our shell scripts (`preamble`, `prepare`, `sweep`).

    Comment lines and indentation are dropped: the text travels with every command.
    """
    text = (files("fence.lineage") / f"{name}.sh").read_text(encoding="utf-8")
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("#")) + "\n"


@dataclass(frozen=True)
class CommandMark:
    """The marks of one command. `directory`, `uid` and `namespace` come from the prepare run."""

    turn: str
    number: int
    directory: str
    uid: int
    namespace: str
    branded: bool = True


def preamble_argv(mark: CommandMark, argv: Sequence[str]) -> list[str]:
    """Return the argument vector that starts `argv` as a marked process group leader.

    The first word stays `sh` only where the user's does: UnixLocal rewrites `sh -c` (and only
    that) into a `cd` of its own, and the user's command has to see the same working directory.
    """
    if not argv:
        raise FenceUsageError("argv", argv, "at least one word")
    first = "sh" if argv[0] == "sh" and len(argv) > 2 and argv[1] == "-c" else "/bin/sh"
    return [
        first,
        "-c",
        'eval "$1"',
        "sh",
        script("preamble"),
        mark.directory,
        str(mark.uid),
        mark.turn,
        str(mark.number),
        str(brand(mark.turn, mark.number)) if mark.branded else "-",
        mark.namespace,
        *argv,
    ]


def prepare_argv(turn: str, run: str) -> list[str]:
    """Return the argument vector of the prepare run (directory, probe of containment)."""
    return ["sh", "-c", script("prepare"), "fence-prepare", str(PROTOCOL), turn, run]


def sweep_argv(
    turn: str,
    run: str,
    policy: EscalationPolicy,
    *,
    command: int | None = None,
    look: bool = False,
    no_int: Iterable[int] = (),
    branded: bool = True,
    brands_unique: bool = True,
) -> list[str]:
    """Return the argument vector of a sweep.

    Args:
        turn: the turn's key.
        run: a fresh token; the report repeats it, so that a late or foreign one is told apart.
        policy: graces and caps; the script counts in hundredths of a second.
        command: stop this command only (its own tombstone), not the whole turn.
        look: report only; no tombstone, no signal, nothing removed.
        no_int: numbers of the commands whose PTY has just been sent Ctrl-C.
        branded: False where the fence gives its commands no brand.
        brands_unique: False once more than 1,000 commands were numbered: one brand then stands
            for several commands and is no evidence for a single one.
    """
    if not branded or (command is not None and not brands_unique):
        pattern = "-"
    elif command is None:
        pattern = f"{brand_prefix(turn)}[0-9][0-9][0-9]"
    else:
        pattern = str(brand(turn, command))
    return [
        "sh",
        "-c",
        _FASTEST_SHELL,
        "fence-sweep",
        script("sweep"),
        str(PROTOCOL),
        turn,
        run,
        "-" if command is None else str(command),
        "look" if look else "stop",
        pattern,
        str(_hundredths(policy.int_grace)),
        str(_hundredths(policy.term_grace)),
        str(_hundredths(policy.sweep)),
        "," + "".join(f"{n}," for n in sorted(set(no_int))),
        str(policy.max_signalled),
        f":{turn}." if command is None else f":{turn}.{command}.",
    ]


def new_run_token() -> str:
    """Return a token that names one control run."""
    return secrets.token_hex(8)


def _hundredths(seconds: float) -> int:
    return max(0, round(seconds * 100))
