"""The official MCP SDK, version 1 or 2: what differs between them, under one name."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from inspect import signature
from typing import Any

from forge.envs.schemas import quick
from forge.system.bounded_http import MAX_BYTES

try:
    import anyio
    import mcp
    from mcp import ClientSession
    from mcp import types as mcp_types
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared.message import SessionMessage
    from mcp.types import CONNECTION_CLOSED, PaginatedRequestParams
except ImportError as error:
    raise ImportError("MCP tools need the mcp package: pip install 'mcp>=1.24,<3'") from error

SDK: Any = mcp  # mypy sees the installed version alone
TYPES: Any = mcp_types
IS_FIRST = hasattr(SDK, "McpError")
McpError: Any = SDK.McpError if IS_FIRST else SDK.MCPError
TIMED_OUT: int = 408 if IS_FIRST else TYPES.REQUEST_TIMEOUT

http: Any = import_module("httpx" if IS_FIRST else "httpx2")

# The second version's own limit is 1 MiB; the transport has ours.
_parameters = signature(streamable_http_client).parameters
STREAM_OPTIONS: dict[str, Any] = {"max_sse_event_size": MAX_BYTES} if "max_sse_event_size" in _parameters else {}

__all__ = [
    "CONNECTION_CLOSED",
    "STREAM_OPTIONS",
    "TIMED_OUT",
    "McpError",
    "PaginatedRequestParams",
    "Session",
    "SessionMessage",
    "anyio",
    "http",
    "is_error",
    "next_cursor",
    "read_message",
    "streamable_http_client",
    "timeout_of",
]


class Session(ClientSession):
    """The SDK's session, which checks results by their schemas, patterns excepted: they would block the event loop."""

    async def list_tools(self, *args: Any, **options: Any) -> Any:
        """Return a page of tools, whose results are checked from then on without patterns."""
        page: Any = await super().list_tools(*args, **options)
        for tool in page.tools:
            schema = tool.outputSchema if IS_FIRST else tool.output_schema
            if schema:
                # In place, for the session keeps the same object.
                checked = dict(quick(schema))
                schema.clear()
                schema.update(checked)
        return page


def timeout_of(seconds: float) -> Any:
    """A timeout of a request, as `ClientSession` takes it."""
    return timedelta(seconds=seconds) if IS_FIRST else seconds


def read_message(line: bytes) -> Any:
    """A message of the protocol from its JSON. ValueError: it is none."""
    if IS_FIRST:
        return TYPES.JSONRPCMessage.model_validate_json(line)
    return TYPES.jsonrpc_message_adapter.validate_json(line)


def is_error(result: Any) -> bool:
    """Whether the result of a call is a tool's error."""
    return bool(result.isError if IS_FIRST else result.is_error)


def next_cursor(page: Any) -> str | None:
    """Where the next page of a list begins; None: there is none."""
    return page.nextCursor if IS_FIRST else page.next_cursor  # type: ignore[no-any-return]
