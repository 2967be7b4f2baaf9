"""OpenEnv's JSON: replies, and this library's actions and steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from forge_envs.environment import Action, InfrastructureError, Step, ToolCall

from ..content import Json

MAX_MESSAGE = 100 << 20  # bytes of one message, as in OpenEnv's own client
CLOSE_LIMIT = 1.0  # seconds for the other side to acknowledge a close
FORGE_ACTION = "ForgeAction"  # the schema's title by which a client recognises an environment of this library
# Parts of the schemas.
_TEXT = {"type": "string"}
_OBJECT = {"type": "object"}
_CALL = {**_OBJECT, "properties": {"name": _TEXT, "arguments": _OBJECT, "id": _TEXT}, "required": ["name"]}
SCHEMA: dict[str, Json] = {
    "action": {
        "title": FORGE_ACTION,
        "type": "object",
        "properties": {
            "text": {**_TEXT, "description": "the policy's turn"},
            "content": {**_TEXT, "description": "the text without its tool calls"},
            "calls": {"type": "array", "items": _CALL},
            "errors": {"type": "array", "items": _TEXT, "description": "errors of tool calls that failed to parse"},
            "truncated": {"type": "boolean", "description": "the turn ran out of tokens"},
            "metadata": _OBJECT,
        },
        "required": ["text"],
    },
    "observation": {
        "title": "ForgeObservation",
        "type": "object",
        "properties": {
            "messages": {"type": "array", "items": _OBJECT, "description": "with role and content"},
            "tools": {"type": "array", "items": _OBJECT, "description": "OpenAI function schemas"},
            "rewritten": {"type": "boolean", "description": "the messages replace the whole conversation"},
            "metadata": {**_OBJECT, "description": "further information; truncated: a limit ended the episode"},
        },
        "required": ["messages"],
    },
    "state": {
        "title": "State",
        "type": "object",
        "properties": {"episode_id": _TEXT, "step_count": {"type": "integer"}},
    },
}


@dataclass(frozen=True, slots=True)
class Reply:
    """An environment's answer to a reset or a step. `reward` is None if it gave none."""

    observation: dict[str, Json]
    reward: float | None
    done: bool
    metadata: dict[str, Json] = field(default_factory=dict)

    @classmethod
    def read(cls, data: Mapping[str, Json]) -> Self:
        """Parse a server's reply. InfrastructureError: it has no observation, the reward is not a finite number, or
        `done` is not a truth value."""
        reward = data.get("reward")
        observation = data.get("observation")
        if observation is None:
            raise InfrastructureError(f"the server gave a reply without an observation: {dict(data)!r:.80}")
        try:
            number = None if reward is None else float(reward)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if number is not None and not math.isfinite(number):
            raise InfrastructureError(f"the server gave the reward {str(reward)[:80]!r}, which is not a finite number")
        observation = observation if isinstance(observation, dict) else {"value": observation}
        metadata = data.get("metadata")
        done = flag_of_server(data.get("done"), "done")
        return cls(observation, number, done, metadata if isinstance(metadata, dict) else {})


def flag(value: Json, name: str) -> bool:
    """A truth value; null is false. ValueError: it is another value, such as the text "false", which Python takes for
    true."""
    if value is None or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ValueError(f"{name} must be true or false, got {value!r:.80}")


def flag_of_server(value: Json, name: str) -> bool:
    """A truth value in a server's reply, see `flag`. InfrastructureError: it is another value."""
    try:
        return flag(value, name)
    except ValueError as error:
        raise InfrastructureError(f"the server broke the protocol: {error}") from None


def as_number(value: object) -> Json:
    """A number or truth value of NumPy or PyTorch as Python's, for JSON. TypeError: it is none."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        return item()
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form")


def _as_number_or_text(value: object) -> Json:
    # Gymnasium and the like give arrays in `info`.
    try:
        return as_number(value)
    except TypeError:
        return str(value)


def action_from_json(data: Json) -> Action:
    """Parse an action, or the call of an MCP tool. ValueError: it is neither."""
    if not isinstance(data, Mapping):
        raise ValueError("an action must be an object")
    if data.get("type") == "call_tool":
        name = data.get("tool_name")
        arguments = data.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            raise ValueError("call_tool needs a string tool_name and an object arguments")
        return Action("", calls=(ToolCall(name, dict(arguments)),))
    # A field with a typing mistake would otherwise be ignored in silence.
    fields = SCHEMA["action"]["properties"]
    unknown = set(data) - set(fields)
    if unknown:
        names = ", ".join(map(repr, sorted(unknown)))
        raise ValueError(f"an action has no field {names}: its fields are {', '.join(fields)}")
    text = data.get("text")
    calls = data.get("calls", ())
    errors = data.get("errors", ())
    if not isinstance(text, str) or not isinstance(data.get("content", ""), str):
        raise ValueError("an action needs a string text; its content must be a string too")
    # Clients are other people's programs: what they send is checked field by field.
    if not isinstance(calls, list | tuple) or not all(
        isinstance(call, Mapping) and isinstance(call.get("name"), str) and isinstance(call.get("arguments", {}), dict)
        for call in calls
    ):
        raise ValueError("calls must be a list of objects with a name and arguments")
    if not isinstance(errors, list | tuple) or not all(isinstance(error, str) for error in errors):
        raise ValueError("errors must be a list of strings")
    parsed = tuple(ToolCall(call["name"], dict(call.get("arguments", {})), str(call.get("id", ""))) for call in calls)
    truncated = flag(data.get("truncated"), "truncated")
    return Action(text, data.get("content", text.strip()), parsed, tuple(errors), truncated)


def reply_to_json(step: Step) -> dict[str, Json]:
    """Convert a step to an OpenEnv observation. Values of `info` without a JSON form become text.

    Raises:
        TypeError, ValueError: keys without a JSON form, such as tuples, or a reward that is not finite.
    """
    reward = None if step.reward is None else float(step.reward)
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    metadata = json.loads(json.dumps(dict(step.info), default=_as_number_or_text))
    metadata |= {"truncated": True} if step.truncated else {}
    observation = {"messages": list(step.messages), "tools": list(step.tools), "rewritten": bool(step.rewritten)}
    reply: dict[str, Json] = {"observation": {**observation, "metadata": metadata}, "reward": reward}
    return {**reply, "done": bool(step.done), **({"metadata": metadata} if metadata else {})}


def step_from_reply(reply: Reply) -> Step:
    """Convert a reply back to a step, see `reply_to_json`. InfrastructureError: it breaks the schema."""
    metadata = dict(reply.metadata)
    messages = reply.observation.get("messages", [])
    tools = reply.observation.get("tools", [])
    # The same checks as for an action: a chat template would fail on other messages, far from here.
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("content"), str) and isinstance(message.get("role"), str)
        for message in messages
    ):
        raise InfrastructureError(f"the server gave messages that are no list of role and content: {messages!r:.80}")
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict)
        and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str)
        for tool in tools
    ):
        raise InfrastructureError(f"the server gave tools that are no list of function schemas: {tools!r:.80}")
    truncated = flag_of_server(metadata.pop("truncated", None), "truncated")
    return Step(
        messages=tuple(messages),
        reward=reply.reward,
        terminated=reply.done and not truncated,
        truncated=truncated,
        tools=tuple(tools),
        rewritten=flag_of_server(reply.observation.get("rewritten"), "rewritten"),
        info=metadata,
    )
