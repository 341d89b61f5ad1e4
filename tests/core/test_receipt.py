"""A receipt is a proof on paper: it is read strictly or not at all."""

from __future__ import annotations

import json

import pytest

from fence import QuiescenceReceipt
from fence.errors import InvalidReport
from fence.receipt import (
    CommandRecord,
    HookResult,
    OpenOperation,
    OperationCounts,
    SandboxProof,
    StoppedProcess,
    weakest,
)

RECEIPT = QuiescenceReceipt(
    turn_id="job",
    turn="0" * 32,
    proven=True,
    reason=None,
    started_at=1.5,
    cancelled_at=2.5,
    quiesced_at=3.5,
    elapsed_ms=1000,
    containment="lineage",
    sandboxes=(
        SandboxProof(
            provider="fake",
            sandbox_id="box",
            proven=True,
            containment="lineage",
            snapshot="consistent",
            scans=2,
            unseen=0,
            control_runs=1,
            stopped=(
                StoppedProcess(
                    pid=7,
                    start=9,
                    command=1,
                    name="sleep",
                    look="gone",
                    state="Z",
                    last_signal="TERM",
                    signals=(("INT", 0), ("TERM", 250)),
                    gone_at=260,
                ),
            ),
        ),
    ),
    commands=(CommandRecord(1, "call", "fake:box", 7, 7, "stopped", 1.0, 2.0, None, True),),
    operations=OperationCounts(3, 3, 1, 2),
    unsettled_starts=(2,),
    open_operations=(OpenOperation("write", "file", None, 12),),
    hooks=(HookResult("hook", True, 3),),
)


def test_it_survives_json_with_equality() -> None:
    assert QuiescenceReceipt.from_json(RECEIPT.to_json()) == RECEIPT
    assert json.loads(RECEIPT.to_json())["version"] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"proven": "true"},
        {"proven": 1},
        {"elapsed_ms": "1000"},
        {"elapsed_ms": 1.5},
        {"version": 2},
        {"version": None},
        {"containment": "perfect"},
        {"origin": "elsewhere"},
        {"extra": 1},
        {"operations": None},
        {"operations": {"admitted": 1, "settled": 1, "cancelled": 0}},
        {"sandboxes": [{}]},
        {"commands": "none"},
        {"started_at": "noon"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_receipt_that_is_not_exactly_one_is_refused(change) -> None:
    data = json.loads(RECEIPT.to_json()) | change
    with pytest.raises(InvalidReport):
        QuiescenceReceipt.from_json(json.dumps(data))


@pytest.mark.parametrize("field", ["turn_id", "proven", "sandboxes", "operations", "elapsed_ms"])
def test_a_missing_field_is_named(field: str) -> None:
    data = json.loads(RECEIPT.to_json())
    del data[field]
    with pytest.raises(InvalidReport, match=field):
        QuiescenceReceipt.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "null", "[]", '"receipt"', b"\xff\xfe"])
def test_no_receipt_at_all_is_refused(text) -> None:
    with pytest.raises(InvalidReport):
        QuiescenceReceipt.from_json(text)


def test_the_weakest_containment_counts() -> None:
    assert weakest(["lineage", "gone", "own-uid"]) == "own-uid"
    assert weakest([]) is None
