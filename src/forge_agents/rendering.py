"""Messages of clients as the chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from forge.envs.dialogue import Dialogue

from .messages import Call, Message, Schema


def prompt(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """A conversation with thoughts and calls in the template's form, neighbouring messages of the user joined: many
    templates take them in turn only."""
    rendered: list[dict[str, Any]] = []
    for message in messages:
        converted = _converted(message)
        if converted["role"] == "user" and rendered and rendered[-1]["role"] == "user":
            rendered[-1] = {"role": "user", "content": f"{rendered[-1]['content']}\n\n{converted['content']}"}
        else:
            rendered.append(converted)
    return rendered


def extension(
    dialogue: Dialogue, tokens: Sequence[int], messages: Iterable[Message], tools: Sequence[Schema]
) -> list[int]:
    """The tokens of new messages after a turn. ValueError: as of `Dialogue.extend`."""
    return dialogue.extend(tokens, prompt(messages), tools)


def _converted(message: Message) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "tool", "name": message.get("name") or "tool", "content": message["content"]}
    converted = {"role": message["role"], "content": message["content"]}
    if message.get("thought"):
        converted["reasoning_content"] = message["thought"]
    if message.get("calls"):
        converted["tool_calls"] = [_call(call) for call in message["calls"]]
    return converted


def _call(call: Call) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = {"arguments": call.arguments}  # a client's own text, which is no JSON
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
