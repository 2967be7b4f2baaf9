"""Where processes are started: this host, or further hosts that are reached over TCP.

Monarch reaches other hosts over connections that are unauthenticated and carry pickled code: loopback, or a network
that is trusted.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys

from ._monarch import HostMesh, attach_to_workers, new_service_proc_id, run_worker_loop_forever, this_host
from .processes import is_stopped

_attached = itertools.count()
_SERVE = "import sys; from forge.controller.hosts import serve_host; serve_host(sys.argv[1], int(sys.argv[2]))"
PR_SET_PDEATHSIG = 1


class Hosts:
    """One or more hosts that a replica's processes are started on: this class is the controller's own host, whose
    processes end one by one with their replicas, and with the controller."""

    size = 1

    async def mesh(self) -> HostMesh:
        """The hosts as one mesh; started again first if one of them was lost."""
        return this_host()

    def pids(self) -> list[int]:
        """The worker processes of the hosts that were started here."""
        return []

    async def stop(self) -> None:
        """End the worker processes."""


class LoopbackHosts(Hosts):
    """Hosts on this machine: a worker process each, reached over TCP as another machine would be.

    A host counts as lost when its worker ended or was stopped by a signal. The next `mesh` then starts all of them
    again, each at a new address: an address that was attached to once cannot be attached to again.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self._workers: list[subprocess.Popen] = []
        self._mesh: HostMesh | None = None
        self._lock = asyncio.Lock()

    async def mesh(self) -> HostMesh:
        async with self._lock:
            lost = any(worker.poll() is not None or is_stopped(worker.pid) for worker in self._workers)
            if self._mesh is None or lost:
                await self.stop()
                addresses = []
                for _ in range(self.size):
                    with socket.socket() as probe:  # a port that is free
                        probe.bind(("127.0.0.1", 0))
                        addresses.append(f"{new_service_proc_id()}@tcp://127.0.0.1:{probe.getsockname()[1]}")
                self._workers = [
                    subprocess.Popen(  # noqa: ASYNC220 - returns at once, and `stop` waits for it in a thread
                        [sys.executable, "-c", _SERVE, at, str(os.getpid())], stdin=subprocess.DEVNULL
                    )
                    for at in addresses
                ]
                name = f"{self.name}_{next(_attached)}"
                self._mesh = attach_to_workers(ca="trust_all_connections", workers=addresses, name=name)
            return self._mesh

    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    async def stop(self) -> None:
        workers, self._workers, self._mesh = self._workers, [], None
        for worker in workers:
            worker.kill()
        for worker in workers:
            await asyncio.to_thread(worker.wait)


def serve_host(address: str, parent: int) -> None:
    """Be a host, until the process `parent` ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above, which therefore never fires
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the controller to handle
    run_worker_loop_forever(address=address, ca="trust_all_connections")
