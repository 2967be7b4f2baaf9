"""MCP tools and results in the form that models read, and the commands of servers."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import IO, Any

TAIL = 2000  # bytes of a program's log that an error shows
Json = Any  # the parsed JSON of a message or its parts


def function_schema(tool: Mapping[str, Json]) -> dict[str, Json]:
    """Convert an MCP tool to an OpenAI function schema."""
    parameters = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}


def text_of(result: Mapping[str, Json]) -> str:
    """Return the content blocks of a result as text, one per line; blocks other than text are named."""
    blocks = result.get("content") or []
    structured = result.get("structuredContent", result.get("structured_content"))
    if not blocks and structured is not None:
        return json.dumps(structured)
    return "\n".join(map(_text_of_block, blocks))


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
    """ValueError: a command is a string, or empty."""
    if not command or isinstance(command, str):
        raise ValueError(f"a command must be a list of its words, got {command!r}")


def tail_of(log: IO[Any]) -> str:
    """Return the end of a program's log, for an error."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace").strip() or "(nothing)"
