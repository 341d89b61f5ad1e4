"""The demo: what it draws from a recording, what it calls a success, and one real run of it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.support import procs

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import demo_record  # noqa: E402
import demo_svg  # noqa: E402
import demo_text  # noqa: E402
import demo_turn  # noqa: E402


def _process(pid: int) -> procs.Process:
    return procs.Process(pid, 1, 1, pid, pid, "S", "sleep", ("sleep", "4000000000"))


def _recording(*, survivors: int, proved: bool) -> demo_record.Recording:
    """Seven commands from 0.2 s; Stop at 1 s; all but `survivors` gone at 1.5 s; 2.5 s in all."""
    lanes = []
    for number, (title, _, _) in enumerate(demo_turn.COMMANDS, 1):
        until = None if number <= survivors else 1.5
        seen = [demo_record.Seen(_process(100 + number), 0.2, until)]
        signals = [(1.1, "INT"), (1.2, "TERM"), (1.4, "KILL")] if proved else []
        lanes.append(
            demo_record.Lane(number, title, "", "", f"call-{number}", seen=seen, signals=signals)
        )
    lanes[-1].saved = proved
    record = demo_record.Recording("A turn", "who stops it", lanes)
    record.stop, record.answered, record.answer = 1.0, 1.6, "proved" if proved else "closed"
    record.proved, record.end = proved, 2.5
    if proved:
        record.sweeps.append((1.02, 1.58))
    return record


FENCED = _recording(survivors=0, proved=True)
ALONE = _recording(survivors=4, proved=False)


@pytest.mark.parametrize("width", [20, 60, 80, 100, 118])
@pytest.mark.parametrize("record", [FENCED, ALONE], ids=["fence", "alone"])
@pytest.mark.parametrize("glyphs", [demo_text.Glyphs(), demo_text.ASCII], ids=["utf8", "ascii"])
def test_a_timeline_fits_its_width(width, record, glyphs):
    window = demo_record.common_window(FENCED, ALONE)
    for at in (window, None):
        lines = demo_text.timeline(record, width=width, glyphs=glyphs, window=at)
        assert len(lines) == 1 + len(record.lanes) + 1
        assert max(line.cell_len for line in lines) <= max(width, 62)
        assert glyphs is not demo_text.ASCII or all(line.plain.isascii() for line in lines)


def test_a_timeline_tells_without_colour_who_survived():
    window = demo_record.common_window(FENCED, ALONE)
    alone = [line.plain for line in _lines(ALONE, window)]
    assert sum("STILL RUNNING" in line for line in alone) == 4
    assert sum("▶" in line for line in alone) == 4
    fenced = [line.plain for line in _lines(FENCED, window)]
    assert not any("STILL" in line for line in fenced)
    assert all(re.search(r"C.*T.*K.*○ *·* +gone", line) for line in fenced[1:8])
    assert "saved" in fenced[7]
    assert "proved +0.60 s" in fenced[8]


def _lines(record, window):
    return demo_text.timeline(record, width=100, glyphs=demo_text.Glyphs(), window=window)


def test_both_panels_put_stop_at_the_same_place():
    window = demo_record.common_window(FENCED, dataclasses.replace(ALONE, stop=0.9))
    axis = {_lines(record, window)[0].plain.index("Stop") for record in (FENCED, ALONE)}
    assert len(axis) == 1


def test_the_svg_is_well_formed_and_needs_nothing_from_outside():
    text = demo_svg.draw(FENCED, ALONE)
    root = ET.fromstring(text)
    assert root.tag.endswith("svg")
    outside = re.findall(r"(?:href|src|url|@import)", text)
    assert outside == []
    assert "prefers-color-scheme:dark" in text
    assert text.count(">still running<") == 4


def test_the_story_is_told_in_order_of_time():
    story = sorted(demo_turn.story(FENCED))
    words = [line for _, line in story]
    assert words.index("Stop pressed") < words.index("sweep: reported")
    assert words[-1] == "PROVED: nothing of the turn is running"


@pytest.mark.parametrize(
    ("fenced", "alone", "good"),
    [
        (FENCED, ALONE, True),
        (FENCED, _recording(survivors=0, proved=False), False),
        (_recording(survivors=1, proved=True), ALONE, False),
        (dataclasses.replace(FENCED, proved=False), ALONE, False),
    ],
    ids=["as expected", "SDK left none", "fence left one", "not proved"],
)
def test_only_the_expected_end_is_a_success(fenced, alone, good):
    assert demo_turn.verdict(fenced, alone)[0] is good


def test_the_verdict_is_one_line_that_a_person_understands():
    assert demo_turn.verdict(FENCED, ALONE)[1] == (
        "With the fence: 0 of 7 commands left anything running (proved in 0.6 s). "
        "SDK alone: 4 of 7 did; 4 processes survived Stop."
    )


def test_the_eyes_see_a_process_come_change_and_go():
    token = procs.new_token()
    record = demo_record.Recording("t", "a", [demo_record.Lane(1, "t", "", token, "call-1")])
    eyes = demo_record.Eyes(record)
    (lane,) = record.lanes
    with subprocess.Popen(["sh", "-c", f"read x; exec sleep {token}"], stdin=-1) as child:
        eyes.look()
        assert [s.process.argv[0] for s in lane.running] == ["sh"]
        assert child.stdin is not None
        child.stdin.write(b"go\n")
        child.stdin.close()

        def became_sleep() -> bool:
            eyes.look()
            return lane.running[0].process.argv[0] == "sleep"

        procs.wait_until(became_sleep, 5, "exec")
        child.kill()
    eyes.look()
    assert lane.running == []
    assert lane.gone is not None


@pytest.mark.slow
def test_the_demo_in_a_pipe(tmp_path: Path):
    svg, receipt = tmp_path / "t.svg", tmp_path / "r.json"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/demo_turn.py", "--svg", svg, "--receipt", receipt],
        capture_output=True,
        timeout=55,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        check=False,
    )
    text = done.stdout.decode()
    assert done.returncode == 0, text + done.stderr.decode()
    assert b"\x1b" not in done.stdout
    assert done.stderr == b""
    assert text.rstrip().splitlines()[-1].startswith("With the fence: 0 of 7 commands left")
    assert ET.parse(svg).getroot().tag.endswith("svg")
    assert '"proven": true' in receipt.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"t.svg", "r.json"}
