"""Puts a fence around an MCP server."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Self, cast

from agents.mcp import MCPServer

from fence.errors import FenceUsageError
from fence.openai_agents.correlation import current_call_id

if TYPE_CHECKING:
    from fence.turn import TurnFence

_ADMITTED = ("call_tool", "get_prompt", "read_resource")
_OWN = frozenset({"fence", "server"})


class FencedMCPServer(MCPServer):
    """An MCP server whose tool calls, prompts and resource reads pass through a fence.

    Everything else (connect, cleanup, list_tools, approval settings, ...) is the real server's
    and stays allowed after the cancel.
    """

    fence: TurnFence
    server: MCPServer

    def __init__(self, fence: TurnFence, server: MCPServer) -> None:
        # Not MCPServer.__init__: the settings are the real server's, by forwarding.
        object.__setattr__(self, "fence", fence)
        object.__setattr__(self, "server", server)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OWN:
            raise AttributeError(name)
        return getattr(self.server, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.server, name, value)

    def __repr__(self) -> str:
        return f"<FencedMCPServer of {self.server!r}, {self.fence!r}>"

    async def __aenter__(self) -> Self:
        await self.server.connect()  # type: ignore[no-untyped-call]
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.server.cleanup()  # type: ignore[no-untyped-call]


def _forward(name: str) -> Callable[..., Any]:
    def forward(self: FencedMCPServer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.server, name)(*args, **kwargs)

    forward.__name__ = name
    return forward


def _forward_value(name: str) -> property:
    return property(
        lambda self: getattr(self.server, name),
        lambda self, value: setattr(self.server, name, value),
    )


def _admitted(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def operation(self: FencedMCPServer, *args: Any, **kwargs: Any) -> Any:
        return await self.fence.run_operation(
            f"mcp.{name}",
            "mcp",
            lambda: getattr(self.server, name)(*args, **kwargs),
            call_id=current_call_id(),
        )

    operation.__name__ = name
    return operation


def _install() -> None:
    own = set(vars(FencedMCPServer))
    for name, value in vars(MCPServer).items():
        if name in own or name.startswith(("__", "_abc_")):
            continue
        if name in _ADMITTED:
            setattr(FencedMCPServer, name, _admitted(name))
        elif inspect.isfunction(value):
            setattr(FencedMCPServer, name, _forward(name))
        elif isinstance(value, property):
            setattr(FencedMCPServer, name, _forward_value(name))
    # Every abstract method now has an implementation.
    FencedMCPServer.__abstractmethods__ = frozenset()


_install()


def wrap_mcp_server(fence: TurnFence, server: MCPServer) -> MCPServer:
    """Return a server to put into `Agent(mcp_servers=[...])` in place of the given one.

    Raises:
        TurnCancelled: the turn is cancelled already.
        FenceUsageError: not an MCPServer of the SDK.
    """
    if not isinstance(server, MCPServer):
        raise FenceUsageError("server", server, "an MCPServer of the OpenAI Agents SDK")
    fence.check_open()
    layer = server
    while isinstance(layer, FencedMCPServer):
        if layer.fence is fence:
            return server
        layer = layer.server
    make: Any = FencedMCPServer
    return cast(FencedMCPServer, make(fence, server))
