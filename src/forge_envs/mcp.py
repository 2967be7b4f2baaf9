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

CLOSE_TIMEOUT = 30.0  # seconds, more than the SDK takes to end a program
# Codes of errors of the connection or of the whole server, not of one tool.
_FAILURES = (CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST, PARSE_ERROR)

Streams = tuple[Any, Any]  # of the SDK: a read stream and a write stream


class MCPTools(ABC):
    """The tools of one MCP server, which may be called concurrently.

    A call that fails, times out or names an unknown tool raises `ToolError`. If the server cannot be reached, or its
    answer is not MCP, a call raises `InfrastructureError` and ends the session; the next call opens another one.

    Args:
        name: the server in errors.
        timeout: seconds for one call.
        start_timeout: seconds for initialize and tools/list.
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
        self._details = ""  # appended to errors of the connection: the end of a program's log

    async def open(self) -> None:
        """Connect to the server and list its tools; no effect while connected.

        Raises:
            InfrastructureError: the server does not answer as MCP requires within `start_timeout` seconds.
        """
        async with self._opening:
            if self._session is not None:
                return
            # The task of a lost connection may not have ended.
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
        """Return the tools as function schemas in OpenAI's format; RuntimeError if `open` was not called."""
        if self._schemas is None:
            raise RuntimeError(f"the tools of {self.name} are unknown: call `await open()` first")
        return self._schemas

    async def call(self, name: str, arguments: Mapping[str, Json]) -> str:
        """Call a tool and return its result as text.

        Raises:
            ToolError: the tool failed, does not exist, or took more than `timeout` seconds.
            InfrastructureError: the server cannot be reached, or its answer is not MCP.
        """
        # Arguments that cannot be encoded would end the connection.
        try:
            json.dumps(dict(arguments), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ToolError("the arguments hold a lone surrogate, which is not a character") from None

        await self.open()
        session: Any = self._session
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

        # The session has failed, and is closed, unless a concurrent call has replaced it already.
        if self._session is session:
            await self.close()  # sets `_details`
        raise InfrastructureError(f"{self.name}: {message}{self._details}")

    async def close(self) -> None:
        """Disconnect; no effect while disconnected. `open` connects again."""
        task = self._task
        self._task = None
        # Before the first await, so that concurrent calls do not use a session that is being closed.
        self._session = None
        self._stop.set()
        if task is not None:
            # Not cancelled at once: the SDK needs seconds to end a program, or to kill it, which would be left running.
            await asyncio.wait([task], timeout=CLOSE_TIMEOUT)
            task.cancel()

    async def _hold_connection(self, ready: asyncio.Future[None], stop: asyncio.Event) -> None:
        """Connect, and hold the connection until it fails or `stop` is set.

        It runs as a separate task, since the SDK's contexts must be exited by the task that has entered them.

        Args:
            ready: gets its result once the tools are listed, or the error.
        """
        reason = "it was closed"

        try:
            async with self._open_connection() as (read, write), ClientSession(read, write) as session:
                async with asyncio.timeout(self._start_timeout):
                    await session.initialize()
                    # A server may list its tools in several pages.
                    page = await session.list_tools()
                    tools = [*page.tools]
                    while page.next_cursor:
                        page = await session.list_tools(params=PaginatedRequestParams(cursor=page.next_cursor))
                        tools += page.tools
                    self._schemas = tuple(
                        function_schema(tool.model_dump(by_alias=True, mode="json")) for tool in tools
                    )
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
            # Otherwise `close` and `open` have started another connection, whose session this is.
            if self._stop is stop:
                self._session = None

    @abstractmethod
    def _open_connection(self) -> AbstractAsyncContextManager[Streams]:
        """Return a context in which the server is connected by a read stream and a write stream."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class StdioTools(MCPTools):
    """The tools of a program that is an MCP server, and runs from `open` to `close`.

    To end it, its standard input is closed, upon which MCP requires it to exit.

    Args:
        command: the program and its arguments.
        cwd: its working directory; None: this process's.
        env: environment variables in addition to this process's.
        timeout: seconds for one call.
        start_timeout: seconds for initialize and tools/list.

    Raises:
        ValueError: the command is one string, or empty.
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
    """The tools of an MCP server that is reached by streamable HTTP, from the event loop in which it is opened.

    Args:
        url: the server's endpoint, such as http://127.0.0.1:8000/mcp.
        headers: HTTP headers for every request, such as an authorization.
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
