"""Messages of MCP servers in a form that the SDK reads: it drops others, and their calls time out."""

from __future__ import annotations

import json
import re
from typing import Any

from .content import Json
from .mcp_sdk import CONNECTION_CLOSED, TIMED_OUT, read_message

FAILED = -32099  # our error code of an answer that is not MCP
_NUMBER = re.compile(r'"id"\s*:\s*(\d{1,9})\b')
_INTERNAL = -32603  # JSON-RPC's code of a server's own error


def failure(number: Json, message: str, lost: bool = False) -> dict[str, Json]:
    """The answer to a request whose own answer is not MCP. `lost`: the session is over."""
    return {"jsonrpc": "2.0", "id": number, "error": {"code": FAILED, "message": message, "data": lost}}


def is_answer(document: Json) -> bool:
    """Whether JSON is meant as the answer to a request."""
    return isinstance(document, dict) and "method" not in document and bool({"result", "error"} & document.keys())


def encoded(document: Json) -> bytes:
    """A message as JSON, with "?" for lone surrogates. ValueError: it is not MCP."""
    error = document.get("error") if isinstance(document, dict) else None
    # These codes are the SDK's and ours; of a server they would be read as a timeout or a loss.
    if isinstance(error, dict) and error.get("code") in (CONNECTION_CLOSED, TIMED_OUT, FAILED):
        document = {**document, "error": {**error, "code": _INTERNAL}}
    try:
        text = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
    except RecursionError as too_deep:
        raise ValueError("it is nested too deep") from too_deep
    read_message(text)
    return text


def messages_of(line: bytes, name: str) -> list[Any]:
    """The message of a line; none if the server prints; errors for the requests that it answers with other JSON."""
    text = line.decode(errors="replace")
    message = f"{name} answered with what is not MCP: {text[:200]!r}"
    numbers: list[Json]
    try:
        document = json.loads(text)
    except json.JSONDecodeError:
        return []
    except (ValueError, RecursionError):  # it has a number of too many digits, or is nested too deep
        numbers = list(map(int, _NUMBER.findall(text[:200])[:1]))
    else:
        try:
            return [read_message(encoded(document))]
        except ValueError:
            parts = document if isinstance(document, list) else [document]
            numbers = [part["id"] for part in parts if _has_number(part)]
    return [read_message(json.dumps(failure(number, message)).encode()) for number in numbers]


def _has_number(document: Json) -> bool:
    return is_answer(document) and isinstance(document.get("id"), int | str) and not isinstance(document["id"], bool)
