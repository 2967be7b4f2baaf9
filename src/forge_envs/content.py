"""Conversion of MCP's tools and results for models, and helpers for server programs."""

import os
from collections.abc import Mapping, Sequence
from typing import IO, Any

from forge.types.conversation import as_text

TAIL = 2000  # bytes of a program's log that an error shows
Json = Any  # the parsed JSON of a message or its parts


def function_schema(tool: Mapping[str, Json]) -> dict[str, Json]:
    """Convert an MCP tool to a function schema in OpenAI's format."""
    parameters = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters},
    }


def text_of(result: Mapping[str, Json]) -> str:
    """Return the content blocks of an MCP tool's result as text, separated by line breaks.

    >>> text_of({"content": [{"type": "text", "text": "a"}, {"type": "image", "mimeType": "image/png"}]})
    'a\\n[image, image/png, not shown]'
    """
    blocks = result.get("content") or []
    structured = result.get("structuredContent", result.get("structured_content"))
    if not blocks and structured is not None:
        return as_text(structured)
    return "\n".join(map(_text_of_block, blocks))


def shorten_text(text: str, limit: int) -> str:
    """Cut a text to `limit` characters, with the number of omitted characters; return a shorter text unchanged."""
    surplus = len(text) - limit
    return text if surplus <= 0 else f"{text[:limit]}... ({surplus} more characters)"


def _text_of_block(block: Mapping[str, Json]) -> str:
    kind = block.get("type")
    if kind == "text":
        return str(block.get("text", ""))
    resource = block.get("resource")
    if kind == "resource" and isinstance(resource, Mapping):
        return str(resource.get("text", f"[resource {resource.get('uri')}, {resource.get('mimeType')}]"))
    if kind == "resource_link":
        return f"[resource {block.get('uri')}: {block.get('name')}]"
    return f"[{kind}, {block.get('mimeType', 'of unknown type')}, not shown]"


def check_command(command: Sequence[str]) -> None:
    """Raise ValueError if a command is one string or empty: it must be a list of the program and its arguments."""
    if not command or isinstance(command, str):
        raise ValueError(f"a command must be a list of a program and its arguments, got {command!r}")


def tail_of(log: IO[Any]) -> str:
    """Return the last 2000 bytes of a program's log file as text, for an error message; "(nothing)" if it is empty."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace").strip() or "(nothing)"
