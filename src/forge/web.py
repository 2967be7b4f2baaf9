"""How this library's HTTP servers are protected: who may call them, and how much a caller can take.

A page in a browser reaches a server on 127.0.0.1 too: by a form, by a WebSocket, or by a name that it has pointed at
that address (DNS rebinding). Without an API key, requests must therefore name this server as their Host and, where a
browser states an Origin, come from it; bodies must be JSON, which a page cannot send elsewhere without asking. An
address that other machines reach needs a key.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from .cluster.wire import listening_error

try:
    from aiohttp import web
except ImportError as error:
    raise ImportError("serving needs aiohttp: pip install aiohttp") from error

API_KEY = "FORGE_API_KEY"
HEADER_TIME = 10.0  # seconds for a request's headers
BODY_TIME = 60.0  # seconds for its body
CONNECTIONS = 512  # at once, and at most a quarter of the descriptors that the process may have
CLOSING = 2.0  # seconds for open requests to end
LONGEST_HEADERS = 1 << 16  # bytes
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def required_key(host: str, given: str | None = None) -> str | None:
    """The API key for a server at this address: the given one, or that of FORGE_API_KEY.

    Raises:
        ValueError: other machines reach the address, and there is no key.
    """
    key = given or os.environ.get(API_KEY) or None
    if key is None and not is_loopback(host):
        raise ValueError(f"other machines reach {host}: set {API_KEY} to a key, which clients send as their API key")
    return key


def bind(host: str, port: int, any_port: str = "--port 0") -> socket.socket:
    """A listening socket; port 0 takes a free port.

    Args:
        any_port: the option for a free port, for the error.

    Raises:
        OSError: the address is not available; names it and the remedy.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise listening_error(host, port, error, any_port) from None


def guard(host: str, key: str | None) -> Any:
    """Middleware that lets through the requests that this module's docstring allows.

    Raises in it: 401 without the key, 403 for another Host or Origin, 415 for a body that is not JSON, 408 for a body
    that does not come.
    """
    names = {*LOOPBACK, host} if is_loopback(host) else {host}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if key is not None:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode(errors="surrogateescape")):
                raise web.HTTPUnauthorized(reason="the API key is missing or wrong")
        else:
            origin = request.headers.get("Origin")
            if _name(f"//{request.headers.get('Host', '')}") not in names:
                raise web.HTTPForbidden(reason="the Host header is not the address of this server")
            # Images and the like of a page come without an Origin.
            foreign = request.headers.get("Sec-Fetch-Site") == "cross-site"
            if foreign or (origin is not None and _name(origin) not in names):
                raise web.HTTPForbidden(reason="requests from pages of other origins are not allowed")
        if request.can_read_body:
            if request.content_type != "application/json":
                raise web.HTTPUnsupportedMediaType(reason="the body must be application/json")
            try:
                async with asyncio.timeout(BODY_TIME):
                    await request.read()
            except TimeoutError:
                raise web.HTTPRequestTimeout(reason=f"the body took more than {BODY_TIME:g} s") from None
        return await handler(request)

    return check


@asynccontextmanager
async def listen(app: web.Application, at: socket.socket) -> AsyncIterator[str]:
    """Serve an application on a socket of `bind` within the block; yields its URL."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CLOSING, access_log=None)
    await runner.setup()
    assert runner.server is not None
    make, most = runner.server, min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
    open_now: set[_Connection] = set()
    try:
        server = await asyncio.get_running_loop().create_server(lambda: _Connection(make(), open_now, most), sock=at)
        try:
            host, port = at.getsockname()[:2]
            yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
        finally:
            server.close()
    finally:
        await runner.cleanup()


class _Connection(asyncio.Protocol):
    """Passes on what a connection brings, unless there are too many or its headers do not come."""

    def __init__(self, inner: Any, open_now: set[_Connection], most: int) -> None:
        self._inner, self._open, self._most = inner, open_now, most
        self._accepted, self._headers = False, b""
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        if len(self._open) >= self._most:
            transport.abort()
            return
        self._accepted = True
        self._open.add(self)
        self._limit = asyncio.get_running_loop().call_later(HEADER_TIME, transport.abort)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._limit is not None:
            self._headers = (self._headers + data).lstrip(b"\r\n")[:LONGEST_HEADERS]  # blank lines may come first
            if b"\r\n\r\n" in self._headers or len(self._headers) == LONGEST_HEADERS:  # aiohttp rejects longer ones
                self._limit.cancel()
                self._limit, self._headers = None, b""
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._accepted else None

    def connection_lost(self, error: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._open.discard(self)
        if self._accepted:
            self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


def _name(url: str) -> str | None:
    """The host of a URL, in lower case and without brackets."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
