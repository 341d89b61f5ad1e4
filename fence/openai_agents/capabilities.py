"""Binds the capabilities of a SandboxAgent to a fence."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from agents.sandbox.capabilities import Capability
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.tool import Tool
from pydantic import PrivateAttr

from fence.errors import FenceUsageError
from fence.openai_agents.errors import runner_boundary
from fence.openai_agents.session import wrap_session
from fence.openai_agents.tools import wrap_tools

if TYPE_CHECKING:
    from fence.turn import TurnFence

C = TypeVar("C", bound=Capability)


class _FenceLink:
    """Holds the fence of a capability so that no copy of the capability splits the fence in two.

    `Capability.clone()` copies whatever has a `__dict__` attribute by attribute; this has none.
    """

    __slots__ = ("fences",)

    def __init__(self, fences: tuple[TurnFence, ...]) -> None:
        self.fences = fences

    def __copy__(self) -> _FenceLink:
        return self

    def __deepcopy__(self, _memo: object) -> _FenceLink:
        return self


def wrap_capability(fence: TurnFence, capability: C) -> C:
    """Return a copy of a capability whose session and tools pass through the fence.

    The copy is an instance of a subclass of the capability's class; what a `configure_tools`
    callback puts in is wrapped, too.

    Raises:
        TurnCancelled: the turn is cancelled already; also from `bind` and `tools` of the copy.
        FenceUsageError: not a capability of the SDK.
    """
    if not isinstance(capability, Capability):
        raise FenceUsageError("capability", capability, "a Capability of the OpenAI Agents SDK")
    fence.check_open()
    fences = _fences(capability)
    if fence in fences:
        return capability
    kind = type(capability) if fences else _fenced_class(type(capability))
    copied = capability.model_copy()
    private = dict(copied.__pydantic_private__ or {})
    private["_fence_link"] = _FenceLink((*fences, fence))
    object.__setattr__(copied, "__pydantic_private__", private)
    # Same layout, made from the same fields: only the two overridden methods differ.
    object.__setattr__(copied, "__class__", kind)
    if copied.session is not None:
        copied.bind(copied.session)
    return copied


def wrap_capabilities(fence: TurnFence, capabilities: Iterable[Capability]) -> list[Capability]:
    """Return `wrap_capability` of each."""
    return [wrap_capability(fence, capability) for capability in capabilities]


def _fences(capability: Capability) -> tuple[TurnFence, ...]:
    link = (capability.__pydantic_private__ or {}).get("_fence_link")
    return link.fences if isinstance(link, _FenceLink) else ()


@cache
def _fenced_class(base: type[Capability]) -> type[Capability]:
    """Return the fenced subclass of a capability class; made once, as pydantic takes its time."""

    def bind(self: Any, session: BaseSandboxSession) -> None:
        with runner_boundary():
            for fence in _fences(self):
                session = wrap_session(fence, session)
        super(fenced, self).bind(session)

    def tools(self: Any) -> list[Tool]:
        made: list[Tool] = super(fenced, self).tools()
        with runner_boundary():
            for fence in _fences(self):
                made = wrap_tools(fence, made, self.session)
        return made

    fenced: type[Capability] = type(
        base.__name__,
        (base,),
        {
            # The SDK tells the agents of a saved run apart by these, too.
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__annotations__": {"_fence_link": Any},
            "_fence_link": PrivateAttr(default=None),
            "bind": bind,
            "tools": tools,
        },
    )
    return fenced
