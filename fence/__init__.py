"""turnfence: Stop really stops an agent's turn, and proves it."""

from fence.control import SandboxCommandResult, SandboxControl
from fence.errors import FenceError, QuiescenceTimeout, TurnCancelled
from fence.escalation import EscalationPolicy
from fence.receipt import QuiescenceReceipt, SandboxProof
from fence.turn import TurnFence, quiesce_turn

__all__ = [
    "EscalationPolicy",
    "FenceError",
    "QuiescenceReceipt",
    "QuiescenceTimeout",
    "SandboxCommandResult",
    "SandboxControl",
    "SandboxProof",
    "TurnCancelled",
    "TurnFence",
    "quiesce_turn",
]
