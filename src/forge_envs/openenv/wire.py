"""Conversion between OpenEnv's JSON messages and this library's actions and steps."""

import json
from dataclasses import dataclass
from typing import Self

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from forge_envs.environment import Action, InfrastructureError, Step, ToolCall

from ..content import Json

MAX_MESSAGE = 100 << 20  # bytes of one message, as in OpenEnv's own client
CLOSE_LIMIT = 1.0  # seconds for the other side to acknowledge a close
FORGE_ACTION = "ForgeAction"  # the title of an action's schema by which clients recognise this library's environments
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
        "additionalProperties": False,
    },
    "observation": {
        "title": "ForgeObservation",
        "type": "object",
        "properties": {
            "messages": {"type": "array", "items": _MESSAGE, "description": "with role and content"},
            "tools": {"type": "array", "items": _TOOL, "description": "OpenAI function schemas"},
            "rewritten": {"type": "boolean", "description": "the messages replace the whole conversation"},
            "metadata": {**_OBJECT, "description": "additional information; truncated: a limit ended the episode"},
        },
        "required": ["messages"],
    },
    "state": {
        "title": "State",
        "type": "object",
        "properties": {"episode_id": _TEXT, "step_count": {"type": "integer"}},
    },
}
_TRUTH = {"enum": [True, False, None, 1, 0]}  # what servers send as a truth value
_REPLY = {
    "properties": {
        "observation": {"not": {"type": "null"}},
        "reward": {"type": ["number", "null"]},
        "done": _TRUTH,
        "metadata": {"properties": {"truncated": _TRUTH}},
    },
    "required": ["observation"],
}
_VALIDATORS = {name: Draft202012Validator(schema) for name, schema in {**SCHEMA, "reply": _REPLY}.items()}
MAX_REWARD = 1e308


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's answer to a reset or a step.

    observation: the environment's observation; one that is not an object is {"value": observation}.
    reward: the reward; None: the server gave none.
    done: whether the episode has ended.
    metadata: further information; "truncated" is true if a limit has ended the episode.
    """

    observation: dict[str, Json]
    reward: float | None
    done: bool
    metadata: dict[str, Json]

    @classmethod
    def read(cls, data: dict[str, Json]) -> Self:
        """Parse the JSON of a server's reply.

        Raises:
            InfrastructureError: it has no observation, its reward is not a finite number, or its `done` or `truncated`
                is not a truth value.
        """
        reward = data.get("reward")
        try:
            check_shape(data, "reply")
            if reward is not None and not -MAX_REWARD < reward < MAX_REWARD:
                raise ValueError(f"reply.reward: {reward!r:.80} is not a finite number")
        except ValueError as error:
            raise InfrastructureError(f"the server broke the protocol: {error}") from None
        observation, metadata = data["observation"], data.get("metadata")
        return cls(
            observation if isinstance(observation, dict) else {"value": observation},
            None if reward is None else float(reward),
            bool(data.get("done")),
            metadata if isinstance(metadata, dict) else {},
        )


def check_shape(value: Json, name: str) -> None:
    """Raise ValueError, with the position of the error, if a JSON value does not match a schema of this module.

    Args:
        name: "action", "observation", "state" or "reply".
    """
    if (error := best_match(_VALIDATORS[name].iter_errors(value))) is not None:
        raise ValueError(f"{error.json_path.replace('$', name, 1)}: {error.message[:200]}")


def to_plain(value: object) -> Json:
    """Return a scalar of NumPy or PyTorch as Python's number or boolean, and any other object as text, for JSON.

    >>> to_plain({1})
    '{1}'
    """
    return value.item() if getattr(value, "shape", None) == () else str(value)  # type: ignore[attr-defined]


def action_from_json(data: dict[str, Json]) -> Action:
    """Return the action that a client has sent as JSON; ValueError if it does not match SCHEMA["action"].

    >>> action_from_json({"text": " 4 "})
    Action(text=' 4 ', content='4', calls=(), errors=(), truncated=False)
    """
    check_shape(data, "action")
    calls = (ToolCall(call["name"], call.get("arguments", {}), call.get("id", "")) for call in data.get("calls", ()))
    text = data["text"]
    content, errors = data.get("content", text.strip()), tuple(data.get("errors", ()))
    return Action(text, content, tuple(calls), errors, data.get("truncated", False))


def reply_to_json(step: Step) -> dict[str, Json]:
    """Return a step as the JSON of a server's reply; `step_from_reply` is the inverse.

    Raises:
        TypeError: a mapping in the step has keys that JSON does not allow, such as tuples.
    """
    metadata = {**step.info, "truncated": True} if step.truncated else dict(step.info)
    observation = {"messages": step.messages, "tools": step.tools, "rewritten": step.rewritten, "metadata": metadata}
    reply = {
        "observation": observation,
        "reward": None if step.reward is None else float(step.reward),
        "done": step.done,
        "metadata": metadata,
    }
    return dict(json.loads(json.dumps(reply, default=to_plain)))


def step_from_reply(reply: Reply) -> Step:
    """Return the step that a server of this library has sent by `reply_to_json`.

    Raises:
        InfrastructureError: the observation does not match SCHEMA["observation"].
    """
    observation, metadata = {"messages": [], **reply.observation}, dict(reply.metadata)
    try:
        # Otherwise the error would appear later, in a chat template that cannot render the messages.
        check_shape(observation, "observation")
    except ValueError as error:
        raise InfrastructureError(f"the server broke the protocol: {error}") from None

    truncated = bool(metadata.pop("truncated", False))
    return Step(
        messages=tuple(observation["messages"]),
        reward=reply.reward,
        terminated=reply.done and not truncated,
        truncated=truncated,
        tools=tuple(observation.get("tools", ())),
        rewritten=observation.get("rewritten", False),
        info=metadata,
    )
