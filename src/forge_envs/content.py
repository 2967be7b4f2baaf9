"""MCP tools and results in the form that models read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def function_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """An MCP tool as an OpenAI function schema."""
    parameters = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
    about = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": about}


def text_of(result: Mapping[str, Any]) -> str:
    """The content blocks of a result, one per line; blocks other than text are named."""
    blocks = result.get("content") or []
    structured = result.get("structuredContent", result.get("structured_content"))
    if not blocks and structured is not None:
        return json.dumps(structured)
    return "\n".join(map(_block, blocks))


def _block(block: Mapping[str, Any]) -> str:
    kind = block.get("type")
    if kind == "text":
        return str(block.get("text", ""))
    if kind == "resource" and isinstance(resource := block.get("resource"), Mapping):
        return str(resource.get("text", f"[resource {resource.get('uri')}, {resource.get('mimeType')}]"))
    if kind == "resource_link":
        return f"[resource {block.get('uri')}: {block.get('name')}]"
    return f"[{kind}, {block.get('mimeType', 'of unknown type')}, not shown]"
