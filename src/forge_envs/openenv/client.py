"""OpenEnv client: HTTP for metadata, and a bounded pool of WebSocket sessions."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple, Self

import aiohttp

from forge.envs.environment import InfrastructureError

from ..content import Json, function_schema
from .wire import CLOSE_LIMIT, MAX_MESSAGE, Reply, as_number

FIRST_PAUSE = 0.05  # seconds between connection attempts, which double
MAX_PAUSE = 2.0
MAX_TOOLS = 10_000  # of one server
# Errors after which the server ends the session; INFRASTRUCTURE_ERROR is sent by our servers only.
_ENDING = ("FACTORY_ERROR", "SESSION_ERROR", "INFRASTRUCTURE_ERROR")


class OpenEnvError(Exception):
    """The server rejected a message, or its environment raised.

    Attributes:
        code: such as VALIDATION_ERROR for an action that violates the schema, EXECUTION_ERROR for an environment that
            raised.
    """

    def __init__(self, code: str, message: str, url: str) -> None:
        super().__init__(f"{url}: {code}: {message}")
        self.code = code
        self.message = message


class CapacityError(InfrastructureError):
    """The server is at its session limit. It may have room later."""


class Session:
    """One WebSocket: one environment of the server, called sequentially.

    Every call raises InfrastructureError if the connection is lost or unanswered for `timeout` seconds, and
    OpenEnvError if the server rejects it; the session remains usable only after the latter. A call that is cancelled
    or times out ends the connection, since the next call would receive its reply.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, url: str, timeout: float) -> None:
        self._url = url
        self._timeout = timeout
        self._socket: aiohttp.ClientWebSocketResponse | None = socket
        self._busy = False
        self._closing: asyncio.Task[Any] | None = None

    @property
    def lost(self) -> bool:
        """Whether the connection is closed."""
        return self._socket is None or self._socket.closed

    @property
    def idle(self) -> bool:
        """Whether it is connected and no call is pending."""
        return not self.lost and not self._busy

    async def reset(self, **parameters: Json) -> Reply:
        """Begin an episode, with parameters of the environment's reset, such as seed= and episode_id=."""
        return Reply.read(await self._request("reset", "observation", parameters))

    async def step(self, action: Mapping[str, Json]) -> Reply:
        """Take an action as defined by the server's schema."""
        return Reply.read(await self._request("step", "observation", dict(action)))

    async def state(self) -> dict[str, Json]:
        """Return the environment's state, at least episode_id and step_count."""
        return await self._request("state", "state")

    async def list_tools(self) -> tuple[dict[str, Json], ...]:
        """Return the environment's MCP tools as OpenAI function schemas. OpenEnvError: it has none."""
        try:
            tools = await self._mcp_tools()
        except OpenEnvError as error:
            if error.code != "UNKNOWN_TYPE":
                raise
            tools = (await self.step({"type": "list_tools"})).observation.get("tools", [])
        try:
            schemas = tuple(map(function_schema, tools))
            valid = all(isinstance(part["function"]["name"], str) and part["function"]["name"] for part in schemas)
            valid = valid and all(isinstance(part["function"]["parameters"], dict) for part in schemas)
        except (KeyError, TypeError, AttributeError):
            valid = False
        if not valid:
            raise InfrastructureError(f"{self._url} lists tools that have no name or no schema: {str(tools)[:80]!r}")
        return schemas

    async def _mcp_tools(self) -> list[Json]:
        """All pages of the list of tools. OpenEnvError: there is none."""
        tools: list[Json] = []
        cursors: set[str] = set()
        params: dict[str, Json] = {}
        while True:
            # Unlike a list_tools step this takes no turn of the environment, but old servers do not know it.
            call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": params}
            reply = await self._request("mcp", "mcp", call)
            try:
                if "error" in reply:
                    raise OpenEnvError("MCP_ERROR", str(reply["error"].get("message")), self._url)
                tools += reply["result"]["tools"]
                cursor = reply["result"].get("nextCursor")
                if not cursor:
                    return tools
                if cursor in cursors or len(tools) > MAX_TOOLS:
                    raise InfrastructureError(f"{self._url}: its list of tools has no end: {len(tools)} so far")
                cursors.add(cursor)
            except (KeyError, TypeError, AttributeError):
                raise InfrastructureError(f"{self._url} answered tools/list with {str(reply)[:80]!r}") from None
            params = {"cursor": cursor}

    async def call_tool(self, name: str, arguments: Mapping[str, Json]) -> Reply:
        """Call an MCP tool as a step; its observation has `result` or `error`."""
        return await self.step({"type": "call_tool", "tool_name": name, "arguments": dict(arguments)})

    async def close(self) -> None:
        """End the session; idempotent."""
        if self._socket is not None and self.idle:
            with suppress(aiohttp.ClientError, ConnectionError, TimeoutError):  # already lost
                async with asyncio.timeout(CLOSE_LIMIT):
                    await self._socket.send_str('{"type":"close"}')
        self.drop()
        if self._closing is not None:
            await self._closing

    def drop(self) -> None:
        """Close the connection without notifying the server."""
        socket = self._socket
        self._socket = None
        if socket is not None:
            # Not awaited: a hung server would delay it. The reference keeps the task from being collected.
            self._closing = asyncio.ensure_future(socket.close())

    async def _request(self, kind: str, expected: str, data: dict[str, Json] | None = None) -> dict[str, Json]:
        """Send a message and return the data of the reply, which must be of type `expected`."""
        if self._busy:
            raise RuntimeError(f"a session takes one call at a time: {kind} was called while another call waits")
        if self._socket is None:
            raise InfrastructureError(f"the session with {self._url} is over")
        text = json.dumps({"type": kind} if data is None else {"type": kind, "data": data}, default=as_number)
        self._busy = True
        try:
            async with asyncio.timeout(self._timeout) as limit:
                # A server may send an error and close before it reads anything: receive even if sending fails.
                with suppress(aiohttp.ClientError, ConnectionError):
                    await self._socket.send_str(text)
                received = await self._socket.receive()
        except BaseException as error:
            # The reply may still come: it must not answer the next call.
            self.drop()
            if isinstance(error, TimeoutError) and limit.expired():
                raise InfrastructureError(f"{self._url} did not answer {kind} within {self._timeout:g} s") from None
            raise
        finally:
            self._busy = False

        if received.type is not aiohttp.WSMsgType.TEXT:
            self.drop()
            raise InfrastructureError(f"{self._url} ended the connection instead of answering {kind}")
        try:
            reply = json.loads(received.data)
            reply_kind = reply["type"]
            content = reply["data"]
        except (ValueError, KeyError, TypeError, RecursionError):
            self.drop()
            raise InfrastructureError(f"{self._url} answered {kind} with {received.data[:80]!r}") from None
        if reply_kind == "error" and isinstance(content, dict):
            raise self._error(content)
        if reply_kind != expected or not isinstance(content, dict):
            self.drop()
            raise InfrastructureError(f"{self._url} answered {kind} with a message of type {reply_kind!r}")
        return content

    def _error(self, data: dict[str, Json]) -> Exception:
        code = str(data.get("code"))
        message = str(data.get("message"))
        if code == "CAPACITY_REACHED":
            self.drop()
            return CapacityError(
                f"{self._url} takes {data.get('max_sessions', 'its limit of')} sessions at a time and is full: "
                "start it with a higher max_concurrent_envs (default 1), or lower `sessions` of the client"
            )
        if code in _ENDING:
            self.drop()
            if code == "INFRASTRUCTURE_ERROR":
                return InfrastructureError(f"{self._url}: {message}")
        details = f" {json.dumps(data['errors'])[:500]}" if data.get("errors") else ""
        return OpenEnvError(code, message + details, self._url)


class EventLoopConnection(NamedTuple):
    """A client's state in its event loop."""

    loop: asyncio.AbstractEventLoop
    http: aiohttp.ClientSession
    free: asyncio.Semaphore  # sessions that may still be opened or reused


class OpenEnvClient:
    """A pool of sessions with one server, bound to the event loop of its first use.

    Released sessions are reused: the next reset begins a new episode. A session is checked before reuse and replaced if
    the server has ended it.

    Args:
        url: of the server, such as http://127.0.0.1:8000.
        sessions: maximum open at a time; further calls of `acquire` wait.
        timeout: seconds for the answer to one message.
        connect_timeout: seconds for one connection attempt.
        patience: seconds to wait for a free session, and to retry a server that is down or full, with backoff.
        headers: sent with every request, such as an authorization.

    Raises:
        ValueError: an invalid setting.
        InfrastructureError: no connection, or no answer in time.
    """

    def __init__(
        self,
        url: str,
        *,
        sessions: int = 32,
        timeout: float = 60.0,
        connect_timeout: float = 10.0,
        patience: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the url of an OpenEnv server must begin with http:// or https://, got {url!r}")
        if sessions < 1 or min(timeout, connect_timeout, patience) <= 0:
            raise ValueError("sessions must be at least 1, and timeout, connect_timeout and patience above 0 seconds")
        self.url = url.rstrip("/")
        self._max_sessions = sessions
        self._timeout = timeout
        self._patience = patience
        self._connect_timeout = connect_timeout
        self._headers = dict(headers or {})
        self._connection: EventLoopConnection | None = None
        self._idle: list[Session] = []
        self._used: set[Session] = set()

    async def health(self) -> str:
        """Return "healthy", "degraded" or "unhealthy"."""
        return str((await self._http("GET", "/health")).get("status"))

    async def metadata(self) -> dict[str, Json]:
        """Return name, description, version and author."""
        return await self._http("GET", "/metadata")

    async def schema(self) -> dict[str, Json]:
        """Return the JSON schemas of `action`, `observation` and `state`."""
        return await self._http("GET", "/schema")

    async def environments(self) -> list[str]:
        """Return the names of its environments, for the methods below."""
        return [str(name) for name in await self._http("GET", "/list_environments", kind=list)]

    async def splits(self, environment: str) -> list[dict[str, Json]]:
        """Return `name` and `type` of each set of tasks. OpenEnvError: it has none, or no such environment."""
        return list(await self._http("GET", f"/{environment}/splits", kind=list))

    async def num_tasks(self, environment: str, split: str) -> int:
        """Return the number of tasks of a split."""
        return int((await self._http("POST", f"/{environment}/num_tasks", {"split": split}))["num_tasks"])

    async def tasks(self, environment: str, split: str, start: int = 0, stop: int | None = None) -> list[Json]:
        """Return tasks of a split. A reset with `split` and `index` plays one."""
        body = {"split": split, "start": start, "stop": stop}
        return list((await self._http("POST", f"/{environment}/task_range", body))["tasks"])

    async def reset(self, **parameters: Json) -> Reply:
        """Reset over HTTP. OpenEnv's servers make an environment per request: play episodes in a session."""
        return Reply.read(await self._http("POST", "/reset", parameters))

    async def step(self, action: Mapping[str, Json]) -> Reply:
        """Step over HTTP; see `reset`."""
        return Reply.read(await self._http("POST", "/step", {"action": dict(action)}))

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Use a session: `async with client.session() as session:`; see `acquire`."""
        session = await self.acquire()
        try:
            yield session
        finally:
            self.release(session)

    async def acquire(self) -> Session:
        """Return a checked session; give it back with `release`.

        Raises:
            InfrastructureError: none within `patience` seconds.
            OpenEnvError: the server failed to make its environment.
        """
        connection = self._connect()
        try:
            async with asyncio.timeout(self._patience) as limit:
                await connection.free.acquire()
        except TimeoutError:
            # A TimeoutError of the caller's own limit passes.
            if not limit.expired():
                raise
            raise InfrastructureError(
                f"none of the {self._max_sessions} sessions with {self.url} was given back within "
                f"{self._patience:g} s: raise `sessions`, or release them earlier"
            ) from None
        try:
            session = await self._live_session(connection.http)
        # Or the pool would shrink with each failure.
        except BaseException:
            connection.free.release()
            raise
        self._used.add(session)
        return session

    def release(self, session: Session) -> None:
        """Return a session. It is dropped if a call is pending, or after `close`."""
        if session not in self._used or self._connection is None:
            return
        self._used.remove(session)
        self._connection.free.release()
        # A pending call would answer the next one.
        if session.idle:
            self._idle.append(session)
        else:
            session.drop()

    async def close(self) -> None:
        """End all sessions; pending calls fail. The client can be used again."""
        # State first: calls from now on make a new connection.
        sessions = [*self._idle, *self._used]
        self._idle = []
        self._used = set()
        connection = self._connection
        self._connection = None
        if connection is not None:
            await asyncio.gather(*(session.close() for session in sessions))
            await connection.http.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _live_session(self, http: aiohttp.ClientSession) -> Session:
        """Return a session that answers: an idle one, or a new one, retried for `patience` seconds."""
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE
        deadline = loop.time() + self._patience
        while True:
            reused = bool(self._idle)
            try:
                session = self._idle.pop() if reused else await self._open(http)
                try:
                    await session.state()
                except OpenEnvError:  # an environment that cannot report its state still answers
                    if session.lost:
                        raise
                return session
            except InfrastructureError:
                if reused:
                    continue  # ended by the server while it was idle
                if loop.time() + pause > deadline:
                    raise
            # At random, so that clients that were rejected together do not return together.
            await asyncio.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, MAX_PAUSE)

    async def _open(self, http: aiohttp.ClientSession) -> Session:
        close_timeout = aiohttp.ClientWSTimeout(ws_close=CLOSE_LIMIT)
        try:
            async with asyncio.timeout(self._connect_timeout):
                socket = await http.ws_connect(
                    f"{self.url}/ws", max_msg_size=MAX_MESSAGE, timeout=close_timeout, compress=0
                )
        except aiohttp.WSServerHandshakeError as error:
            if error.status < 500:
                raise OpenEnvError(f"HTTP_{error.status}", error.message, f"{self.url}/ws") from error
            raise InfrastructureError(f"no session with {self.url}: status {error.status}") from error
        except (aiohttp.ClientError, OSError) as error:  # OSError includes TimeoutError
            reason = str(error) or f"no connection within {self._connect_timeout:g} s"
            raise InfrastructureError(f"no session with {self.url}: {reason}") from error
        return Session(socket, self.url, self._timeout)

    async def _http(self, method: str, path: str, body: Json = None, kind: type = dict) -> Any:
        http = self._connect().http
        limit = aiohttp.ClientTimeout(total=self._timeout, connect=self._connect_timeout)
        try:
            # Read in parts, so that a server cannot fill the memory of this machine.
            async with http.request(method, self.url + path, json=body, timeout=limit) as response:
                status = response.status
                data = bytearray()
                while chunk := await response.content.read(1 << 20):
                    data += chunk
                    if len(data) > MAX_MESSAGE:
                        raise InfrastructureError(f"{self.url}{path} answered with more than {MAX_MESSAGE} bytes")
            text = data.decode("utf-8", "replace")
            document = json.loads(text) if status == 200 else None
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or f"no answer within {self._timeout:g} s"
            raise InfrastructureError(f"{self.url}{path}: {reason}") from error
        except (ValueError, RecursionError):
            raise InfrastructureError(f"{self.url}{path} answered with no JSON: {text[:80]!r}") from None
        if status in (502, 503, 504):  # from a proxy, or a full server
            raise InfrastructureError(f"{self.url}{path} answered with status {status}: {text[:500]}")
        if not isinstance(document, kind):
            raise OpenEnvError(f"HTTP_{status}", text[:500], f"{self.url}{path}")
        return document

    def _connect(self) -> EventLoopConnection:
        loop = asyncio.get_running_loop()
        if self._connection is None:
            headers = {"Accept-Encoding": "identity"} | self._headers  # no small answer that becomes a large one
            trace = aiohttp.TraceConfig()
            trace.on_request_redirect.append(_reject_redirect)
            http = aiohttp.ClientSession(
                headers=headers,
                auto_decompress=False,
                connector=aiohttp.TCPConnector(limit=0),
                trace_configs=[trace],
            )
            self._connection = EventLoopConnection(loop, http, asyncio.Semaphore(self._max_sessions))
        if self._connection.loop is not loop:
            raise RuntimeError("an OpenEnvClient belongs to the event loop in which it was first used: make another")
        return self._connection


async def _reject_redirect(_: Any, __: Any, params: aiohttp.TraceRequestRedirectParams) -> None:
    """Reject a redirect: it would carry the client's headers, and any key in them, to another server."""
    raise aiohttp.ClientError(f"it redirects to {params.response.headers.get('Location', 'elsewhere')[:200]}: use that")
