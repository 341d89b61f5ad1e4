"""A real MCP server over stdio for the tests: adds, waits, and touches a file."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
from mcp.server.mcpserver import MCPServer

server = MCPServer("demo")
place = Path(sys.argv[1])


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
async def wait() -> str:
    """Say that it began, and never end."""
    (place / "began").touch()
    await anyio.sleep_forever()
    return ""


@server.tool()
def touch(name: str) -> str:
    """Touch a file."""
    (place / name).touch()
    return "touched"


@server.resource("demo://one")
def one() -> str:
    """A resource."""
    return "content"


@server.prompt()
def greet() -> str:
    """A prompt."""
    return "hello"


if __name__ == "__main__":
    server.run("stdio")
