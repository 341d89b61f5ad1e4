"""Scripted tool calls with a call id and an item id of their own."""

from __future__ import annotations

from itertools import count
from typing import Any

from agents import testing

_numbers = count(1)


def function_call(name: str, arguments: dict[str, Any], *, call_id: str | None = None) -> Any:
    number = next(_numbers)
    return testing.function_call(
        name, arguments, call_id=call_id or f"call-{number}", item_id=f"item-{number}"
    )
