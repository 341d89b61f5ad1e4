"""The fence on the OpenAI Agents SDK: sessions, tools, capabilities and MCP servers of a turn.

`TurnFence` has methods for all of this (`fence.wrap_capabilities(...)`, ...); they load this
package when they are first used, so that the core works without the SDK.
"""

from __future__ import annotations

try:
    import agents.sandbox  # noqa: F401
except ImportError as error:
    raise ImportError(
        "fence.openai_agents needs the OpenAI Agents SDK 0.24: "
        "pip install 'turnfence[openai-agents]'"
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
