"""Acceptance of TLS connections: a peer that does not finish its handshake costs little and blocks no other peer."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable

# Connections without TLS yet, and at most an eighth of the descriptors that the process may have: real peers finish
# their handshake in milliseconds, so 64 are more than any run has at once.
MAX_HANDSHAKES = 64
PAUSE = 0.1  # seconds without accepting, once no descriptor is left

Connected = Callable[[asyncio.Transport], Awaitable[None]]
Peer = tuple[asyncio.Protocol, Connected]


async def accept_tls(
    listener: socket.socket,
    context: ssl.SSLContext,
    peer: Callable[[], Peer],
    on_failure: Callable[[str, int, OSError], None],
    *,
    timeout: float,
) -> None:
    """Accept connections until this task is cancelled. When too many have no TLS yet, the oldest of these is closed.

    Args:
        listener: a listening socket, which the caller closes.
        peer: makes the protocol of a connection, and what is awaited once it has TLS.
        on_failure: gets the host, the port and the error of a handshake that failed.
        timeout: seconds of a handshake.
    """
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    limit = min(MAX_HANDSHAKES, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
    tasks: set[asyncio.Task[None]] = set()
    handshakes: dict[asyncio.Task[None], None] = {}  # in the order of their arrival

    async def serve(connection: socket.socket, host: str, port: int) -> None:
        protocol, connected = peer()
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=context, ssl_handshake_timeout=timeout
            )
        except (OSError, TimeoutError) as error:
            on_failure(host, port, error)
            return
        finally:
            handshakes.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
        await connected(transport)

    try:
        while True:
            try:
                connection, name = await loop.sock_accept(listener)
            except OSError:  # the peer closed it, or there is no descriptor left
                await asyncio.sleep(PAUSE)
                continue
            if len(handshakes) >= limit:
                oldest = next(iter(handshakes))
                del handshakes[oldest]
                oldest.cancel()
            task = loop.create_task(serve(connection, *name[:2]))
            handshakes[task] = None
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(0)  # accepting a waiting connection does not yield to the loop
    finally:
        for task in tasks:
            task.cancel()
