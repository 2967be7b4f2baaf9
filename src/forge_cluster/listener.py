"""The listening side of `wire`: connections with TLS, of peers that have the secret."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable

from .wire import CONNECT_TIMEOUT, MAX_MESSAGE

log = logging.getLogger(f"forge.{__name__}")

QUEUE = 1024  # connections that wait to be accepted

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listener:
    """Passes each connection with TLS to `handler`. OSError: the address is not available."""

    def __init__(self, address: str, port: int, context: ssl.SSLContext, handler: Handler) -> None:
        family, *_, name = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.create_server(name[:2], family=family, backlog=QUEUE)  # type: ignore[arg-type]
        self.port: int = self._socket.getsockname()[1]
        self._context = context
        self._handler = handler

    async def serve(self) -> None:
        """Accept connections until this task is cancelled."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_log_failure)
        server = await asyncio.start_server(
            self._handler,
            sock=self._socket,
            ssl=self._context,
            ssl_handshake_timeout=CONNECT_TIMEOUT,
            limit=MAX_MESSAGE,
        )
        async with server:
            await server.serve_forever()


def _log_failure(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """Log why a connection was not accepted, in a line."""
    error = context.get("exception")
    if isinstance(error, OSError):
        log.warning("a connection was not accepted: %s", str(error) or type(error).__name__)
    else:
        loop.default_exception_handler(context)
