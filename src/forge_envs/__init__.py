"""Environments of several turns, their tools, and environments of other libraries."""

from .calls import read_action
from .dialogue import Dialogue
from .environment import Action, Environment, InfrastructureError, Message, Step, ToolCall
from .rollout import MultiTurnEnv, rollout
from .tools import Toolbox, ToolEnvironment, ToolError, schema_of

__all__ = [
    "Action",
    "Dialogue",
    "Environment",
    "InfrastructureError",
    "Message",
    "MultiTurnEnv",
    "Step",
    "ToolCall",
    "ToolEnvironment",
    "ToolError",
    "Toolbox",
    "read_action",
    "rollout",
    "schema_of",
]
