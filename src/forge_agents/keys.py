"""Keys of conversations: equal where a client sends the same history again, however it has serialised it.

Clients reorder the keys of arguments, change white space, drop thoughts and ids, and join the parts of a text. The
tokens that were sampled stay the authority; a key only finds them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from .messages import Message, Schema


def tools_key(tools: Sequence[Schema]) -> bytes:
    """The key of the tools that a request offers, in any order."""
    return _digest(*sorted(json.dumps(tool, sort_keys=True) for tool in tools))


def message_key(message: Message) -> bytes:
    """The key of a message without its thought and ids."""
    if message["role"] != "assistant":
        return _digest(message["role"], loose(message["content"]))
    calls = [f"{call.name} {_arguments(call.arguments)}" for call in message.get("calls", ())]
    return _digest("assistant", loose(message["content"]), *calls)


def conversation_keys(start: bytes, messages: Iterable[Message]) -> list[bytes]:
    """The key of a conversation after each of its messages. `start` is that of what came before: of the tools, or of an
    earlier turn."""
    keys = []
    key = start
    for message in messages:
        key = _digest(key.hex(), message_key(message).hex())
        keys.append(key)
    return keys


def loose(text: str) -> str:
    """A text with its white space made uniform."""
    return " ".join(text.split())


@lru_cache(1 << 12)
def _arguments(text: str) -> str:
    """Arguments in one spelling; a text that is not JSON is its own."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return loose(text)


def _digest(*parts: Any) -> bytes:
    # Each part with its length, so that two lists of parts never read as one.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]
