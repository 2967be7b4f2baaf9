"""Processes that stand by before Monarch is asked for them, so that they may take as long as they need to come up."""

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

from ..forking import forklauncher
from ..forking.forkserver import LIVES, ForkServer
from ..forking.standby import ADDRESS, HELD, PROGRAM
from .errors import ReplicaDied
from .patience import cpu_seconds

log = logging.getLogger(__name__)

CHECK_EVERY = 1.0  # seconds
ENDING = 10.0  # seconds in which a server that does not answer any more has ended
REPORT_AFTER = 30.0  # seconds; on an idle machine a process is up after one
_numbers = itertools.count()


class Standbys:
    """The processes of a replica, before and after Monarch takes them. They end once this is closed.

    Args:
        name: the replica's.
        count: how many processes.
        folder: a private folder for their sockets.
        settings: what allocators read in their environment, beside this process's own.
    """

    def __init__(self, name: str, count: int, folder: Path, settings: Mapping[str, str]) -> None:
        self.name, self._settings = name, settings
        self._address = str(folder / f"s{next(_numbers)}")
        self._processes = [Standby(f"{self._address}.{number}") for number in range(count)]

    @property
    def command(self) -> list[str]:
        """Arguments that make Python the launcher of one of them."""
        launcher = str(Path(forklauncher.__file__))
        return ["-I", "-S", launcher, self._address, str(len(self._processes)), PROGRAM]

    async def start(self, server: ForkServer | None, patience: float) -> None:
        """Start all, and wait until they are up.

        Args:
            server: forks them, unless libraries that it imported would read another environment now.
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
        """Kill all of them."""
        for process in self._processes:
            process.close()

    async def _come_up(self, process: Standby, patience: float) -> None:
        up = asyncio.ensure_future(process.is_up())
        began = active = time.monotonic()
        cpu, report = cpu_seconds(process.pid), REPORT_AFTER
        try:
            while not up.done():
                await asyncio.wait([up], timeout=CHECK_EVERY)
                now, used = time.monotonic(), cpu_seconds(process.pid)
                if used > cpu:
                    active, cpu = now, used
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
    """A process that takes the place of a launcher, waiting for it at an address. It ends once this is closed."""

    def __init__(self, address: str) -> None:
        self.address, self.pid = address, 0
        self._mine, self._its = socket.socketpair()
        self._mine.setblocking(False)
        self._handle: int | None = None

    async def start(self, settings: Mapping[str, str], server: ForkServer | None) -> None:
        """Have the server fork it, or else start it with further variables in its environment."""
        environment = {**os.environb, ADDRESS.encode(): self.address.encode()}
        if server is not None:
            self.pid = await _forked(server, environment, self._its.fileno())
        if not self.pid:
            environment |= {name.encode(): value.encode() for name, value in settings.items()}
            self.pid = _spawned(environment, self._its.fileno())
        with suppress(ProcessLookupError):  # it ended
            self._handle = os.pidfd_open(self.pid)
        self._its.close()

    async def is_up(self) -> bool:
        """Whether it came up; otherwise it ended."""
        with suppress(ConnectionError):
            return bool(await asyncio.get_running_loop().sock_recv(self._mine, 1))
        return False

    def close(self) -> None:
        """Kill it."""
        self._mine.close()
        self._its.close()
        if self._handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            os.close(self._handle)
            self._handle = None


async def _forked(server: ForkServer, environment: dict[bytes, bytes], standard_input: int) -> int:
    """The id of a process that the server forked, 0 if it could not; it is started again if it has ended."""
    for _ in range(LIVES):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            words = asking, str(server.address), "forge.runtime.forking.standby", environment, standard_input
            pid = await asyncio.to_thread(forklauncher.ask, *words)
        if pid is not None:
            return pid
        if not await asyncio.to_thread(server.revive, ENDING):
            break
    return 0


def _spawned(environment: dict[bytes, bytes], standard_input: int) -> int:
    """The id of a new process."""
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
