"""Tools of MCP servers over stdio and streamable HTTP, with the official SDK.

    tools = StdioTools(["python", "server.py"])
    await tools.open()
    toolbox = Toolbox(servers=[tools])

Both implement `forge_envs.tools.ToolServer`. They need the SDK: pip install 'mcp>=2,<3'.
"""

import asyncio
import json
import logging
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Self

from forge_envs.environment import InfrastructureError
from forge_envs.tools import ToolError
from forge_http.bounded_http import MAX_BYTES, bounded_transport

from .content import Json, check_command, function_schema, tail_of, text_of

try:
    import httpx2
    from mcp import ClientSession, MCPError, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.types import (
        CONNECTION_CLOSED,
        INTERNAL_ERROR,
        INVALID_REQUEST,
        PARSE_ERROR,
        REQUEST_TIMEOUT,
        PaginatedRequestParams,
    )
except ImportError as error:
    raise ImportError("MCP tools need the mcp package: pip install 'mcp>=2,<3'") from error

log = logging.getLogger(f"forge.{__name__}")

__all__ = ["HTTPTools", "StdioTools", "ToolError"]

CLOSE_TIMEOUT = 30.0  # seconds, above those that the SDK takes
# Errors of the connection or of the server as a whole, not of a tool.
_FAILURES = (CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST, PARSE_ERROR)

Streams = tuple[Any, Any]  # of the SDK: a read stream and a write stream


class MCPTools(ABC):
    """The tools of one server. Calls may run concurrently.

    A call that fails, times out or names no tool is a `ToolError`. A server that is gone, or answers with what is not
    MCP, is an `InfrastructureError`: it ends the session, and the next call opens another.
    """

    def __init__(self, name: str, timeout: float, start_timeout: float) -> None:
        self.name = name
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._schemas: tuple[dict[str, Json], ...] | None = None
        self._session: ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._opening = asyncio.Lock()
        self._details = ""  # on the end of the connection, for an error

    async def open(self) -> None:
        """Connect and list the tools; no effect while connected.

        InfrastructureError: the server does not answer as MCP requires within `start_timeout` seconds.
        """
        async with self._opening:
            if self._session is not None:
                return
            # A connection that was lost may have left a task behind.
            await self.close()
            self._stop = asyncio.Event()
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._hold_connection(ready, self._stop))
            try:
                await asyncio.shield(ready)
            except BaseException:
                await self.close()
                raise

    def schemas(self) -> tuple[dict[str, Json], ...]:
        """Return the tools in OpenAI's form. RuntimeError: `open` was not called."""
        if self._schemas is None:
            raise RuntimeError(f"the tools of {self.name} are not known before `await open()`")
        return self._schemas

    async def call(self, name: str, arguments: Mapping[str, Json]) -> str:
        """Call a tool and return its result as text.

        Raises:
            ToolError: the tool failed, does not exist, or took more than `timeout` seconds.
            InfrastructureError: the server is gone.
        """
        try:
            json.dumps(dict(arguments), ensure_ascii=False).encode()
        except UnicodeEncodeError:  # it would end the connection
            raise ToolError("the arguments hold a lone surrogate, which is not a character") from None

        await self.open()
        session = self._session
        assert session is not None

        try:
            result: Any = await session.call_tool(name, dict(arguments), self._timeout)
            text = text_of(result.model_dump(by_alias=True, mode="json", exclude_none=True))
        except MCPError as error:
            if error.error.code == REQUEST_TIMEOUT:
                raise ToolError(f"{name} took more than {self._timeout:g} s") from None
            if error.error.code not in _FAILURES:
                raise ToolError(error.error.message) from None
            message = error.error.message
        except RuntimeError as error:  # the result violates the tool's output schema
            raise ToolError(str(error)) from None
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            message = f"it answered {name} with what is not MCP: {error}"[:500]
        else:
            if result.is_error:
                raise ToolError(text)
            return text

        # The session is of no more use, unless another call has replaced it.
        if self._session is session:
            await self.close()  # after which the end of a program's log is known
        raise InfrastructureError(f"{self.name}: {message}{self._details}")

    async def close(self) -> None:
        """Disconnect; idempotent. `open` reconnects."""
        task = self._task
        self._task = None
        # Set at once: calls from now on do not use a session that ends.
        self._session = None
        self._stop.set()
        if task is not None:
            # The SDK gives a program seconds to end, and then kills it; a cancelled task would leave it.
            await asyncio.wait([task], timeout=CLOSE_TIMEOUT)
            task.cancel()

    async def _hold_connection(self, ready: asyncio.Future[None], stop: asyncio.Event) -> None:
        """Hold the connection: the SDK's contexts must be exited by the task that entered them."""
        reason = "it was closed"

        try:
            async with self._open_connection() as (read, write), ClientSession(read, write) as session:
                async with asyncio.timeout(self._start_timeout):
                    await session.initialize()
                    self._schemas = await _list_tools(session)
                self._session = session
                ready.set_result(None)
                await stop.wait()
        except Exception as error:
            # Task groups wrap the error that ended them.
            cause: BaseException = error
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            reason = str(cause) or f"it did not answer initialize and tools/list within {self._start_timeout:g} s"
            log.info("the connection to %s ended: %s", self.name, reason)
        finally:
            if not ready.done():
                ready.set_exception(InfrastructureError(f"{self.name}: {reason}{self._details}"))
            if self._stop is stop:  # or `close` and `open` have replaced it
                self._session = None

    @abstractmethod
    def _open_connection(self) -> AbstractAsyncContextManager[Streams]:
        """Return an async context manager of a read stream and a write stream."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class StdioTools(MCPTools):
    """The tools of a program, which runs from `open` to `close`. It ends when its standard input does, as MCP requires.

    Args:
        command: program and arguments.
        cwd: working directory.
        env: variables added to this process's.
        timeout: seconds for one call.
        start_timeout: seconds for initialize and tools/list.

    Raises:
        ValueError: a command that is a string.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        start_timeout: float = 30.0,
    ) -> None:
        check_command(command)
        super().__init__(" ".join(command), timeout, start_timeout)
        self._parameters = StdioServerParameters(
            command=command[0],
            args=list(command[1:]),
            cwd=cwd,
            env={**os.environ, **(env or {})},
            encoding_error_handler="replace",
        )

    @asynccontextmanager
    async def _open_connection(self) -> AsyncIterator[Streams]:
        with tempfile.TemporaryFile("w+") as log:
            try:
                async with stdio_client(self._parameters, errlog=log) as streams:
                    yield streams
            except OSError as error:
                raise InfrastructureError(f"{self._parameters.command}: {error.strerror}") from error
            finally:
                self._details = f"; its log ends with:\n{tail_of(log)}"


class HTTPTools(MCPTools):
    """The tools of a server over streamable HTTP, bound to the event loop in which it is opened.

    Args:
        url: of its endpoint, such as http://127.0.0.1:8000/mcp.
        headers: sent with every request, such as an authorization.
        timeout: seconds for one call.
        start_timeout: seconds for initialize and tools/list.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        start_timeout: float = 30.0,
    ) -> None:
        super().__init__(url, timeout, start_timeout)
        self._headers = headers

    @asynccontextmanager
    async def _open_connection(self) -> AsyncIterator[Streams]:
        limits = httpx2.Timeout(self._start_timeout, read=None)
        transport = bounded_transport(httpx2)()
        async with (
            httpx2.AsyncClient(headers=self._headers, timeout=limits, transport=transport) as client,
            streamable_http_client(self.name, http_client=client, max_sse_event_size=MAX_BYTES) as streams,
        ):
            yield streams


async def _list_tools(session: ClientSession) -> tuple[dict[str, Json], ...]:
    """List a server's tools, page by page."""
    page = await session.list_tools()
    tools = [*page.tools]
    while page.next_cursor:
        page = await session.list_tools(params=PaginatedRequestParams(cursor=page.next_cursor))
        tools += page.tools
    return tuple(function_schema(tool.model_dump(by_alias=True, mode="json")) for tool in tools)
