from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.support import battery, procs


def test_every_case_has_its_own_number():
    cases = [battery.stop_case(case_id) for case_id in battery.stop_ids()]
    assert len(cases) == 28
    assert len({case.token for case in cases}) == 28
    for case in cases:
        assert "U" not in case.cmd.replace("$OUT", "").replace("SIG_BLOCK", ""), case.id
        if case.id != "graceful":
            assert case.token in case.cmd, case.id


def test_a_case_leaves_out_untouched_and_names_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    assert '"$OUT"' in battery.stop_case("late-writer").cmd
    monkeypatch.setattr(shutil, "which", lambda program: None)
    assert battery.stop_case("setsid-child").missing == ["setsid"]
    assert battery.stop_case("plain").missing == []


def test_the_same_cases_come_with_and_without_a_shell():
    cases = battery.same_cases()
    assert len(cases) == 35
    assert {case.shell for case in cases} == {None, "/bin/bash"}


@pytest.mark.parametrize("quotes", [False, True])
def test_a_heredoc_has_the_size_it_says_and_runs(quotes: bool):
    command = battery.heredoc(120_000, quotes=quotes)
    assert len(command) == 120_000
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == str(120_000 - len("cat <<'EOF' | cksum\n" + "\nEOF\n") + 1)


def test_without_a_fence_a_case_survives_and_is_found():
    """The negative control of every "nothing survives" test: the checker does see a survivor."""
    case = battery.stop_case("setsid-child")
    shell = subprocess.Popen(["sh", "-c", case.cmd], start_new_session=True)
    procs.wait_until(lambda: any("sleep" in p.name for p in procs.find(case.token)), 5, "sleep")
    shell.terminate()
    shell.wait()
    survivors = procs.find(case.token)
    assert [p.name for p in survivors] == ["sleep"]
    procs.end(survivors)
