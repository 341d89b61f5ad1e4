"""Commands behave the same with and without the fence: output, exit code, files, surroundings.

The unfenced session is the oracle: both sides run the same code, in sandboxes of the same make.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from agents.sandbox.session import SandboxSession

from fence import TurnFence
from tests.battery._tools import Tools, banner, run, unix_local
from tests.support.battery import SameCase, heredoc, same_cases

# Beyond the battery: what a wrapper would disturb that keeps a shell, a variable, a descriptor or
# a signal disposition of its own, or that splices text into the command.
MORE = [
    "trap 'echo bye; exit 9' EXIT; true",
    "exec echo replaced",
    "echo 'bang!' \"a!b\" a!b",
    "x=$(cat <<'EOF'\nit's\nEOF\n); echo \"$x\"",
    "false ||",
    "echo a \\\n",
    "set -x; echo traced",
    'echo "$#" "$*" "$-"',
    "set | grep -v -e FENCE_ -e PPID -e OLDPWD | sort",
    "env | grep -v -e ^FENCE_ | sort",
    "alias",
    "ls /proc/self/fd",
    "grep ^Sig[IC] /proc/$$/status",
    "grep ^Sig[BIC] /proc/self/status",
    "cut -d' ' -f5,6,8 /proc/$$/stat | sed \"s/\\b$$\\b/ME/g\"",
    "nice; cat /proc/$$/oom_score_adj; cat /proc/$$/coredump_filter",
    "ulimit -a | grep -v 'time(\\|cpu time'",
    "ulimit -Ht",
    "wc -c < /proc/$$/comm; cat /proc/$$/comm",
    "touch made; mkdir -m 0777 there; ls -ld made there | cut -c1-10",
    'echo "${OLDPWD-unset}"; cd - >/dev/null 2>&1; echo $?',
]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"login": False},
    {"shell": "/bin/bash"},
    {"shell": "/bin/bash", "login": False},
]
PROFILE = "echo profile >> ran-at-login\n"


def _case_id(case: SameCase) -> str:
    return repr(case.cmd[:40])


def _tree(root: Path) -> dict[str, tuple[int, bytes | None]]:
    return {
        str(path.relative_to(root)): (
            path.stat().st_mode,
            path.read_bytes() if path.is_file() else None,
        )
        for path in sorted(root.rglob("*"))
    }


def _plain(data: str | bytes, session: SandboxSession) -> str:
    text = data.decode("utf-8", "backslashreplace") if isinstance(data, bytes) else data
    return text.replace(str(session.state.manifest.root), "WORKSPACE")


async def _through_the_tool(
    session: SandboxSession, tools: Tools, case: SameCase, tty: bool, variant: dict[str, Any]
) -> tuple[str, Any, Any]:
    """Return how it ended, the exit code and the output of one command."""
    arguments = {"tty": tty, "yield_time_ms": 20_000, **variant}
    if case.shell:
        arguments["shell"] = case.shell
    waits_for_input = tty and "read x" in case.cmd
    if waits_for_input:
        arguments["yield_time_ms"] = 250
    try:
        answer = banner(await tools.exec_command(case.cmd, **arguments))
        body = answer.body
        if waits_for_input:
            assert answer.session_id is not None
            answer = banner(
                await tools.write_stdin(answer.session_id, chars="typed\n", yield_time_ms=20_000)
            )
            body += answer.body
    except OSError as error:
        return type(error).__name__, error.errno, None
    lines = _plain(body, session).split("\n")
    # stdout and stderr are two pipes that the SDK reads in no fixed order.
    return "ended", answer.exit_code, lines if tty else sorted(lines)


async def _bounded(parallel: int, work: Iterable[Any]) -> list[Any]:
    gate = asyncio.Semaphore(parallel)

    async def one(item: Any) -> Any:
        async with gate:
            return await item

    return await asyncio.gather(*(one(item) for item in work))


def _plant(session: SandboxSession) -> Path:
    root = Path(session.state.manifest.root)
    (root / ".profile").write_text(PROFILE)
    (root / ".bash_profile").write_text(PROFILE)
    return root


@pytest.mark.parametrize("tty", [pytest.param(False, id="pipe"), pytest.param(True, id="pty")])
@pytest.mark.parametrize(
    "variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())) or "plain"
)
def test_tool_answers_are_the_same(variant: dict[str, Any], tty: bool) -> None:
    cases = [*same_cases(), *(SameCase(cmd) for cmd in MORE)]

    async def one_side(session: SandboxSession, fence: TurnFence | None) -> tuple[Any, Any]:
        root = _plant(session)
        tools = Tools(session, fence)
        parallel = (_through_the_tool(session, tools, case, tty, variant) for case in cases)
        return await _bounded(6, parallel), _tree(root)

    async def main() -> None:
        async with unix_local() as raw, unix_local() as fenced, TurnFence() as fence:
            plain = await one_side(raw, None)
            ours = await one_side(fenced, fence)
        different = {
            _case_id(case): (one, other)
            for case, one, other in zip(cases, plain[0], ours[0], strict=True)
            if one != other
        }
        assert different == {}
        assert plain[1] == ours[1]

    run(main)


def test_exec_keeps_stdout_and_stderr_apart() -> None:
    cases = [*same_cases(), *(SameCase(cmd) for cmd in MORE)]

    async def one(session: Any, root: SandboxSession, case: SameCase) -> tuple[Any, ...]:
        shell = [case.shell, "-c"] if case.shell else True
        result = await session.exec(case.cmd, shell=shell)
        return result.exit_code, _plain(result.stdout, root), _plain(result.stderr, root)

    async def main() -> None:
        async with unix_local() as raw, unix_local() as fenced, TurnFence() as fence:
            wrapped = fence.wrap_session(fenced)
            plain = await _bounded(6, (one(raw, raw, case) for case in cases))
            ours = await _bounded(6, (one(wrapped, fenced, case) for case in cases))
        different = {
            _case_id(case): (a, b) for case, a, b in zip(cases, plain, ours, strict=True) if a != b
        }
        assert different == {}

    run(main)


@pytest.mark.parametrize("quotes", [False, True], ids=["plain", "quotes"])
@pytest.mark.parametrize("tty", [False, True], ids=["pipe", "pty"])
def test_long_commands_start_wherever_they_do_without_the_fence(tty: bool, quotes: bool) -> None:
    async def main() -> None:
        async with unix_local() as session, TurnFence() as fence:
            # UnixLocal puts its own `cd` before the text of `sh -c`, not before that of another
            # shell; 131,071 bytes are what the kernel takes as one argument.
            around = len(f"cd {shlex.quote(str(session.state.manifest.root))} && ")
            sizes = [
                *((size, {}) for size in (60_000, 90_000, 120_000, 131_071 - around)),
                (131_071, {"shell": "/bin/bash", "login": False}),
                (131_072, {"shell": "/bin/bash", "login": False}),
            ]
            for size, variant in sizes:
                case = SameCase(heredoc(size, quotes=quotes))
                plain = await _through_the_tool(session, Tools(session, None), case, tty, variant)
                ours = await _through_the_tool(session, Tools(session, fence), case, tty, variant)
                assert plain[:2] == (("OSError", 7) if size == 131_072 else ("ended", 0)), size
                assert plain == ours, size

    run(main)


def test_a_command_sees_two_traces_of_the_fence_and_no_third() -> None:
    """Without this control the comparisons above could pass because nothing was fenced."""
    look = "ulimit -t; env | grep -c ^FENCE_LINEAGE="

    async def main() -> None:
        async with unix_local() as session:
            assert banner(await Tools(session, None).exec_command(look)).body == "unlimited\n0\n"
            async with TurnFence() as fence:
                seen = banner(await Tools(session, fence).exec_command(look)).body.split()
                assert 1e9 <= int(seen[0]) < 1.8e10
                assert seen[1] == "1"
            async with TurnFence(brand=False) as fence:
                seen = banner(await Tools(session, fence).exec_command(look)).body.split()
                assert seen == ["unlimited", "1"]

    run(main)
