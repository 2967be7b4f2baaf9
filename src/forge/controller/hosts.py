"""Where processes are started: this host, or further hosts that are reached over TCP.

Monarch reaches other hosts over connections that are unauthenticated and carry pickled code: loopback, or a network
that is trusted.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from typing import Protocol

from ._monarch import HostMesh, attach_to_workers, new_service_proc_id, this_host
from .processes import is_stopped

_attached = itertools.count()


class Hosts(Protocol):
    """One or more hosts that a replica's processes are started on."""

    size: int

    async def mesh(self) -> HostMesh:
        """The hosts as one mesh; brought back first if one of them was lost."""

    def pids(self) -> list[int]:
        """The processes that stand for the hosts, where they were started here."""

    async def stop(self) -> None:
        """Give the hosts up."""


class ThisHost:
    """The controller's own host."""

    size = 1

    async def mesh(self) -> HostMesh:
        return this_host()

    def pids(self) -> list[int]:
        return []

    async def stop(self) -> None:
        """Processes of this host end one by one with their replicas, and with the controller."""


class LoopbackHosts:
    """Hosts on this machine: a worker process each, reached over TCP as another machine would be.

    Replicas find them lost when a worker ended or stopped; the next one to start brings all of them back, each at a
    new address: an address that was attached to once cannot be attached to again.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self._workers: list[subprocess.Popen] = []
        self._mesh: HostMesh | None = None
        self._lock = asyncio.Lock()

    async def mesh(self) -> HostMesh:
        async with self._lock:
            if self._mesh is None or not all(map(_runs, self._workers)):
                await self.stop()
                addresses = [_free_address() for _ in range(self.size)]
                self._workers = [_start_worker(address) for address in addresses]
                self._mesh = attach_to_workers(
                    ca="trust_all_connections", workers=addresses, name=f"{self.name}_{next(_attached)}"
                )
            return self._mesh

    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    async def stop(self) -> None:
        workers, self._workers, self._mesh = self._workers, [], None
        for worker in workers:
            worker.kill()
        for worker in workers:
            await asyncio.to_thread(worker.wait)


def _start_worker(address: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "forge.controller.host_worker", address, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"{new_service_proc_id()}@tcp://127.0.0.1:{probe.getsockname()[1]}"


def _runs(worker: subprocess.Popen) -> bool:
    return worker.poll() is None and not is_stopped(worker.pid)
