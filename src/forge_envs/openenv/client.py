"""OpenEnv client: HTTP for metadata, and a bounded pool of WebSocket sessions.

Not the package's own: it needs fastapi, gradio and fastmcp, and takes 3 s to import.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

import aiohttp

from forge_envs.environment import InfrastructureError

from ..content import Json, function_schema
from .wire import CLOSE_LIMIT, MAX_MESSAGE, Reply, as_number, check_shape

FIRST_PAUSE = 0.05  # seconds between connection attempts, which double
MAX_PAUSE = 2.0
CONNECT_TIMEOUT = 10.0  # seconds for one attempt
# Errors after which the server ends the session.
_ENDING = ("FACTORY_ERROR", "SESSION_ERROR")


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
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        reply = await self._request("mcp", "mcp", call)
        if "error" in reply:
            raise OpenEnvError("MCP_ERROR", str(reply["error"]), self._url)
        try:
            schemas = tuple(map(function_schema, reply["result"]["tools"]))
            check_shape({"messages": [], "tools": list(schemas)}, "observation")
        except (KeyError, TypeError, AttributeError, ValueError):
            raise InfrastructureError(f"{self._url} answered tools/list with {str(reply)[:80]!r}") from None
        return schemas

    async def close(self) -> None:
        """End the session; idempotent."""
        self.drop()
        if self._closing is not None:
            await self._closing

    def drop(self) -> None:
        """Close the connection without waiting for it: a hung server would delay that."""
        if self._socket is not None:
            # The reference keeps the task from being collected.
            self._closing = asyncio.ensure_future(self._socket.close())
            self._socket = None

    async def _request(self, kind: str, expected: str, data: dict[str, Json] | None = None) -> dict[str, Json]:
        """Send a message and return the data of the reply, which must be of type `expected`."""
        if self._busy:
            raise RuntimeError(f"a session takes one call at a time: {kind} was called while another call waits")
        if self._socket is None:
            raise InfrastructureError(f"the session with {self._url} is over")
        text = json.dumps({"type": kind, "data": data or {}}, default=as_number)
        self._busy = True
        try:
            async with asyncio.timeout(self._timeout) as limit:
                # A server may send an error and close before it reads anything: receive even if sending fails.
                with suppress(aiohttp.ClientError, ConnectionError):
                    await self._socket.send_str(text)
                received = await self._socket.receive()
            return self._read_reply(received, kind, expected)
        except OpenEnvError as error:
            if error.code in _ENDING:
                self.drop()
            raise
        except BaseException as error:
            # The reply may still come: it must not answer the next call.
            self.drop()
            if isinstance(error, TimeoutError) and limit.expired():
                raise InfrastructureError(f"{self._url} did not answer {kind} within {self._timeout:g} s") from None
            raise
        finally:
            self._busy = False

    def _read_reply(self, received: aiohttp.WSMessage, kind: str, expected: str) -> dict[str, Json]:
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise InfrastructureError(f"{self._url} ended the connection instead of answering {kind}")
        try:
            reply = json.loads(received.data)
            content, received_type = reply["data"], reply["type"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InfrastructureError(f"{self._url} answered {kind} with {received.data[:80]!r}") from None
        if received_type not in (expected, "error") or not isinstance(content, dict):
            raise InfrastructureError(f"{self._url} answered {kind} with a message of type {received_type!r}")
        if received_type == expected:
            return content
        # An error of the server, of the environment, or of what was sent.
        code, message = str(content.get("code")), str(content.get("message"))
        if code == "CAPACITY_REACHED":
            raise CapacityError(
                f"{self._url} takes {content.get('max_sessions', 'its limit of')} sessions at a time and is full: "
                "start it with a higher max_concurrent_envs (default 1), or lower `sessions` of the client"
            )
        if code == "INFRASTRUCTURE_ERROR":
            raise InfrastructureError(f"{self._url}: {message}")
        details = f" {json.dumps(content['errors'])[:500]}" if content.get("errors") else ""
        raise OpenEnvError(code, message + details, self._url)


class OpenEnvClient:
    """A pool of sessions with one server, bound to the event loop of its first use.

    Released sessions are reused: the next reset begins a new episode. A session is checked before reuse and replaced if
    the server has ended it.

    Args:
        url: of the server, such as http://127.0.0.1:8000.
        sessions: maximum open at a time; further calls of `acquire` wait.
        timeout: seconds for the answer to one message.
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
        patience: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if url.startswith(("ws://", "wss://")):  # as the package's clients write it
            url = url.replace("ws", "http", 1)
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the url of an OpenEnv server must begin with http:// or https://, got {url!r}")
        if sessions < 1 or min(timeout, patience) <= 0:
            raise ValueError("sessions must be at least 1, and timeout and patience above 0 seconds")
        self.url = url.rstrip("/")
        self._max_sessions = sessions
        self._timeout = timeout
        self._patience = patience
        self._headers = dict(headers or {})
        self._http: aiohttp.ClientSession | None = None
        self._free = asyncio.Semaphore(sessions)  # sessions that may still be opened or reused
        self._idle: list[Session] = []
        self._used: set[Session] = set()

    async def health(self) -> str:
        """Return "healthy", "degraded" or "unhealthy"."""
        return str((await self._get("/health")).get("status"))

    async def schema(self) -> dict[str, Json]:
        """Return the JSON schemas of `action`, `observation` and `state`."""
        return await self._get("/schema")

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
        free = self._free
        try:
            async with asyncio.timeout(self._patience):
                await free.acquire()
        except TimeoutError:
            raise InfrastructureError(
                f"none of the {self._max_sessions} sessions with {self.url} was given back within "
                f"{self._patience:g} s: raise `sessions`, or release them earlier"
            ) from None
        try:
            session = await self._live_session()
        # Or the pool would shrink with each failure.
        except BaseException:
            free.release()
            raise
        self._used.add(session)
        return session

    def release(self, session: Session) -> None:
        """Return a session. It is dropped if a call is pending, or after `close`."""
        if session not in self._used:
            return
        self._used.remove(session)
        self._free.release()
        # A pending call would answer the next one.
        if session.idle:
            self._idle.append(session)
        else:
            session.drop()

    async def close(self) -> None:
        """End all sessions; pending calls fail. The client can be used again."""
        # State first: calls from now on make a new connection.
        sessions = [*self._idle, *self._used]
        http = self._http
        self._idle, self._used, self._http = [], set(), None
        self._free = asyncio.Semaphore(self._max_sessions)
        await asyncio.gather(*(session.close() for session in sessions))
        if http is not None:
            await http.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _live_session(self) -> Session:
        """Return a session that answers: an idle one, or a new one, retried for `patience` seconds."""
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE
        deadline = loop.time() + self._patience
        while True:
            reused = bool(self._idle)
            try:
                session = self._idle.pop() if reused else await self._open()
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

    async def _open(self) -> Session:
        close_timeout = aiohttp.ClientWSTimeout(ws_close=CLOSE_LIMIT)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                socket = await self._connect().ws_connect(
                    f"{self.url}/ws", max_msg_size=MAX_MESSAGE, timeout=close_timeout, compress=0
                )
        except (aiohttp.ClientError, OSError) as error:  # OSError includes TimeoutError
            reason = str(error) or f"no connection within {CONNECT_TIMEOUT:g} s"
            raise InfrastructureError(f"no session with {self.url}: {reason}") from error
        return Session(socket, self.url, self._timeout)

    async def _get(self, path: str) -> dict[str, Json]:
        limit = aiohttp.ClientTimeout(total=self._timeout, connect=CONNECT_TIMEOUT)
        try:
            async with self._connect().get(self.url + path, timeout=limit, allow_redirects=False) as response:
                text = await response.text(errors="replace")
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or f"no answer within {self._timeout:g} s"
            raise InfrastructureError(f"{self.url}{path}: {reason}") from error
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if response.status != 200 or not isinstance(document, dict):
            raise InfrastructureError(f"{self.url}{path} answered with status {response.status}: {text[:500]!r}")
        return document

    def _connect(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        return self._http
