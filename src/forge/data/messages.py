"""The parts of a conversation in a row: messages, system message, tools and arguments of the chat template."""

import json
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from .files import Row, check_values
from .writer import Message

MESSAGE_FIELDS = ("messages", "conversations")
ROLES = ("system", "user", "assistant", "tool")
# Few templates write the role developer, which is the system's by another name.
_ALIASES = {"human": "user", "gpt": "assistant", "developer": "system"}
SYSTEM_FIELDS = ("system", "system_prompt")  # columns of a row's system message
OPTIONS = "chat_template_kwargs"  # column of a row's own arguments of the template
# Keys of a message that say whether it is trained, and others that look like one.
_TRAINED = ("trained", "weight", "loss", "loss_mask", "train", "trainable", "training")
_LIKE_TRAINED = re.compile("weight|loss|mask|train")
# Columns, and keys of messages, with a part of a prompt that is not text.
_MEDIA = re.compile("(image|video|audio)s?(_(path|url|file|byte)s?)?|pixel_values|history")


def read_messages(row: Row, field: str) -> list[Message]:
    """Return the messages in a field of a row as dicts {role, content}, which keep other keys such as tool_calls.

    A row may also write a message as {from, value}, with the roles human and gpt.

    Raises:
        ValueError: there is no such field, it holds no list of messages, a role is unknown, content is not text, or a
            value is missing (nan) or holds half a character.

    >>> read_messages({"talk": [{"from": "human", "value": "Hi"}]}, "talk")
    [{'role': 'user', 'content': 'Hi'}]
    """
    if field not in row:
        raise ValueError(f"no field {field!r}: the row has {', '.join(row)}")
    if not isinstance(row[field], list) or not row[field]:
        raise ValueError(f"field {field!r} must be a list of messages, got {str(row[field])[:60]!r}")

    conversation = []
    for number, entry in enumerate(row[field], 1):
        location = f"{field}, message {number}"
        if not isinstance(entry, Mapping):
            raise ValueError(f"{location} must be a message {{role, content}}, not {type(entry).__name__}")

        # Columnar files give every message the keys of all others, as None.
        message = {name: value for name, value in entry.items() if value is not None}
        check_values(message, location)
        check_media(message, (), location)

        if "from" in message and "role" not in message:
            message = {"role": message.pop("from"), "content": message.pop("value", None), **message}
        message["role"] = _ALIASES.get(str(message.get("role")), message.get("role"))
        if message["role"] not in ROLES:
            raise ValueError(f"{location} has the role {message['role']!r}: use {', '.join(ROLES)}")

        calls = message.get("tool_calls", [])
        if message.get("function_call") or not isinstance(calls, list) or not all(isinstance(c, dict) for c in calls):
            raise ValueError(
                f"{location} must have its calls in tool_calls, a list of objects, not in function_call or as text"
            )

        # OpenAI's format has another field for the text with which the assistant declines.
        message["content"] = message.get("content") or message.get("refusal", "" if calls else message.get("content"))
        if not isinstance(message.get("content"), str):
            raise ValueError(f"{location} must have text as its content, not {type(message.get('content')).__name__}")
        conversation.append(_mark_trained(message, location))

    # Many templates write which tool a result is of, and OpenAI's format has only the id of its call.
    all_calls = [call for message in conversation for call in message.get("tool_calls", ())]
    tool_names = {call.get("id"): (call.get("function") or call).get("name") for call in all_calls}
    return [
        {"name": tool_names[m["tool_call_id"]], **m}
        if m["role"] == "tool" and m.get("tool_call_id") in tool_names
        else m
        for m in conversation
    ]


def _mark_trained(message: Message, location: str) -> Message:
    """Return a message with `"trained": False` instead of a key such as `"weight": 0`, and without a key such as
    `"weight": 1`. ValueError: another value, or a key that only looks like one of these."""
    trained_keys = {name: value for name, value in message.items() if _LIKE_TRAINED.search(name)}
    for name, value in trained_keys.items():
        if name not in _TRAINED or value not in (0, 1):
            raise ValueError(f"{location} has {name}={value!r:.40}, but the weight of a message must be 0 or 1")
        if value and message["role"] != "assistant":
            raise ValueError(f"{location} has {name}={value!r}: only assistant messages can have weight 1")
    message = {name: value for name, value in message.items() if name not in trained_keys}
    return message if all(trained_keys.values()) or message["role"] != "assistant" else {**message, "trained": False}


def check_media(values: Mapping[str, Any], read: Container[str], location: str) -> None:
    """Check that a row or a message has no images, sound, video or earlier turns in a field that nothing reads.

    Args:
        read: names of the fields that something reads.
        location: of the values, for the message.

    Raises:
        ValueError: names the field.
    """
    for name, value in values.items():
        is_empty = value is None or (hasattr(value, "__len__") and not len(value))
        if name not in read and not is_empty and _MEDIA.fullmatch(name):
            fix = "put earlier turns into messages" if name == "history" else "images, sound and video are unsupported"
            raise ValueError(f"{location} has {name!r}, which the model would not see: {fix}, remove it")


def row_options(row: Row) -> dict[str, Any]:
    """Return the arguments that a row has for the chat template: its `tools`, and those in `chat_template_kwargs`.

    Raises:
        ValueError: they are not a list of schemas in OpenAI's format and a mapping, or the JSON text of these.
    """
    decoded = {}
    for name in ("tools", OPTIONS):
        encoded = row.get(name)
        try:
            decoded[name] = json.loads(encoded or "null") if isinstance(encoded, str) else encoded
        except ValueError as error:
            raise ValueError(f"the {name} of a conversation are invalid JSON: {error}") from None

    tools, options = decoded["tools"] or [], decoded[OPTIONS] or {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"the tools of a conversation must be a list of schemas, not {type(tools).__name__}")

    # Other APIs have a function's fields in the tool itself, Anthropic's and MCP the parameters by another name.
    key_aliases = {"input_schema": "parameters", "inputSchema": "parameters"}
    tools = [
        {"type": "function", "function": {key_aliases.get(key, key): tool[key] for key in tool if key != "type"}}
        if "name" in tool and "function" not in tool
        else tool
        for tool in tools
    ]
    if not isinstance(options, Mapping):
        raise ValueError(f"{OPTIONS} must be a mapping, not {type(options).__name__}")
    check_values(tools, "tools")
    return {**options, **({"tools": tools} if tools else {})}


def row_system(row: Row, read: Container[str] = ()) -> str:
    """Return the text of a row's system message in a column `system` or `system_prompt`; "" if it has none.

    Args:
        read: names of the columns that something else reads.

    Raises:
        ValueError: it is not text.
    """
    text = next((row[name] for name in SYSTEM_FIELDS if name not in read and row.get(name)), "")
    if not isinstance(text, str):
        raise ValueError(f"the system message of a row must be text, not {type(text).__name__}")
    return text


def with_system(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with `text` as first system message, unless it is "". ValueError: they start with another
    one."""
    has_system = messages[0]["role"] == "system"
    if text and has_system and messages[0]["content"] != text:
        raise ValueError(
            f"the row has two system messages, which exclude each other: {text!r:.60} and "
            f"{messages[0]['content']!r:.60}"
        )
    return [{"role": "system", "content": text}, *messages] if text and not has_system else list(messages)
