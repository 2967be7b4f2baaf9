"""The listening side of `wire`: a peer without the secret costs little and blocks no other peer."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable

from ...system.addresses import join_address
from ...system.handshakes import Peer, accept_tls
from .wire import CONNECT_TIMEOUT, MAX_MESSAGE

log = logging.getLogger(__name__)

QUEUE = 1024  # connections that wait to be accepted
MAX_WARNED = 1000  # addresses that are remembered

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listener:
    """Passes each connection with TLS to `handler`. When too many have no TLS yet, the oldest of these is closed: a
    peer with the secret is quick.

    Raises:
        OSError: the address is not available.
    """

    def __init__(self, address: str, port: int, context: ssl.SSLContext, handler: Handler) -> None:
        family, *_, name = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.create_server(name[:2], family=family, backlog=QUEUE)  # type: ignore[arg-type]
        self.port: int = self._socket.getsockname()[1]
        self._context = context
        self._handler = handler
        self._warned: set[str] = set()

    async def serve(self) -> None:
        """Accept connections until this task is cancelled."""
        try:
            await accept_tls(self._socket, self._context, self._peer, self._log_failure, timeout=CONNECT_TIMEOUT)
        finally:
            self._socket.close()

    def _peer(self) -> Peer:
        reader = asyncio.StreamReader(limit=MAX_MESSAGE)
        protocol = asyncio.StreamReaderProtocol(reader)

        async def handle(transport: asyncio.Transport) -> None:
            writer = asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
            await self._handler(reader, writer)

        return protocol, handle

    def _log_failure(self, host: str, port: int, error: OSError) -> None:
        """Log why a connection was not accepted, with one warning for each address, which may retry without end."""
        level = logging.DEBUG
        # A port scan or a probe closes the connection, which is not an error of TLS.
        if isinstance(error, ssl.SSLError) and host not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(host)
            level = logging.WARNING
        log.log(level, "%s was not accepted: %s", join_address(host, port), str(error) or type(error).__name__)
