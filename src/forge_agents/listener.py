"""A listening socket that outlives the process which serves it: clients that come meanwhile wait instead of failing."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from forge.system.scratch import Scratch
from forge_http.web import bind

TIMEOUT = 10.0  # seconds to hand the socket over


class SharedListener:
    """A bound socket of this process, which hands it to processes of this machine and user.

    Args:
        host, port: to bind; port 0 takes a free one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.socket = bind(host, port)
        self._scratch = Scratch("forge-agents-")
        self.path = self._scratch.path / "listener"
        self._giver = socket.socket(socket.AF_UNIX)
        self._giver.bind(str(self.path))
        self._giver.listen()
        threading.Thread(target=self._give, name="forge-listener", daemon=True).start()

    def close(self) -> None:
        """Close the socket; clients that wait on it get an error."""
        self._giver.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in it
        self._giver.close()
        self.socket.close()
        self._scratch.close()

    def _give(self) -> None:
        while True:
            try:
                connection, _ = self._giver.accept()
            except OSError:  # closed
                return
            with connection:
                socket.send_fds(connection, [b"1"], [self.socket.fileno()])


def take_listener(path: Path) -> socket.socket:
    """The socket of the `SharedListener` with this path. OSError: its process is gone."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT)
        connection.connect(str(path))
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    return socket.socket(fileno=descriptors[0])
