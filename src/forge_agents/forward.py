"""Connections of a confined program, passed on to an address outside."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing, suppress

CHUNK = 1 << 16  # bytes that are read at once


class Forwarder:
    """Answers the connections of a listening socket, each by one to `host` and `port`."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Begin to answer."""
        self._server = await asyncio.start_server(self._forward_connection, sock=listener, limit=CHUNK)

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _forward_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        # The program sees its connection closed, as it would see one rejected.
        with closing(writer), suppress(OSError):
            outer_reader, outer_writer = await asyncio.open_connection(self._host, self._port, limit=CHUNK)
            with closing(outer_writer):
                await asyncio.gather(_copy_stream(reader, outer_writer), _copy_stream(outer_reader, writer))


async def _copy_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of the data, and end the other direction's, too."""
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
