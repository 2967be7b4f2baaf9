"""Actions and steps of this library as OpenEnv's JSON, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from forge.envs.environment import Action, Step, ToolCall

from .session import Reply

FORGE_ACTION = (
    "ForgeAction"  # by this title of the schema a client knows that it talks to an environment of this library
)
_TEXT = {"type": "string"}
_CALL = {
    "type": "object",
    "properties": {"name": _TEXT, "arguments": {"type": "object"}, "id": _TEXT},
    "required": ["name"],
}
_METADATA = {"type": "object", "description": "what else is known; truncated: a limit ended the episode"}
SCHEMA: dict[str, Any] = {
    "action": {
        "title": FORGE_ACTION,
        "type": "object",
        "properties": {
            "text": {**_TEXT, "description": "what the policy said in its turn"},
            "content": {**_TEXT, "description": "the text without its tool calls"},
            "calls": {"type": "array", "items": _CALL},
            "errors": {"type": "array", "items": _TEXT, "description": "what is wrong with calls that were not read"},
            "truncated": {"type": "boolean", "description": "the turn ran out of tokens"},
            "metadata": {"type": "object"},
        },
        "required": ["text"],
    },
    "observation": {
        "title": "ForgeObservation",
        "type": "object",
        "properties": {
            "messages": {"type": "array", "items": {"type": "object"}, "description": "with role and content"},
            "tools": {"type": "array", "items": {"type": "object"}, "description": "schemas, as OpenAI writes them"},
            "rewritten": {"type": "boolean", "description": "the messages are the whole conversation anew"},
            "metadata": _METADATA,
        },
        "required": ["messages"],
    },
    "state": {
        "title": "State",
        "type": "object",
        "properties": {"episode_id": _TEXT, "step_count": {"type": "integer"}},
    },
}


def action_to_json(action: Action) -> dict[str, Any]:
    """For a server of this library."""
    return asdict(action)


def action_from_json(data: Any) -> Action:
    """An action, or the call of an MCP tool. ValueError: it is neither."""
    if not isinstance(data, Mapping):
        raise ValueError("an action must be an object")
    if data.get("type") == "call_tool":
        name, arguments = data.get("tool_name"), data.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            raise ValueError("call_tool needs a tool_name, which is a text, and arguments, which are an object")
        return Action("", calls=(ToolCall(name, dict(arguments)),))
    if unknown := set(data) - set(SCHEMA["action"]["properties"]):
        raise ValueError(f"an action has no {', '.join(sorted(unknown))}")
    text, calls, errors = data.get("text"), data.get("calls", ()), data.get("errors", ())
    if not isinstance(text, str) or not isinstance(data.get("content", ""), str):
        raise ValueError("an action needs a text, which like its content must be a string")
    if not isinstance(calls, list | tuple) or not all(map(_is_call, calls)):
        raise ValueError("calls must be a list of objects with a name and arguments")
    if not isinstance(errors, list | tuple) or not all(isinstance(error, str) for error in errors):
        raise ValueError("errors must be a list of strings")
    read = tuple(ToolCall(call["name"], dict(call.get("arguments", {})), str(call.get("id", ""))) for call in calls)
    return Action(text, data.get("content", text.strip()), read, tuple(errors), bool(data.get("truncated", False)))


def _is_call(call: Any) -> bool:
    return (
        isinstance(call, Mapping) and isinstance(call.get("name"), str) and isinstance(call.get("arguments", {}), dict)
    )


def reply_to_json(step: Step) -> dict[str, Any]:
    """A step as what OpenEnv calls an observation. What of its info has no JSON form goes as text.

    TypeError, ValueError: that cannot be, as of keys that are tuples; or the reward is no finite number.
    """
    reward = None if step.reward is None else float(step.reward)
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    observation = {"messages": list(step.messages), "tools": list(step.tools), "rewritten": step.rewritten}
    metadata = {
        **json.loads(json.dumps(dict(step.info), default=str)),
        **({"truncated": True} if step.truncated else {}),
    }
    reply: dict[str, Any] = {"observation": {**observation, "metadata": metadata}, "reward": reward}
    return {**reply, "done": step.done, **({"metadata": metadata} if metadata else {})}


def step_from_reply(reply: Reply) -> Step:
    """The step that such a reply was made of."""
    metadata = dict(reply.metadata)
    truncated = bool(metadata.pop("truncated", False))
    return Step(
        messages=tuple(reply.observation.get("messages", ())),
        reward=reply.reward,
        terminated=reply.done and not truncated,
        truncated=truncated,
        tools=tuple(reply.observation.get("tools", ())),
        rewritten=bool(reply.observation.get("rewritten")),
        info=metadata,
    )
