"""Which policies are refused, and that the error names the field, the value and what is allowed."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fence import EscalationPolicy, FenceError
from fence.errors import FenceUsageError

DURATIONS = [
    field.name for field in dataclasses.fields(EscalationPolicy) if field.name != "max_signalled"
]
ABOVE_ZERO = ["sweep", "deadline", "control_overhead", "retry_first", "retry_max"]
NO_DURATION = [-1, -0.001, math.nan, math.inf, -math.inf, True, False, None, "1", b"1", 86_401, [1]]


def test_the_defaults_are_the_documented_ones():
    policy = EscalationPolicy()
    assert (policy.int_grace, policy.term_grace, policy.sweep, policy.deadline) == (
        0.25,
        0.75,
        8.0,
        30.0,
    )


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize("value", NO_DURATION, ids=repr)
def test_refuses_what_is_no_duration(name: str, value: object):
    with pytest.raises(FenceUsageError, match=rf"EscalationPolicy\.{name}") as caught:
        EscalationPolicy(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == f"EscalationPolicy.{name}"
    assert isinstance(caught.value, FenceError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ABOVE_ZERO)
@pytest.mark.parametrize("value", [0, 0.0])
def test_refuses_zero_where_nothing_could_ever_finish(name: str, value: float):
    with pytest.raises(FenceUsageError, match=name):
        EscalationPolicy(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(set(DURATIONS) - set(ABOVE_ZERO)))
def test_takes_zero_for_a_grace(name: str):
    policy = EscalationPolicy(**{name: 0})
    assert getattr(policy, name) == 0


@pytest.mark.parametrize("value", [0, -1, 1.0, True, None, "5"], ids=repr)
def test_refuses_what_is_no_count(value: object):
    with pytest.raises(FenceUsageError, match="max_signalled"):
        EscalationPolicy(max_signalled=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"int_grace": 4, "term_grace": 4, "sweep": 8}, "sweep"),
        ({"int_grace": 0, "term_grace": 9, "sweep": 8}, "sweep"),
        ({"sweep": 31}, "deadline"),
        ({"deadline": 7.9}, "deadline"),
        ({"retry_first": 3}, "retry_first"),
    ],
    ids=str,
)
def test_refuses_stages_that_do_not_fit(values: dict[str, float], field: str):
    with pytest.raises(FenceUsageError, match=field):
        EscalationPolicy(**values)  # type: ignore[arg-type]


def test_takes_stages_that_just_fit():
    EscalationPolicy(int_grace=4, term_grace=3.99, sweep=8, deadline=8, retry_first=2, retry_max=2)


def test_is_one_frozen_value_with_a_readable_repr():
    policy = EscalationPolicy(term_grace=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.term_grace = 1  # type: ignore[misc]
    assert policy == EscalationPolicy(term_grace=5)
    assert hash(policy) == hash(EscalationPolicy(term_grace=5))
    assert "term_grace=5" in repr(policy)


def test_takes_keywords_only():
    with pytest.raises(TypeError):
        EscalationPolicy(0.1)  # type: ignore[call-arg]
