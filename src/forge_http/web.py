"""HTTP servers of this library, and the checks of who may call them.

A web page in a browser can send requests to a server on 127.0.0.1 too: by a form, by a WebSocket, or by a name that it
resolves to that address (DNS rebinding). So, without an API key, the Host of a request must be this server, and its
Origin, which browsers send, must be the same. Bodies must be JSON, which a page cannot send to another origin without a
preflight request. A server at an address that other machines can reach must have a key.
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from .addresses import join_address, listening_error

try:
    from aiohttp import web
    from aiohttp.http_exceptions import HttpProcessingError
except ImportError as error:
    raise ImportError("serving needs the package aiohttp: pip install aiohttp") from error

API_KEY = "FORGE_API_KEY"
BODY_TIME = 60.0  # seconds within which the body of a request must arrive
CLOSING = 1.0  # seconds for open requests to end when a server closes, and again after they were cancelled
SHORT = 1 << 16  # characters of JSON that are parsed in the event loop; longer texts are parsed in a thread
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Json = Any


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address.

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
    """Return the API key of a server: `key`, or the environment variable FORGE_API_KEY; None if neither is set.

    Args:
        host: the address at which the server listens.

    Raises:
        ValueError: there is no key, and other machines can reach the address.
    """
    key = key or os.environ.get(API_KEY) or None
    if key is None and not is_loopback(host):
        raise ValueError(
            f"{host} is reachable from other machines: set the variable {API_KEY} to a key, which clients send as API "
            "key"
        )
    return key


def bind_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 takes a free port.

    Raises:
        OSError: the address is not available; the message says why, and what to do.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise listening_error(host, port, error, "--port 0") from None


def bearer_key(request: web.Request) -> str:
    """Return the API key in a request's Authorization header; "" if there is none."""
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def guard_requests(
    host: str,
    key: str | None,
    key_of: Callable[[web.Request], str] = bearer_key,
    content_types: tuple[str, ...] = ("application/json",),
) -> Any:
    """Return middleware that rejects requests of callers without the key or, without a key, of web pages.

    It responds with status 401 to a missing or wrong key, 403 to another Host or Origin, 415 to a body that is not
    JSON, and 408 to a body that does not arrive in time. The module's docstring explains these checks.

    Args:
        host: the address at which the server listens.
        key: the API key; None: callers need none.
        key_of: returns the API key of a request.
        content_types: of bodies; a page cannot send any of these to another origin without a preflight request.
    """
    names = {*LOOPBACK, host} if is_loopback(host) else {host}

    @web.middleware
    async def check_request(request: web.Request, handler: Handler) -> web.StreamResponse:
        if key is not None:
            keys = [text.encode(errors="surrogateescape") for text in (key_of(request), key)]
            if not hmac.compare_digest(*keys):
                raise web.HTTPUnauthorized(reason="the API key is missing or wrong")
        else:
            origin = request.headers.get("Origin")
            if _host_name(f"//{request.headers.get('Host', '')}") not in names:
                raise web.HTTPForbidden(reason="the Host header is not the address of this server")
            # Browsers request a page's images and the like without an Origin, but with this header.
            is_cross_site = request.headers.get("Sec-Fetch-Site") == "cross-site"
            has_other_origin = origin is not None and _host_name(origin) not in names
            if is_cross_site or has_other_origin:
                raise web.HTTPForbidden(reason="requests from pages of other origins are not allowed")

        if request.can_read_body:
            if request.content_type not in content_types:
                raise web.HTTPUnsupportedMediaType(reason=f"the body must be {' or '.join(content_types)}")
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
async def serve_application(app: web.Application, listener: socket.socket) -> AsyncIterator[str]:
    """Serve an application on a listening socket within the block, and yield its URL."""
    runner = web.AppRunner(
        app, handler_cancellation=True, shutdown_timeout=CLOSING, access_log=None, auto_decompress=False, logger=_log
    )
    await runner.setup()
    host, port = listener.getsockname()[:2]
    try:
        await web.SockSite(runner, listener).start()
        yield f"http://{join_address(host, port)}"
    finally:
        await runner.cleanup()


async def answer_constant(content: Json, _: web.Request) -> web.Response:
    """Answer any request with the same JSON."""
    return web.json_response(content)


async def json_of(request: web.Request) -> Json:
    """Return the parsed JSON body of a request; ValueError, with the reason in one line, if it is not JSON in UTF-8."""
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise ValueError("the request body must be UTF-8")
    text = (await request.read()).decode()
    try:
        if len(text) < SHORT:
            return json.loads(text)
        return await asyncio.to_thread(json.loads, text)
    except RecursionError:
        raise ValueError("the request body is nested too deeply") from None


_log = logging.getLogger(f"{__name__}.requests")
# Invalid requests are answered, and not logged.
_log.addFilter(lambda record: record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError))


def _host_name(url: str) -> str | None:
    """Return the host of a URL in lower case, without the brackets of IPv6; None if it has none or is invalid."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
