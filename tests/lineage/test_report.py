"""What prepare and sweep print is read strictly: nothing but a whole report of this run counts."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fence.control import ControlOutput
from fence.errors import FenceUsageError, InvalidReport
from fence.escalation import EscalationPolicy
from fence.lineage import marks, report

TURN = "0123456789abcdef0123456789abcdef"
RUN = "feedfacefeedface"
GOOD = (
    f"fence-sweep 1 {TURN} {RUN}\n"
    "p 17 99 1 17 17 0 1 brand gone Z INT@0,TERM@260 300 - sh\n"
    "p 18 99 17 17 17 - - parent gone X - 10 - a b?\n"
    "m 1 0 17 99 1 run\n"
    "m 2 0 - - 0 pending\n"
    "n no grep\n"
    "end clear lineage consistent 3 0 310\n"
)


def sweep(text: str | bytes, code: int | None = 0) -> report.SweepReport:
    raw = text.encode("latin-1") if isinstance(text, str) else text
    return report.parse_sweep(ControlOutput(code, raw, b"why"), TURN, RUN)


def test_reads_a_whole_report() -> None:
    found = sweep(GOOD)
    assert found.verdict == "clear"
    assert found.processes[0].signals == (("INT", 0), ("TERM", 260))
    assert found.processes[1] == report.ProcessReport(
        18, 99, 17, 17, 17, None, None, "parent", "gone", "X", "a b?", (), 10
    )
    assert found.markers[1].pid is None
    assert found.notes == ("no grep",)
    assert sweep(GOOD.replace("\n", "\r\n")) == found, "a terminal in between"
    assert sweep(GOOD, None) == found, "a channel that tells no exit code"


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("empty", "", 0),
        ("half a line", GOOD[:-5], 0),
        ("no verdict", GOOD[: GOOD.index("end")], 0),
        ("twice", GOOD + GOOD, 0),
        ("other turn", GOOD.replace(TURN, TURN[::-1]), 0),
        ("other run", GOOD.replace(RUN, RUN[::-1]), 0),
        ("older protocol", GOOD.replace("sweep 1", "sweep 0"), 0),
        ("newer protocol", GOOD.replace("sweep 1", "sweep 2"), 0),
        ("exit code says alive", GOOD, 75),
        ("exit code says unknown", GOOD, 76),
        ("exit code of nobody", GOOD, 1),
        ("verdict without its exit code", GOOD.replace("end clear", "end alive"), 0),
        ("unknown word", GOOD.replace("end clear", "end quiet"), 0),
        ("a line too many", GOOD.replace("n no grep", "what"), 0),
        ("something before", "motd\n" + GOOD, 0),
        ("something after", GOOD + "x\n", 0),
        ("clear with a live process", GOOD.replace("brand gone Z", "brand alive S"), 0),
        ("clear with an unknown process", GOOD.replace("brand gone Z", "brand unknown ?"), 0),
        ("negative pid", GOOD.replace("p 17", "p -17"), 0),
        ("octal", GOOD.replace("p 17", "p 017"), 0),
        ("not ascii", GOOD.replace("no grep", "n\xf6 grep"), 0),
        ("other digits", GOOD.replace("p 17", "p \u0661").encode(), 0),
        ("nul", GOOD.replace("p 17", "p\x0017"), 0),
        ("prepare's", GOOD.replace("fence-sweep", "fence-prepare"), 0),
    ],
)
def test_refuses_everything_else(name: str, text: str | bytes, code: int) -> None:
    with pytest.raises(InvalidReport):
        sweep(text, code)


def test_says_what_the_script_said_when_it_died() -> None:
    with pytest.raises(InvalidReport, match="exit code 2, stderr: why"):
        sweep(GOOD[:60], 2)


def test_refuses_a_flood() -> None:
    with pytest.raises(InvalidReport, match="more than"):
        sweep(b"x" * (5 << 20))


@given(st.binary(max_size=400))
def test_garbage_is_never_a_report(raw: bytes) -> None:
    with pytest.raises(InvalidReport):
        sweep(raw)


@given(st.data())
def test_a_damaged_report_is_itself_or_invalid(data: st.DataObject) -> None:
    """Cut, doubled or overwritten anywhere: invalid, or still says the same verdict."""
    raw = bytearray(GOOD.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        how = data.draw(st.sampled_from(["cut", "double", "byte"]))
        if how == "cut":
            del raw[at : at + data.draw(st.integers(1, 20))]
        elif how == "double":
            raw[at:at] = raw[at : at + 20]
        else:
            raw[at] = data.draw(st.integers(0, 255))
        if not raw:
            break
    try:
        found = sweep(bytes(raw))
    except InvalidReport:
        return
    assert found.verdict == "clear"
    assert all(p.look == "gone" for p in found.processes)


def test_reads_prepare() -> None:
    text = f"fence-prepare 1 {TURN} {RUN}\nn a note\nend /tmp/.fence 0 i4026531836 lineage 1\n"
    found = report.parse_prepare(ControlOutput(0, text.encode(), b""), TURN, RUN)
    assert (found.directory, found.uid, found.brand, found.notes) == (
        "/tmp/.fence",
        0,
        True,
        ("a note",),
    )
    refused = f"fence-prepare 1 {TURN} {RUN}\nrefused no place\n"
    with pytest.raises(InvalidReport, match="no place"):
        report.parse_prepare(ControlOutput(76, refused.encode(), b""), TURN, RUN)
    with pytest.raises(InvalidReport, match="exits with 3"):
        report.parse_prepare(ControlOutput(3, text.encode(), b""), TURN, RUN)


@given(st.text(min_size=1))
def test_any_text_makes_a_key_that_is_its_own(turn_id: str) -> None:
    key = marks.turn_key(turn_id)
    assert re.fullmatch(r"[0-9a-f]{32}", key)
    assert marks.turn_key(key) == key
    assert marks.turn_key(turn_id) == key


@pytest.mark.parametrize("wrong", ["", 7, b"x", True])
def test_a_turn_id_that_is_not_text_is_refused(wrong: object) -> None:
    with pytest.raises(FenceUsageError, match="turn_id"):
        marks.turn_key(wrong)  # type: ignore[arg-type]


@given(st.integers(0, 2**128 - 1), st.integers(1, 10**6))
def test_brands_lie_where_nobody_would_choose_one(turn: int, number: int) -> None:
    """Between 1.0e9 s (31 years of CPU) and 1.8e10 s (the kernel's nanoseconds fit in 64 bits)."""
    key = f"{turn:032x}"
    assert 1_000_000_000 <= marks.brand(key, number) < 18_000_000_000
    assert marks.brand(key, number) // 1000 == marks.brand_prefix(key)


@pytest.mark.parametrize("name", ["preamble", "prepare", "sweep"])
def test_the_scripts_and_the_table_of_exit_codes_agree(name: str) -> None:
    """Each `exit N` of a script is in the one table."""
    text = marks.script(name)
    used = {int(n) for n in re.findall(r"\bexit ([0-9]+)", text)}
    expected = {
        "preamble": {marks.Exit.PREAMBLE_FAILED, marks.Exit.REFUSED},
        "prepare": {marks.Exit.UNKNOWN},
        "sweep": {marks.Exit.CLEAR, marks.Exit.ALIVE, marks.Exit.UNKNOWN},
    }
    assert used == {int(code) for code in expected[name]}
    spoken = re.findall(r"fence-(?:sweep|prepare) ([0-9]+) ", text)
    assert set(spoken) <= {str(marks.PROTOCOL)}


@pytest.mark.parametrize("name", ["preamble", "prepare", "sweep"])
def test_what_travels_is_the_script_without_its_comments(name: str) -> None:
    text = marks.script(name)
    assert "\n#" not in text
    assert len(text.encode()) < 40_000


def test_a_sweep_counts_in_hundredths() -> None:
    argv = marks.sweep_argv(TURN, RUN, EscalationPolicy(), command=3, no_int=[2, 1, 2])
    assert argv[-5:] == ["25", "75", "800", ",1,2,", "4096", f":{TURN}.3."][-5:]
