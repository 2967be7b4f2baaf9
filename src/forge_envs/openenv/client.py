"""A client of OpenEnv servers: HTTP for what it tells of itself, and a bounded pool of sessions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import aiohttp

from forge.envs.environment import InfrastructureError

from .session import CLOSING, LARGEST, CapacityError, OpenEnvError, Reply, Session

__all__ = ["CapacityError", "OpenEnvClient", "OpenEnvError", "Reply", "Session"]

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between two attempts at a connection


class OpenEnvClient:
    """Sessions with the environments of one server. It belongs to the event loop in which it is first used.

    A session that was given back is used again: its next reset begins a new episode. Every session is asked for its
    state before it is handed out, so that one which the server has ended meanwhile is replaced.

    Args:
        url: of the server, such as http://127.0.0.1:8000.
        sessions: most at a time; who wants more waits for one.
        timeout: seconds for the answer to one message.
        connect_timeout: seconds for one attempt at a connection.
        patience: seconds for a session: until one is given back, and a server that is down or full takes another.
            Attempts are repeated with growing pauses.
        headers: sent with every request, such as an authorization.

    Raises:
        ValueError: a setting that cannot be. InfrastructureError: no connection, no answer in time.
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
        self._most, self._timeout, self._patience = sessions, timeout, patience
        self._connect_timeout, self._headers = connect_timeout, dict(headers or {})
        self._at: tuple[asyncio.AbstractEventLoop, aiohttp.ClientSession, asyncio.Semaphore] | None = None
        self._idle: list[Session] = []
        self._used: set[Session] = set()

    async def health(self) -> str:
        """ "healthy", "degraded" or "unhealthy"."""
        return str((await self._http("GET", "/health")).get("status"))

    async def metadata(self) -> dict[str, Any]:
        """Its name, description, version and author."""
        return await self._http("GET", "/metadata")

    async def schema(self) -> dict[str, Any]:
        """JSON schemas of `action`, `observation` and `state`."""
        return await self._http("GET", "/schema")

    async def reset(self, **parameters: Any) -> Reply:
        """Reset over HTTP. OpenEnv's servers make an environment for this request alone: play episodes in a session."""
        return Reply.read(await self._http("POST", "/reset", parameters))

    async def step(self, action: Mapping[str, Any]) -> Reply:
        """Step over HTTP, to which the same applies."""
        return Reply.read(await self._http("POST", "/step", {"action": dict(action)}))

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """`async with client.session() as session:`; see `acquire`."""
        session = await self.acquire()
        try:
            yield session
        finally:
            self.release(session)

    async def acquire(self) -> Session:
        """A session that answers, to be given back by `release`.

        InfrastructureError: there was none within `patience` seconds. OpenEnvError: the server cannot make its
        environment.
        """
        _, http, turns = self._connected()
        try:
            async with asyncio.timeout(self._patience) as limit:
                await turns.acquire()
        except TimeoutError:
            if not limit.expired():
                raise
            raise InfrastructureError(
                f"none of the {self._most} sessions with {self.url} was given back within {self._patience:g} s: raise "
                "`sessions`, or see what keeps them"
            ) from None
        try:
            session = await self._live(http)
        except BaseException:
            turns.release()
            raise
        self._used.add(session)
        return session

    def release(self, session: Session) -> None:
        """Give a session back. One in the middle of a call is ended, and so is any after `close`."""
        if session not in self._used or self._at is None:
            return
        self._used.remove(session)
        self._at[2].release()
        if session.idle:
            self._idle.append(session)
        else:
            session.drop()

    async def close(self) -> None:
        """End all sessions; calls under way fail. It may be used again."""
        sessions, self._idle = [*self._idle, *self._used], []
        self._used = set()
        at, self._at = self._at, None
        if at is not None:
            await asyncio.gather(*(session.close() for session in sessions))
            await at[1].close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _live(self, http: aiohttp.ClientSession) -> Session:
        loop, pause = asyncio.get_running_loop(), FIRST_PAUSE
        deadline = loop.time() + self._patience
        while True:
            while self._idle:
                session = self._idle.pop()
                try:
                    return await _answering(session)
                except InfrastructureError:
                    continue  # ended by the server while nobody used it
            try:
                return await _answering(await self._open(http))
            except InfrastructureError:
                if loop.time() + pause > deadline:
                    raise
            await asyncio.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _open(self, http: aiohttp.ClientSession) -> Session:
        try:
            async with asyncio.timeout(self._connect_timeout):
                socket = await http.ws_connect(
                    f"{self.url}/ws",
                    max_msg_size=LARGEST,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSING),
                )
        except aiohttp.WSServerHandshakeError as error:
            if error.status < 500:
                raise OpenEnvError(f"HTTP_{error.status}", error.message, f"{self.url}/ws") from error
            raise InfrastructureError(f"no session with {self.url}: status {error.status}") from error
        except (aiohttp.ClientError, OSError) as error:  # OSError: also TimeoutError
            what = str(error) or f"no connection within {self._connect_timeout:g} s"
            raise InfrastructureError(f"no session with {self.url}: {what}") from error
        return Session(socket, self.url, self._timeout)

    async def _http(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        _, http, _ = self._connected()
        limit = aiohttp.ClientTimeout(total=self._timeout, connect=self._connect_timeout)
        try:
            async with http.request(method, self.url + path, json=body, timeout=limit) as response:
                text = await response.text()
                status = response.status
                answer = await response.json(content_type=None) if status == 200 else None
        except (aiohttp.ClientError, OSError) as error:
            what = str(error) or f"no answer within {self._timeout:g} s"
            raise InfrastructureError(f"{self.url}{path}: {what}") from error
        except ValueError:
            raise InfrastructureError(f"{self.url}{path} answered with no JSON: {text[:80]!r}") from None
        if status in (502, 503, 504):  # of a proxy, or of a server that is full
            raise InfrastructureError(f"{self.url}{path} answered with status {status}: {text[:500]}")
        if not isinstance(answer, dict):
            raise OpenEnvError(f"HTTP_{status}", text[:500], f"{self.url}{path}")
        return answer

    def _connected(self) -> tuple[asyncio.AbstractEventLoop, aiohttp.ClientSession, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()
        if self._at is None:
            http = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
            self._at = loop, http, asyncio.Semaphore(self._most)
        if self._at[0] is not loop:
            raise RuntimeError("an OpenEnvClient belongs to the event loop in which it was first used: make another")
        return self._at


async def _answering(session: Session) -> Session:
    """The session, if it answers. That its environment cannot tell its state is an answer."""
    try:
        await session.state()
    except OpenEnvError:
        if session.lost:
            raise
    return session
