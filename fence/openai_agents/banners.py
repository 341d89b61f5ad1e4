"""Reads the header of the SDK's exec banner, never the body: the command controls the body.

The SDK writes lines joined by newline, in this order, and then the body:
`Chunk ID: x`, `Wall time: 0.1 seconds`, `Process exited with code N`,
`Process running with session ID N`, `Original token count: N`, `Output:`. Lines 3 to 5 are
optional.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_CHUNK = re.compile(r"Chunk ID: [0-9A-Za-z_-]{1,64}")
_WALL = re.compile(r"Wall time: [0-9]{1,12}(?:\.[0-9]{1,12})? seconds")
_EXITED = re.compile(r"Process exited with code (-?[0-9]{1,10})")
_RUNNING = re.compile(r"Process running with session ID ([0-9]{1,18})")
_TOKENS = re.compile(r"Original token count: [0-9]{1,18}")
_OUTPUT = "Output:"
_NOT_FOUND = re.compile(r"write_stdin failed: PTY session not found: ([0-9]{1,18})")

# The longest header the SDK can write has six lines; nothing beyond is looked at.
_MAX_HEADER_LINES = 6
_MAX_HEADER_CHARS = 512


@dataclass(frozen=True)
class Banner:
    """What a banner's header says. Both None: the SDK's own time-out, the outcome is not known."""

    exit_code: int | None
    session_id: int | None


def parse_banner(text: object) -> Banner | None:
    """Return what the header says, None where `text` does not begin with a banner header."""
    if not isinstance(text, str):
        return None
    # One more line than a header may have, so that a missing `Output:` shows.
    lines = text[:_MAX_HEADER_CHARS].split("\n", _MAX_HEADER_LINES)
    if len(lines) < 3 or not _CHUNK.fullmatch(lines[0]) or not _WALL.fullmatch(lines[1]):
        return None
    index = 2
    exit_code: int | None = None
    session_id: int | None = None
    if found := _EXITED.fullmatch(lines[index]):
        exit_code = int(found[1])
        index += 1
    if index < len(lines) and (found := _RUNNING.fullmatch(lines[index])):
        session_id = int(found[1])
        index += 1
    if index < len(lines) and _TOKENS.fullmatch(lines[index]):
        index += 1
    # `Output:` is a whole line of the header: the SDK always writes a newline after it.
    if index >= len(lines) - 1 or lines[index] != _OUTPUT:
        return None
    if exit_code is not None and session_id is not None:
        return None
    return Banner(exit_code=exit_code, session_id=session_id)
