"""Finds the control channel of a session among the installed providers.

A provider is an entry point of the group `fence.providers`: a callable that takes a session and
returns its SandboxControl, or None where the session is not of its kind. A third party adds its own
the same way. `sdk_exec`, which works with any session, is asked last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fence.control import SandboxControl

GROUP = "fence.providers"
GENERIC = "sdk_exec"

ControlFor = Callable[[Any], SandboxControl | None]

log = logging.getLogger("fence")

_noted: set[type] = set()


@cache
def providers() -> tuple[tuple[str, ControlFor], ...]:
    """Return the installed providers by name, the generic one last.

    One that cannot be loaded is logged and left out. The answer is kept; `providers.cache_clear()`
    looks again.
    """
    loaded: list[tuple[str, ControlFor]] = []
    names: set[str] = set()
    found = entry_points(group=GROUP)
    for entry in sorted(found, key=lambda e: (e.name == GENERIC, e.name, e.value)):
        if entry.name in names:
            continue
        control_for = _load(entry)
        if control_for is not None:
            names.add(entry.name)
            loaded.append((entry.name, control_for))
    return tuple(loaded)


def control_for_session(session: Any) -> SandboxControl | None:
    """Return the control channel of a session from the first provider that knows it.

    None where no provider does. A provider that raises, or returns something else, is logged and
    passed over: the next may know the session.
    """
    for name, control_for in providers():
        try:
            control = control_for(session)
        except Exception:
            log.warning(
                "provider %r failed on a %s; asking the next", name, _kind(session), exc_info=True
            )
            continue
        if control is None:
            continue
        if not isinstance(control, SandboxControl):
            log.warning(
                "provider %r returned a %s, which is no SandboxControl; asking the next",
                name,
                type(control).__name__,
            )
            continue
        if name == GENERIC and type(session) not in _noted:
            _noted.add(type(session))
            log.warning(
                "no provider knows %s: its control runs go through the session's own exec, which "
                "may be slow or blocked by its commands; install a provider for it",
                _kind(session),
            )
        return control
    return None


def _load(entry: EntryPoint) -> ControlFor | None:
    where = f"{entry.name} = {entry.value}"
    if entry.dist is not None:
        where += f" (from {entry.dist.name})"
    try:
        control_for = entry.load()
    except Exception as error:  # noqa: BLE001 - a plugin may fail in any way
        # A provider whose optional client library is absent is no fault of anybody's.
        level = logging.DEBUG if isinstance(error, ModuleNotFoundError) else logging.WARNING
        log.log(level, "provider %s cannot be loaded and is left out: %r", where, error)
        return None
    if not callable(control_for):
        log.warning("provider %s is not callable and is left out", where)
        return None
    result: ControlFor = control_for
    return result


def _kind(session: Any) -> str:
    return f"{type(session).__module__}.{type(session).__qualname__}"
