"""The fence on the OpenAI Agents SDK: sessions, tools, capabilities and MCP servers of a turn.

`TurnFence` has methods for all of this (`fence.wrap_capabilities(...)`, ...); they load this
package when they are first used, so that the core works without the SDK.
"""

from __future__ import annotations

try:
    import fence.openai_agents.internals  # noqa: F401
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "agents":
        raise
    raise ModuleNotFoundError(
        "fence.openai_agents needs the OpenAI Agents SDK 0.24: "
        "pip install 'turnfence[openai-agents]'",
        name=error.name,
    ) from error
except ImportError as error:
    # Another version of the SDK: a private name has moved.
    raise ImportError(
        "the installed openai-agents is not the version that turnfence was made for (0.24): "
        f"{error}; pip install 'turnfence[openai-agents]'",
        name=error.name,
    ) from error

from fence.openai_agents.capabilities import wrap_capabilities, wrap_capability
from fence.openai_agents.commands import run_sandbox_command
from fence.openai_agents.correlation import current_call_id
from fence.openai_agents.errors import RunTurnCancelled
from fence.openai_agents.mcp import FencedMCPServer, wrap_mcp_server
from fence.openai_agents.session import FencedSandboxSession, control_for, wrap_session
from fence.openai_agents.tools import FencedComputer, FencedEditor, wrap_tools

__all__ = [
    "FencedComputer",
    "FencedEditor",
    "FencedMCPServer",
    "FencedSandboxSession",
    "RunTurnCancelled",
    "control_for",
    "current_call_id",
    "run_sandbox_command",
    "wrap_capabilities",
    "wrap_capability",
    "wrap_mcp_server",
    "wrap_session",
    "wrap_tools",
]
