"""OpenEnv's JSON: replies, and this library's actions and steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from forge_envs.environment import Action, InfrastructureError, Step, ToolCall

from ..content import Json

MAX_MESSAGE = 100 << 20  # bytes of one message, as in OpenEnv's own client
CLOSE_LIMIT = 1.0  # seconds for the other side to acknowledge a close
FORGE_ACTION = "ForgeAction"  # the schema's title by which a client recognises an environment of this library
# Parts of the schemas.
_TEXT = {"type": "string"}
_OBJECT = {"type": "object"}
_CALL = {**_OBJECT, "properties": {"name": _TEXT, "arguments": _OBJECT, "id": _TEXT}, "required": ["name"]}
_MESSAGE = {**_OBJECT, "properties": {"role": _TEXT, "content": _TEXT}, "required": ["role", "content"]}
_FUNCTION = {**_OBJECT, "properties": {"name": _TEXT}, "required": ["name"]}
_TOOL = {**_OBJECT, "properties": {"function": _FUNCTION}, "required": ["function"]}
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
            "messages": {"type": "array", "items": _MESSAGE, "description": "with role and content"},
            "tools": {"type": "array", "items": _TOOL, "description": "OpenAI function schemas"},
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
# What is checked. Any truth value passes, see `flag`; a misspelt field of an action would be ignored in silence.
_ACTION, _OBSERVATION = SCHEMA["action"], SCHEMA["observation"]
_SHAPES = {
    "action": Draft202012Validator(
        {**_ACTION, "properties": {**_ACTION["properties"], "truncated": True}, "additionalProperties": False}
    ),
    "observation": Draft202012Validator(
        {**_OBSERVATION, "properties": {**_OBSERVATION["properties"], "rewritten": True}}
    ),
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


def check_shape(value: Json, name: str) -> None:
    """ValueError: a value is no `action` or `observation` of SCHEMA, but for its truth values; says where."""
    error = best_match(_SHAPES[name].iter_errors(value))
    if error is not None:
        raise ValueError(f"{error.json_path.replace('$', name, 1)}: {error.message[:200]}")


def action_from_json(data: Json) -> Action:
    """Parse an action, or the call of an MCP tool. ValueError: it is neither."""
    if isinstance(data, Mapping) and data.get("type") == "call_tool":
        call = {"name": data.get("tool_name"), "arguments": data.get("arguments", {})}
        data = {"text": "", "calls": [call]}
    check_shape(data, "action")
    calls = (
        ToolCall(call["name"], dict(call.get("arguments", {})), call.get("id", "")) for call in data.get("calls", ())
    )
    truncated = flag(data.get("truncated"), "truncated")
    text = data["text"]
    return Action(text, data.get("content", text.strip()), tuple(calls), tuple(data.get("errors", ())), truncated)


def reply_to_json(step: Step) -> dict[str, Json]:
    """Convert a step to an OpenEnv observation. Values without a JSON form become text.

    Raises:
        TypeError, ValueError: keys without a JSON form, such as tuples, or a reward that is not finite.
    """
    reward = None if step.reward is None else float(step.reward)
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    metadata = dict(step.info) | ({"truncated": True} if step.truncated else {})
    observation = {"messages": step.messages, "tools": step.tools, "rewritten": bool(step.rewritten)}
    reply: dict[str, Json] = {"observation": {**observation, "metadata": metadata}, "reward": reward}
    reply |= {"done": bool(step.done), **({"metadata": metadata} if metadata else {})}
    converted: dict[str, Json] = json.loads(json.dumps(reply, default=_as_number_or_text))
    return converted


def step_from_reply(reply: Reply) -> Step:
    """Convert a reply back to a step, see `reply_to_json`. InfrastructureError: it breaks the schema."""
    metadata = dict(reply.metadata)
    try:
        # A chat template would fail on other messages, far from here.
        check_shape({"messages": [], **reply.observation}, "observation")
        truncated = flag(metadata.pop("truncated", None), "truncated")
        rewritten = flag(reply.observation.get("rewritten"), "rewritten")
    except ValueError as error:
        raise InfrastructureError(f"the server broke the protocol: {error}") from None
    return Step(
        messages=tuple(reply.observation.get("messages", ())),
        reward=reply.reward,
        terminated=reply.done and not truncated,
        truncated=truncated,
        tools=tuple(reply.observation.get("tools", ())),
        rewritten=rewritten,
        info=metadata,
    )
