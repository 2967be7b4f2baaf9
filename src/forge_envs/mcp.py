"""Tools of MCP servers over stdio and streamable HTTP, with the official SDK.

    tools = StdioTools(["python", "server.py"])
    await tools.open()
    toolbox = Toolbox(servers=[tools])

Both implement `forge.envs.tools.ToolServer`. They need the SDK: pip install 'mcp>=1.24,<3'.
"""

from __future__ import annotations

import asyncio
import json
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Self

from forge.envs.environment import InfrastructureError
from forge.envs.tools import ToolError

from .content import Json, function_schema, text_of
from .mcp_http import IsolatedTransport
from .mcp_messages import FAILED, messages_of
from .mcp_sdk import (
    CONNECTION_CLOSED,
    STREAM_OPTIONS,
    TIMED_OUT,
    McpError,
    PaginatedRequestParams,
    Session,
    SessionMessage,
    anyio,
    http,
    is_error,
    next_cursor,
    streamable_http_client,
    timeout_of,
)
from .process import Program, copy_command

__all__ = ["HTTPTools", "StdioTools", "ToolError"]

MAX_LINE = 64 << 20  # bytes of one line
MAX_TOOLS = 10_000  # of one server
PING_TIMEOUT = 5.0  # seconds

Streams = tuple[Any, Any]  # of the SDK: a read stream and a write stream


class MCPTools(ABC):
    """The tools of one server. Calls may run concurrently.

    A call that fails, times out or names no tool is a `ToolError`. A server that is gone is an `InfrastructureError`,
    once; the next call reconnects.
    """

    def __init__(self, name: str, timeout: float, start_timeout: float) -> None:
        if min(timeout, start_timeout) <= 0:
            raise ValueError(f"timeout and start_timeout must be above 0 seconds, got {timeout} and {start_timeout}")
        self.name = name
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._schemas: tuple[dict[str, Json], ...] | None = None
        self._session: Session | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._opening = asyncio.Lock()
        self._loss = ""

    @property
    def connected(self) -> bool:
        """Whether there is a session with the server."""
        return self._session is not None

    async def open(self) -> None:
        """Connect and list the tools; no effect while connected.

        InfrastructureError: the server does not answer as MCP requires within `start_timeout` seconds.
        """
        async with self._opening:
            if self.connected:
                return
            # A connection that was lost may have left a task behind.
            await self.close()
            self._stop = asyncio.Event()
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(ready, self._stop))
            try:
                async with asyncio.timeout(self._start_timeout):
                    await asyncio.shield(ready)
            except BaseException as error:
                # Before `close`, which forgets the program and the end of its log.
                details = self._end_details()
                await self.close()
                if isinstance(error, TimeoutError):
                    message = f"{self.name} did not answer initialize and tools/list within {self._start_timeout:g} s"
                    raise InfrastructureError(message + details) from None
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
        session = self._session
        if session is None:
            loss = self._loss
            self._loss = ""
            if loss:  # report the loss once: the caller may rely on the server's state
                raise InfrastructureError(loss)
            await self.open()
            session = self._session
            assert session is not None
        try:
            result = await session.call_tool(name, dict(arguments), timeout_of(self._timeout))
            text = text_of(result.model_dump(by_alias=True, mode="json", exclude_none=True))
        except McpError as error:
            if error.error.code == TIMED_OUT:
                raise ToolError(f"{name} took more than {self._timeout:g} s") from None
            if error.error.code == FAILED:
                # Another call may have reconnected meanwhile.
                if error.error.data and self._session is session:
                    await self.close()
                raise InfrastructureError(error.error.message) from None
            if error.error.code == CONNECTION_CLOSED:
                raise await self._loss_error(error.error.message) from None
            raise ToolError(error.error.message) from None
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise await self._loss_error() from None
        except RuntimeError as error:  # the result violates the tool's output schema
            raise ToolError(str(error)) from None
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise InfrastructureError(f"{self.name} answered {name} with what is not MCP: {error}"[:500]) from error
        if is_error(result):
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """Disconnect; idempotent. `open` reconnects."""
        task = self._task
        self._task = None
        # Set at once: calls from now on do not use a session that ends.
        self._session = None
        self._loss = ""
        self._stop.set()
        if task is not None:
            await asyncio.wait([task], timeout=2 * PING_TIMEOUT)
            # The server did not let go.
            task.cancel()
            await asyncio.wait([task])

    async def _run(self, ready: asyncio.Future[None], stop: asyncio.Event) -> None:
        """Hold the connection: the SDK's contexts must be exited by the task that entered them."""
        reason = f"{self.name} has gone"
        try:
            async with self._connect() as (read, write), Session(read, write) as session:
                await session.initialize()
                tools: list[dict[str, Json]] = []
                seen: set[str] = set()
                page = await session.list_tools()
                while True:
                    tools += [function_schema(tool.model_dump(by_alias=True, mode="json")) for tool in page.tools]
                    cursor = next_cursor(page)
                    if not cursor:
                        break
                    if len(tools) > MAX_TOOLS or cursor in seen:
                        raise InfrastructureError(f"its list of tools has no end: {len(tools)} so far")
                    seen.add(cursor)
                    page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
                self._schemas = tuple(tools)
                self._session = session
                ready.set_result(None)
                await stop.wait()
        except BaseException as error:
            # Task groups wrap the error that ended them.
            cause: BaseException = error
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            reason = f"{self.name}: {cause}"
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            is_current = self._stop is stop  # or `close` and `open` have replaced it
            if is_current:
                self._session = None
            if not ready.done():
                ready.set_exception(InfrastructureError(f"{reason}{self._end_details()}"))
            elif is_current and not stop.is_set():
                self._loss = f"{reason}{self._end_details()}"

    async def _loss_error(self, message: str = "") -> InfrastructureError:
        """Return the error of a connection that ended, once its reason is known; `message` if it is still there."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=PING_TIMEOUT)
        loss = self._loss
        self._loss = ""
        if not loss and message and self.connected:
            loss = f"{self.name}: {message}"
        return InfrastructureError(loss or f"{self.name} was closed")

    @abstractmethod
    def _connect(self) -> AbstractAsyncContextManager[Streams]:
        """Return an async context manager of a read stream and a write stream."""

    def _end_details(self) -> str:
        """Details on the end of the connection, for an error."""
        return ""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class StdioTools(MCPTools):
    """The tools of a program, which runs from `open` to `close` and ends with this process, even if that is killed.

    After a call that timed out or was cancelled the program is pinged. If it does not answer, it is restarted, and the
    current call raises `ToolError`.

    Args:
        command: program and arguments.
        cwd: working directory.
        env: variables added to those of this process.
        timeout: seconds for one call.
        start_timeout: seconds for initialize and tools/list.

    Raises:
        ValueError: a timeout that is not positive, or a command that is a string.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        start_timeout: float = 30.0,
    ) -> None:
        super().__init__(" ".join(copy_command(command)), timeout, start_timeout)
        self._command = copy_command(command)
        self._cwd = cwd
        self._env = dict(env or {})
        self._program: Program | None = None
        self._end = ""
        self._unanswered = False  # a call timed out or was cancelled: the program may hang
        self._checking = asyncio.Lock()

    async def call(self, name: str, arguments: Mapping[str, Json]) -> str:
        """Call a tool; see `MCPTools.call`."""
        async with self._checking:
            if self._unanswered and self._session is not None:
                self._unanswered = False
                try:
                    async with asyncio.timeout(PING_TIMEOUT):
                        with suppress(McpError):  # pings are unsupported, but it answers
                            await self._session.send_ping()
                except TimeoutError:
                    await self.close()
                    await self.open()
                    raise ToolError(
                        f"{self.name} hung in an earlier call and was restarted: what it had kept is lost, call again"
                    ) from None
        # How long a call took tells a timeout from a tool that failed.
        started = asyncio.get_running_loop().time()
        try:
            return await super().call(name, arguments)
        except asyncio.CancelledError:
            self._unanswered = True
            raise
        except ToolError:
            self._unanswered |= asyncio.get_running_loop().time() - started >= self._timeout
            raise

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Streams]:
        # Not the SDK's stdio client: its process outlives this one if this is killed, and its exit code is hidden.
        self._end = ""
        program = self._program = await Program.start(
            self._command, pipes=True, line_limit=MAX_LINE, cwd=self._cwd, env=self._env
        )
        assert program.stdin is not None
        assert program.stdout is not None
        stdin = program.stdin
        stdout = program.stdout
        # The SDK's session takes streams of messages: they are connected to the program's pipes.
        to_session, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, from_session = anyio.create_memory_object_stream[SessionMessage](0)

        all_read = asyncio.Event()
        fault = ""

        async def reading() -> None:
            nonlocal fault
            try:
                async with to_session:
                    while line := await stdout.readline():
                        for message in messages_of(line, self.name):
                            await to_session.send(SessionMessage(message))
            except ValueError:  # of readline
                fault = f"it sent a line of more than {MAX_LINE >> 20} MiB"
            except anyio.BrokenResourceError:  # the session was closed before the line's end
                return
            finally:
                all_read.set()

        async def writing() -> None:
            async with from_session:
                async for item in from_session:
                    stdin.write(item.message.model_dump_json(by_alias=True, exclude_none=True).encode() + b"\n")
                    await stdin.drain()

        async def watching() -> None:
            ends = [asyncio.create_task(all_read.wait()), asyncio.create_task(program.wait(float("inf")))]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                # A program that closes its output gets a second to end, and one that ends is read to its last line.
                await asyncio.wait(ends, timeout=1.0)
            finally:
                for task in ends:
                    task.cancel()
            if not self._stop.is_set():
                state = "has closed its output" if program.returncode is None else "has gone"
                raise InfrastructureError(fault or f"it {state}")

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(reading)
                tasks.start_soon(writing)
                tasks.start_soon(watching)
                yield read, write
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                grace = 0.0 if self._unanswered else PING_TIMEOUT
                # An unexpected end is described while its log still exists.
                if not self._stop.is_set():
                    await program.wait(1.0)
                    self._end = f"; {program.describe_end()}"
                    grace = min(grace, 1.0)  # calls wait for the reason
                await program.stop(grace)

    def _end_details(self) -> str:
        return self._end or ("" if self._program is None else f"; {self._program.describe_end()}")


class HTTPTools(MCPTools):
    """The tools of a server over streamable HTTP, bound to the event loop in which it is opened.

    An HTTP error status fails only its own call; a lost connection or session ends all calls.

    Args:
        url: of its endpoint, such as http://127.0.0.1:8000/mcp.
        headers: sent with every request, such as an authorization.
        timeout: seconds for one call.
        start_timeout: seconds for initialize and tools/list.

    Raises:
        ValueError: a timeout that is not positive, or an unsupported scheme.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        start_timeout: float = 30.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the url of an MCP server must begin with http:// or https://, got {url!r}")
        super().__init__(url, timeout, start_timeout)
        self._headers = dict(headers or {})

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Streams]:
        limits = http.Timeout(self._start_timeout, read=None)
        transport = IsolatedTransport(self.name)
        async with (
            http.AsyncClient(headers=self._headers, timeout=limits, transport=transport) as client,
            streamable_http_client(self.name, http_client=client, **STREAM_OPTIONS) as (read, write, *_),
        ):
            yield read, write
