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
import json
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any, ClassVar
from urllib.parse import urlsplit

from .addresses import listening_error

try:
    from aiohttp import web
    from aiohttp.http_exceptions import HttpProcessingError
except ImportError as error:
    raise ImportError("serving needs aiohttp: pip install aiohttp") from error

API_KEY = "FORGE_API_KEY"
HEADER_TIME = 10.0  # seconds for a request's headers
BODY_TIME = 60.0  # seconds for its body
IDLE_TIME = 60.0  # seconds from one request of a connection to the first byte of the next
WRITE_TIME = 60.0  # seconds for a client to take anything of an answer
LONGEST_HEADERS = 1 << 16  # bytes
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
CONNECTIONS = 512  # at once, and at most a quarter of the descriptors that the process may have
ACCEPTED, QUEUE = 16, 128  # connections that are accepted at once, and that may wait for it
READ = 1 << 15  # bytes that are parsed at once: a body may come in chunks of one byte
CLOSING = 1.0  # seconds for open requests to end, and once more after they were cancelled
SHORT = 1 << 16  # characters of JSON that are read at once
MOST_PARTS = 1 << 18  # brackets in JSON: each list is work for the garbage collector, which holds up all threads
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


def guard(host: str, key: str | None, another: str | None = None) -> Any:
    """Middleware that lets through the requests that this module's docstring allows.

    Args:
        another: a second key that is as good as `key`.

    Raises in it: 401 without the key, 403 for another Host or Origin, 415 for a body that is not JSON, 408 for a body
    that does not come.
    """
    names = {*LOOPBACK, host} if is_loopback(host) else {host}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if key is not None:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="surrogateescape")
            keys = [one.encode(errors="surrogateescape") for one in (key, another) if one]
            if not any([hmac.compare_digest(given, one) for one in keys]):
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
            if request.headers.get("Content-Encoding", "identity") != "identity":
                raise web.HTTPUnsupportedMediaType(reason="the body must not be compressed")
            try:
                connection = Connection.of(request)
                with nullcontext() if connection is None else connection.reading():
                    async with asyncio.timeout(BODY_TIME):
                        await request.read()
            except TimeoutError:
                raise web.HTTPRequestTimeout(reason=f"the body took more than {BODY_TIME:g} s") from None
        return await handler(request)

    return check


@asynccontextmanager
async def listen(app: web.Application, at: socket.socket) -> AsyncIterator[str]:
    """Serve an application on a socket of `bind` within the block; yields its URL."""
    app.middlewares.insert(0, _handled)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=CLOSING,
        access_log=None,
        auto_decompress=False,
        logger=_log,
    )
    await runner.setup()
    assert runner.server is not None
    make, most = runner.server, min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
    open_now: dict[Connection, None] = {}
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(lambda: Connection(make(), open_now, most), sock=at, backlog=ACCEPTED)
        at.listen(QUEUE)
        try:
            host, port = at.getsockname()[:2]
            yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
        finally:
            server.close()
    finally:
        await runner.cleanup()


class Connection(asyncio.Protocol):
    """Passes on what a connection brings, within limits of time and size for each of its requests.

    Where there are too many, the one that has kept this server waiting for longest makes room: one that is idle, or
    whose request is not there yet. If there is none, the new one is closed.

    Args:
        inner: aiohttp's protocol.
        open_now: all connections of the server; those that are waited for in order of time.
        most: connections at once.
    """

    _by_inner: ClassVar[dict[Any, Connection]] = {}

    def __init__(self, inner: Any, open_now: dict[Connection, None], most: int) -> None:
        self._inner, self._open, self._most = inner, open_now, most
        self._transport: Any = None
        self._waited_for = True  # a request, or the rest of one
        self._headers: bytes | None = b""  # so far; None: they are there, or none has begun
        self._limit: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, request: web.Request) -> Connection | None:
        """That which brought a request; None if another server did."""
        return cls._by_inner.get(request.protocol)

    def connection_made(self, transport: Any) -> None:
        """It is open, unless there are too many whose requests are being answered."""
        if len(self._open) >= self._most:
            longest = next((one for one in self._open if one._waited_for and not one._writes()), None)
            if longest is None:
                transport.abort()
                return
            longest._leave()
        self._transport = transport
        transport.max_size = READ
        self._open[self] = None
        self._by_inner[self._inner] = self
        self._expire(HEADER_TIME)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """A part of a request, whose headers are bounded in size and time."""
        if self._limit is not None:
            if self._headers is None:
                self._headers = b""
                self._expire(HEADER_TIME)
            self._headers = (self._headers + data).lstrip(b"\r\n")  # blank lines may come first
            end = self._headers.find(b"\r\n\r\n", 0, LONGEST_HEADERS)
            if end < 0 and len(self._headers) >= LONGEST_HEADERS:
                self._transport.write(TOO_LONG)
                self._transport.close()
                return
            if end >= 0:
                self._expire(None)
                self._headers = None
        self._inner.data_received(data)

    def begin(self) -> None:
        """A request is there."""
        self._expire(None)
        self._headers, self._waited_for = None, False

    def end(self) -> None:
        """It was answered."""
        self._wait()
        self._expire(IDLE_TIME)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within the block, the rest of a request is waited for."""
        self._wait()
        try:
            yield
        finally:
            self._waited_for = False

    def _wait(self) -> None:
        self._waited_for = True
        if self in self._open:  # the last in order now
            del self._open[self]
            self._open[self] = None

    def _expire(self, seconds: float | None) -> None:
        """Close the connection after so many seconds from now; with None not."""
        if self._limit is not None:
            self._limit.cancel()
        self._limit = None
        if seconds is not None and not self._transport.is_closing():
            self._limit = asyncio.get_running_loop().call_later(seconds, self._expired, seconds)

    def _expired(self, seconds: float) -> None:
        if self._writes():  # the last answer is still on its way, which has a limit of its own
            self._expire(seconds)
        else:
            self._leave()

    def _writes(self) -> bool:
        return bool(self._transport.get_write_buffer_size())

    def _leave(self) -> None:
        self._open.pop(self, None)
        self._transport.abort()

    def eof_received(self) -> bool | None:
        """The client sends no more."""
        return None if self._transport is None else self._inner.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        """It is closed."""
        for timer in (self._limit, self._writing):
            if timer is not None:
                timer.cancel()
        self._open.pop(self, None)
        self._by_inner.pop(self._inner, None)
        if self._transport is not None:
            self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        """The client does not read."""
        self._writing = asyncio.get_running_loop().call_later(WRITE_TIME, self._leave)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """It reads again."""
        if self._writing is not None:
            self._writing.cancel()
        self._inner.resume_writing()


async def json_of(request: web.Request) -> Any:
    """The JSON of a request's body. ValueError: it is none; says why in one line."""
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise ValueError("it must be in UTF-8")
    text = (await request.read()).decode()
    if text.count("[") + text.count("{") > MOST_PARTS:
        raise ValueError(f"it has more than {MOST_PARTS} lists and objects")
    try:
        if len(text) < SHORT:
            return json.loads(text)
        return await asyncio.get_running_loop().run_in_executor(_decoding, _Decoder().decode, text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _Decoder(json.JSONDecoder):
    """The decoder of the standard library in Python: that in C keeps all other threads waiting until it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


_decoding = ThreadPoolExecutor(1, "forge-json")


@web.middleware
async def _handled(request: web.Request, handler: Handler) -> web.StreamResponse:
    connection = Connection.of(request)
    if connection is None:
        return await handler(request)
    connection.begin()
    try:
        return await handler(request)
    finally:
        connection.end()


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a message of aiohttp is about this side: what a client sends amiss is answered, and no news."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


_log = logging.getLogger(f"{__name__}.requests")
_log.addFilter(_is_ours)


def _name(url: str) -> str | None:
    """The host of a URL, in lower case and without brackets."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
