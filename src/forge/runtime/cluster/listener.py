"""The listening side of `wire`: a peer without the secret costs little and keeps no other out."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable

from ...system.addresses import joined
from .wire import CONNECT_TIMEOUT, LONGEST

log = logging.getLogger(__name__)

STRANGERS = 64  # connections without TLS yet, and at most an eighth of the descriptors that the process may have
QUEUE = 1024  # connections that wait for their turn
PAUSE = 0.1  # seconds, once there is no descriptor left
WARNED = 1000  # addresses that are remembered

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listener:
    """Gives each connection with TLS to `talk`. Of too many without it the oldest makes room: who knows the secret
    needs no time.

    Raises:
        OSError: the address is not available.
    """

    def __init__(self, address: str, port: int, context: ssl.SSLContext, talk: Talk) -> None:
        family, *_, name = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        self._at = socket.create_server(name[:2], family=family, backlog=QUEUE)  # type: ignore[arg-type]
        self._at.setblocking(False)
        self.port: int = self._at.getsockname()[1]
        self._context, self._talk = context, talk
        self._most = min(STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], None] = {}  # in the order in which they came
        self._warned: set[str] = set()

    async def serve(self) -> None:
        """Accept connections until this task is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, name = await loop.sock_accept(self._at)
                except OSError:  # it has gone already, or there is no descriptor left
                    await asyncio.sleep(PAUSE)
                    continue
                if len(self._strangers) >= self._most:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    oldest.cancel()
                task = loop.create_task(self._meet(connection, *name[:2]))
                self._strangers[task] = None
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                await asyncio.sleep(0)  # an accepted connection does not give way by itself
        finally:
            self._at.close()
            for task in self._tasks:
                task.cancel()

    async def _meet(self, connection: socket.socket, host: str, port: int) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        reader = asyncio.StreamReader(limit=LONGEST)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=CONNECT_TIMEOUT
            )
        except (OSError, TimeoutError) as error:
            self._say(host, port, error)
            return
        finally:
            self._strangers.pop(task, None)  # type: ignore[arg-type]
        await self._talk(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    def _say(self, host: str, port: int, error: OSError) -> None:
        """Log why a connection was not accepted: one warning for each address, which may try without end."""
        level = logging.DEBUG
        # Probes say nothing.
        if isinstance(error, ssl.SSLError) and host not in self._warned and len(self._warned) < WARNED:
            self._warned.add(host)
            level = logging.WARNING
        log.log(level, "%s was not accepted: %s", joined(host, port), str(error) or type(error).__name__)
