"""Protection of this library's HTTP servers: who may call them, and how much a caller can take.

A page in a browser reaches a server on 127.0.0.1 too: by a form, by a WebSocket, or by a name that it has pointed at
A page in a browser reaches a server on 127.0.0.1 too: by a form, by a WebSocket, or by a name that it has pointed at
that address (DNS rebinding). Without an API key, requests must therefore name this server as their Host and, if a
browser states an Origin, come from it; bodies must be JSON, which a page cannot send to another origin without a
preflight request. An address that other machines reach needs a key.
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
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any, ClassVar
from urllib.parse import urlsplit

from .addresses import join_address, listening_error
from .handshakes import accept_tls

try:
    from aiohttp import web
    from aiohttp.http_exceptions import HttpProcessingError
except ImportError as error:
    raise ImportError("serving needs aiohttp: pip install aiohttp") from error

API_KEY = "FORGE_API_KEY"
# Limits that any real client stays far below, so that a slow or hostile one holds little and for a short time.
HEADER_TIME = 10.0  # seconds for a request's headers
BODY_TIME = 60.0  # seconds for its body
IDLE_TIME = 60.0  # seconds from one request of a connection to the first byte of the next
WRITE_TIME = 60.0  # seconds for a client to read anything of a response
MAX_HEADERS = 1 << 16  # bytes
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
MAX_CONNECTIONS = 512  # at once, and at most a quarter of the descriptors that the process may have
ACCEPTED = 16  # connections that are accepted in one turn of the event loop
QUEUE = 128  # connections that wait to be accepted
READ = 1 << 15  # bytes that are parsed at once: a body may come in chunks of one byte
CLOSING = 1.0  # seconds for open requests to end, and once more after they were cancelled
SHORT = 1 << 16  # characters of JSON that are parsed in the event loop
MAX_PARTS = 1 << 18  # brackets in JSON: each list is work for the garbage collector, which delays all threads
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Middleware = Any  # decorated by aiohttp, which types it as a function
Inner = Any  # aiohttp's protocol of a connection, whose class is private
Json = Any


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def required_key(host: str, key: str | None = None) -> str | None:
    """Return the API key of a server at this address: `key`, or that of FORGE_API_KEY.

    Raises:
        ValueError: other machines reach the address, and there is no key.
    """
    key = key or os.environ.get(API_KEY) or None
    if key is None and not is_loopback(host):
        raise ValueError(f"other machines reach {host}: set {API_KEY} to a key, which clients send as their API key")
    return key


def bind(host: str, port: int, any_port: str = "--port 0") -> socket.socket:
    """Open a listening socket; port 0 takes a free port.

    Args:
        any_port: the option for a free port, for the error.

    Raises:
        OSError: the address is not available; names it and the remedy.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise listening_error(host, port, error, any_port) from None


def bearer(request: web.Request) -> str:
    """The API key that a request's Authorization has; "" for none."""
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def guard(
    host: str, key: str | None, second_key: str | None = None, key_of: Callable[[web.Request], str] = bearer
) -> Middleware:
    """Return middleware that accepts the requests that this module's docstring allows.

    Args:
        second_key: is accepted as well as `key`.
        key_of: where a request has its key.

    The middleware raises 401 without the key, 403 for another Host or Origin, 415 for a body that is not JSON, 408 for
    a body that does not arrive.
    """
    names = {*LOOPBACK, host} if is_loopback(host) else {host}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if key is not None:
            sent = key_of(request).encode(errors="surrogateescape")
            keys = [accepted.encode(errors="surrogateescape") for accepted in (key, second_key) if accepted]
            # A list, not a generator: the time must not tell which key was compared.
            if not any([hmac.compare_digest(sent, accepted) for accepted in keys]):
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
async def listen(
    app: web.Application, listener: socket.socket, context: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Serve an application on a socket of `bind` within the block, by TLS with a context; yields its URL."""
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
    make_protocol = runner.server
    # Descriptors are left for the program's own files.
    limit = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
    connections: dict[Connection, None] = {}
    loop = asyncio.get_running_loop()

    def connection() -> Connection:
        return Connection(make_protocol(), connections, limit)

    async def connected(_transport: asyncio.Transport) -> None:
        """Leave the connection to its protocol."""

    def log_failure(host: str, port: int, error: OSError) -> None:
        _log.debug("no TLS with %s: %s", join_address(host, port), error)

    host, port = listener.getsockname()[:2]
    try:
        if context is None:
            # For asyncio the backlog is also how many connections it accepts in one turn; the queue is set afterwards.
            server = await loop.create_server(connection, sock=listener, backlog=ACCEPTED)
            listener.listen(QUEUE)
            try:
                yield f"http://{join_address(host, port)}"
            finally:
                server.close()
            return
        listener.listen(QUEUE)
        accepting = loop.create_task(
            accept_tls(listener, context, lambda: (connection(), connected), log_failure, timeout=HEADER_TIME)
        )
        try:
            yield f"https://{join_address(host, port)}"
        finally:
            accepting.cancel()
            listener.close()
    finally:
        await runner.cleanup()


class Connection(asyncio.Protocol):
    """Forwards the data of a connection, within limits of time and size for each of its requests.

    Above the limit of connections, the one that has kept this server waiting for longest is closed: an idle one, or one
    whose request has not arrived. If there is none, the new connection is closed.

    Args:
        inner: aiohttp's protocol.
        connections: all connections of the server; those that are waited for are in order of time.
        limit: of connections at once.
    """

    _by_inner: ClassVar[dict[Inner, Connection]] = {}

    def __init__(self, inner: Inner, connections: dict[Connection, None], limit: int) -> None:
        self._inner = inner
        self._connections = connections
        self._max_connections = limit
        self._transport: Any = None
        self._waited_for = True  # for a request, or the rest of one
        self._headers: bytes | None = b""  # so far; None: they are complete, or none has begun
        self._limit: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, request: web.Request) -> Connection | None:
        """Return the connection of a request; None if another server accepted it."""
        return cls._by_inner.get(request.protocol)

    def connection_made(self, transport: Any) -> None:
        """Accept the connection, unless there are too many whose requests are being answered."""
        if len(self._connections) >= self._max_connections:
            waiting = (c for c in self._connections if c._waited_for and not c._is_writing())
            oldest = next(waiting, None)
            if oldest is None:
                transport.abort()
                return
            oldest._abort()
        self._transport = transport
        transport.max_size = READ
        self._connections[self] = None
        self._by_inner[self._inner] = self
        self._expire(HEADER_TIME)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request, whose headers are bounded in size and time."""
        if self._limit is not None:
            if self._headers is None:
                self._headers = b""
                self._expire(HEADER_TIME)
            self._headers = (self._headers + data).lstrip(b"\r\n")  # blank lines may come first
            end = self._headers.find(b"\r\n\r\n", 0, MAX_HEADERS)
            if end < 0 and len(self._headers) >= MAX_HEADERS:
                self._transport.write(TOO_LONG)
                self._transport.close()
                return
            if end >= 0:
                self._expire(None)
                self._headers = None
        self._inner.data_received(data)

    def begin(self) -> None:
        """Note that a request has arrived: it is this server's turn."""
        self._expire(None)
        self._headers = None
        self._waited_for = False

    def end(self) -> None:
        """Note that the request was answered: it is the client's turn."""
        self._wait()
        self._expire(IDLE_TIME)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within the block, wait for the rest of a request."""
        self._wait()
        try:
            yield
        finally:
            self._waited_for = False

    def _wait(self) -> None:
        self._waited_for = True
        if self in self._connections:  # move it to the end of the order
            del self._connections[self]
            self._connections[self] = None

    def _expire(self, seconds: float | None) -> None:
        """Close the connection after this many seconds; never, with None."""
        if self._limit is not None:
            self._limit.cancel()
        self._limit = None
        if seconds is not None and not self._transport.is_closing():
            self._limit = asyncio.get_running_loop().call_later(seconds, self._expired, seconds)

    def _expired(self, seconds: float) -> None:
        if self._is_writing():  # the last response is still being sent, within WRITE_TIME
            self._expire(seconds)
        else:
            self._abort()

    def _is_writing(self) -> bool:
        return bool(self._transport.get_write_buffer_size())

    def _abort(self) -> None:
        self._connections.pop(self, None)
        self._transport.abort()

    def eof_received(self) -> bool | None:
        """Note that the client sends no more."""
        return None if self._transport is None else self._inner.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the connection, which is closed."""
        for timer in (self._limit, self._writing):
            if timer is not None:
                timer.cancel()
        self._connections.pop(self, None)
        self._by_inner.pop(self._inner, None)
        if self._transport is not None:
            self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        """Limit the time until the client reads again."""
        self._writing = asyncio.get_running_loop().call_later(WRITE_TIME, self._abort)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        if self._writing is not None:
            self._writing.cancel()
        self._inner.resume_writing()


async def json_of(request: web.Request) -> Json:
    """Parse the JSON of a request's body. ValueError: it is not JSON; says why in one line."""
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise ValueError("it must be in UTF-8")
    text = (await request.read()).decode()
    if text.count("[") + text.count("{") > MAX_PARTS:
        raise ValueError(f"it has more than {MAX_PARTS} lists and objects")
    try:
        if len(text) < SHORT:
            return json.loads(text)
        return await asyncio.get_running_loop().run_in_executor(_decoding, _Decoder().decode, text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _Decoder(json.JSONDecoder):
    """The standard library's decoder in Python: the one in C blocks all other threads until it returns."""

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
    """Whether a log record of aiohttp is about this side: errors of clients are answered, and not logged."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


_log = logging.getLogger(f"{__name__}.requests")
_log.addFilter(_is_ours)


def _name(url: str) -> str | None:
    """Return the host of a URL, in lower case and without brackets."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
