"""Environments and tools, and episodes of several turns in them."""

from .calls import read_action
from .dialogue import Dialogue
from .environment import Action, Environment, InfrastructureError, Message, Step, ToolCall
from .group import GroupEnv, MultiTurnEnv, SingleTurnEnv
from .rollout import rollout
from .tool_environment import ToolEnvironment
from .tools import Toolbox, ToolError, schema_of

__all__ = [
    "Action",
    "Dialogue",
    "Environment",
    "GroupEnv",
    "InfrastructureError",
    "Message",
    "MultiTurnEnv",
    "SingleTurnEnv",
    "Step",
    "ToolCall",
    "ToolEnvironment",
    "ToolError",
    "Toolbox",
    "read_action",
    "rollout",
    "schema_of",
]
