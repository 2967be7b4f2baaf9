"""Protection of this library's HTTP servers: who may call them.

A page in a browser reaches a server on 127.0.0.1 too: by a form, by a WebSocket, or by a name that it has pointed at
that address (DNS rebinding). Without an API key, requests must therefore name this server as their Host and, if a
browser states an Origin, come from it; bodies must be JSON, which a page cannot send to another origin without a
preflight request. An address that other machines reach needs a key.
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from .addresses import join_address, listening_error

try:
    from aiohttp import web
    from aiohttp.http_exceptions import HttpProcessingError
except ImportError as error:
    raise ImportError("serving needs aiohttp: pip install aiohttp") from error

API_KEY = "FORGE_API_KEY"
BODY_TIME = 60.0  # seconds for a request's body
CLOSING = 1.0  # seconds for open requests to end, and once more after they were cancelled
SHORT = 1 << 16  # characters of JSON that are parsed in the event loop
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Middleware = Any  # decorated by aiohttp, which types it as a function
Json = Any


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address.

    >>> is_loopback("127.0.0.1")
    True
    >>> is_loopback("10.0.0.2")
    False
    """
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


def bind_socket(host: str, port: int, any_port: str = "--port 0") -> socket.socket:
    """Open a listening socket; port 0 takes a free port.

    Args:
        any_port: the option for a free port, for the error.

    Raises:
        OSError: the address is not available; names it and the fix.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise listening_error(host, port, error, any_port) from None


def bearer_key(request: web.Request) -> str:
    """Return the API key that a request's Authorization has; "" for none."""
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def guard_requests(
    host: str, key: str | None, second_key: str | None = None, key_of: Callable[[web.Request], str] = bearer_key
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
    async def check_request(request: web.Request, handler: Handler) -> web.StreamResponse:
        if key is not None:
            sent = key_of(request).encode(errors="surrogateescape")
            keys = [accepted.encode(errors="surrogateescape") for accepted in (key, second_key) if accepted]
            # A list, not a generator: the time must not tell which key was compared.
            if not any([hmac.compare_digest(sent, accepted) for accepted in keys]):
                raise web.HTTPUnauthorized(reason="the API key is missing or wrong")
        else:
            origin = request.headers.get("Origin")
            if _host_name(f"//{request.headers.get('Host', '')}") not in names:
                raise web.HTTPForbidden(reason="the Host header is not the address of this server")
            # Images and the like of a page come without an Origin.
            foreign = request.headers.get("Sec-Fetch-Site") == "cross-site"
            if foreign or (origin is not None and _host_name(origin) not in names):
                raise web.HTTPForbidden(reason="requests from pages of other origins are not allowed")

        if request.can_read_body:
            if request.content_type != "application/json":
                raise web.HTTPUnsupportedMediaType(reason="the body must be application/json")
            if request.headers.get("Content-Encoding", "identity") != "identity":
                raise web.HTTPUnsupportedMediaType(reason="the body must not be compressed")
            try:
                async with asyncio.timeout(BODY_TIME):
                    await request.read()
            except TimeoutError:
                raise web.HTTPRequestTimeout(reason=f"the body took more than {BODY_TIME:g} s") from None

        return await handler(request)

    return check_request


@asynccontextmanager
async def serve_application(
    app: web.Application, listener: socket.socket, context: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Serve an application on a socket of `bind` within the block, by TLS with a context; yields its URL."""
    runner = web.AppRunner(
        app, handler_cancellation=True, shutdown_timeout=CLOSING, access_log=None, auto_decompress=False, logger=_log
    )
    await runner.setup()
    host, port = listener.getsockname()[:2]
    try:
        await web.SockSite(runner, listener, ssl_context=context).start()
        yield f"{'http' if context is None else 'https'}://{join_address(host, port)}"
    finally:
        await runner.cleanup()


async def json_of(request: web.Request) -> Json:
    """Parse the JSON of a request's body. ValueError: it is not JSON; says why in one line."""
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise ValueError("it must be in UTF-8")
    text = (await request.read()).decode()
    try:
        if len(text) < SHORT:
            return json.loads(text)
        return await asyncio.to_thread(json.loads, text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether a log record of aiohttp is about this side: errors of clients are answered, and not logged."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


_log = logging.getLogger(f"{__name__}.requests")
_log.addFilter(_is_ours)


def _host_name(url: str) -> str | None:
    """Return the host of a URL, in lower case and without brackets."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
