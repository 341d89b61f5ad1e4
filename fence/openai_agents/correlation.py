"""Which call of the model an operation belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_call_id: ContextVar[str | None] = ContextVar("fence_openai_agents_call_id", default=None)


def current_call_id() -> str | None:
    """Return the tool call id of the model that the running code answers, None outside of one."""
    return _call_id.get()


@contextmanager
def call_scope(call_id: object) -> Iterator[None]:
    """Set the tool call id for the block; anything but a non-empty str keeps the outer one."""
    if not isinstance(call_id, str) or not call_id:
        yield
        return
    token = _call_id.set(call_id)
    try:
        yield
    finally:
        _call_id.reset(token)
