"""The listening side of `wire`: a peer without the secret costs little and blocks no other peer."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable

from ...system.addresses import join_address
from .wire import CONNECT_TIMEOUT, MAX_MESSAGE

log = logging.getLogger(__name__)

# Connections without TLS yet, and at most an eighth of the descriptors that the process may have: peers with the secret
# finish their handshake in milliseconds, so 64 are more than any run has at once.
MAX_HANDSHAKES = 64
QUEUE = 1024  # connections that wait to be accepted
PAUSE = 0.1  # seconds without accepting, once no descriptor is left
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
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._context = context
        self._handler = handler
        self._limit = min(MAX_HANDSHAKES, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes: dict[asyncio.Task[None], None] = {}  # in the order of their arrival
        self._warned: set[str] = set()

    async def serve(self) -> None:
        """Accept connections until this task is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, name = await loop.sock_accept(self._socket)
                except OSError:  # the peer closed it, or there is no descriptor left
                    await asyncio.sleep(PAUSE)
                    continue
                if len(self._handshakes) >= self._limit:
                    oldest = next(iter(self._handshakes))
                    del self._handshakes[oldest]
                    oldest.cancel()
                task = loop.create_task(self._serve(connection, *name[:2]))
                self._handshakes[task] = None
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                await asyncio.sleep(0)  # accepting a waiting connection does not yield to the loop
        finally:
            self._socket.close()
            for task in self._tasks:
                task.cancel()

    async def _serve(self, connection: socket.socket, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        reader = asyncio.StreamReader(limit=MAX_MESSAGE)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=CONNECT_TIMEOUT
            )
        except (OSError, TimeoutError) as error:
            self._log_failure(host, port, error)
            return
        finally:
            self._handshakes.pop(task, None)  # type: ignore[arg-type]
        await self._handler(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    def _log_failure(self, host: str, port: int, error: OSError) -> None:
        """Log why a connection was not accepted, with one warning for each address, which may retry without end."""
        level = logging.DEBUG
        # A port scan or a probe closes the connection, which is not an error of TLS.
        if isinstance(error, ssl.SSLError) and host not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(host)
            level = logging.WARNING
        log.log(level, "%s was not accepted: %s", join_address(host, port), str(error) or type(error).__name__)
