"""Standby processes: started before Monarch is asked for them, so that a slow start does not exceed Monarch's limit."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..cluster.process import cpu_seconds
from ..forking import forklauncher
from ..forking.forkserver import LIVES, ForkServer
from ..forking.standby import ADDRESS, HELD, PROGRAM
from .errors import ReplicaDied

log = logging.getLogger(__name__)

CHECK_EVERY = 1.0  # seconds
SERVER_END_TIMEOUT = 10.0  # seconds in which a fork server that does not answer has ended
REPORT_AFTER = 30.0  # seconds; on an idle machine a process is up after one
_numbers = itertools.count()


class Standbys:
    """The processes of a replica, before and after Monarch adopts them. They end once this is closed.

    Args:
        name: of the replica.
        count: number of processes.
        folder: a private folder for their sockets.
        settings: environment variables of their allocators, in addition to this process's environment.
    """

    def __init__(self, name: str, count: int, folder: Path, settings: Mapping[str, str]) -> None:
        self.name = name
        self._settings = settings
        self._address = str(folder / f"s{next(_numbers)}")
        self._processes = [Standby(f"{self._address}.{number}") for number in range(count)]

    @property
    def command(self) -> list[str]:
        """Arguments that make Python the launcher of one of the processes."""
        launcher = str(Path(forklauncher.__file__))
        return ["-I", "-S", launcher, self._address, str(len(self._processes)), PROGRAM]

    async def start(self, server: ForkServer | None, patience: float) -> None:
        """Start all, and wait until they are up.

        Args:
            server: forks them; None starts new ones, whose libraries read their own environment.
            patience: seconds in which one of them may use no CPU time: on a busy machine a living process gets some.

        Raises:
            ReplicaDied: one of them ended, or came to a halt.
        """
        try:
            try:
                await asyncio.gather(*(process.start(self._settings, server) for process in self._processes))
            except OSError as error:
                raise ReplicaDied(f"{self.name}: no process could be started: {error}") from error
            await asyncio.gather(*(self._come_up(process, patience) for process in self._processes))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            process.close()

    async def _come_up(self, process: Standby, patience: float) -> None:
        up = asyncio.ensure_future(process.is_up())
        began = active = time.monotonic()
        cpu = cpu_seconds(process.pid)
        report = REPORT_AFTER
        try:
            while not up.done():
                await asyncio.wait([up], timeout=CHECK_EVERY)
                now = time.monotonic()
                used = cpu_seconds(process.pid)
                # Slow is not lost: as long as it uses CPU time, it may still come up.
                if used > cpu:
                    active = now
                    cpu = used
                if now - active > patience:
                    raise ReplicaDied(
                        f"{self.name}: process {process.pid} has not come up, and used no CPU for {patience:g} s "
                        "(setup_timeout)"
                    )
                if now - began > report:
                    log.warning(
                        "starting %s: %.0f s, its process %d has used %.1f s of CPU",
                        self.name, now - began, process.pid, used,
                    )  # fmt: skip
                    report *= 2
            if not up.result():
                raise ReplicaDied(f"{self.name}: process {process.pid} ended before it was up; its output says why")
        finally:
            up.cancel()


class Standby:
    """A process that waits for a launcher at an address, to run in its place. It ends once this is closed."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.pid = 0
        # Its standard input: the process writes a byte once it is up, and ends when this side is closed.
        self._socket, self._child_socket = socket.socketpair()
        self._socket.setblocking(False)
        self._handle: int | None = None

    async def start(self, settings: Mapping[str, str], server: ForkServer | None) -> None:
        """Have the server fork the process, or else start it with further variables in its environment."""
        environment = {**os.environb, ADDRESS.encode(): self.address.encode()}
        if server is not None:
            self.pid = await _forked(server, environment, self._child_socket.fileno())
        if not self.pid:
            environment |= {name.encode(): value.encode() for name, value in settings.items()}
            self.pid = _spawned(environment, self._child_socket.fileno())
        with suppress(ProcessLookupError):  # it ended at once
            self._handle = os.pidfd_open(self.pid)
        self._child_socket.close()

    async def is_up(self) -> bool:
        """Wait until the process is up (True) or has ended (False)."""
        with suppress(ConnectionError):
            return bool(await asyncio.get_running_loop().sock_recv(self._socket, 1))
        return False

    def close(self) -> None:
        """Kill the process."""
        self._socket.close()
        self._child_socket.close()
        if self._handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            os.close(self._handle)
            self._handle = None


async def _forked(server: ForkServer, environment: dict[bytes, bytes], standard_input: int) -> int:
    """Return the id of a process that the server forked, 0 if it could not. A server that ended is started again."""
    for _ in range(LIVES):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            arguments = connection, str(server.address), "forge.runtime.forking.standby", environment, standard_input
            pid = await asyncio.to_thread(forklauncher.ask, *arguments)
        if pid is not None:
            return pid
        if not await asyncio.to_thread(server.revive, SERVER_END_TIMEOUT):
            break
    return 0


def _spawned(environment: dict[bytes, bytes], standard_input: int) -> int:
    """Start a process and return its id."""
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "forge.runtime.forking.standby"],
        environment,
        file_actions=[(os.POSIX_SPAWN_DUP2, standard_input, 0)],
        setsigmask=HELD,  # it has no handlers yet
    )
    threading.Thread(target=_reap, args=[pid], daemon=True).start()
    return pid


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):  # this process ignores SIGCHLD
        os.waitpid(pid, 0)
