"""Messages of clients as the chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from forge_envs.dialogue import Dialogue

from .messages import Call, Message


def prompt(dialogue: Dialogue, messages: Iterable[Message]) -> list[dict[str, Any]]:
    """A conversation with thoughts and calls in the template's form, neighbouring messages of the user joined: many
    templates take them in turn only."""
    rendered: list[dict[str, Any]] = []
    for message in messages:
        converted = _converted(message, dialogue)
        if converted["role"] == "user" and rendered and rendered[-1]["role"] == "user":
            rendered[-1] = {"role": "user", "content": f"{rendered[-1]['content']}\n\n{converted['content']}"}
        else:
            rendered.append(converted)
    return rendered


def _converted(message: Message, dialogue: Dialogue) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "tool", "name": message.get("name") or "tool", "content": message["content"]}
    converted = {"role": message["role"], "content": message["content"]}
    if message.get("thought"):
        converted["reasoning_content"] = message["thought"]
    calls = message.get("calls", ())
    if calls and dialogue.writes_calls:
        converted["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in calls
        ]
    elif calls:
        parts = [converted["content"], *(_call_text(call, dialogue.syntax) for call in calls)]
        converted["content"] = "\n".join(part for part in parts if part)
    return converted


def _arguments(call: Call) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    # A client's text may be anything.
    return arguments if isinstance(arguments, dict) else {"arguments": call.arguments}


def _call_text(call: Call, syntax: str) -> str:
    """A call as the policy writes it, for a template without a place for calls."""
    arguments = _arguments(call)
    if syntax == "plain":
        return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
    if syntax == "llama3":
        return json.dumps({"name": call.name, "parameters": arguments}, ensure_ascii=False)
    text = json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"
