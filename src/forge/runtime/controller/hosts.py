"""Hosts that processes are started on: this one, and worker processes on it that stand for additional hosts.

Monarch's connections are not authenticated and carry pickled code: their sockets are in a folder that only this user
may enter. Other machines are an additional kind of `Hosts`, which an extension provides
(`forge.runtime.controller.placement`).
"""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from uuid import uuid4

from ..process import Process, Watched, end_with_parent, is_stopped
from ._monarch import (
    HostMesh,
    ProcMesh,
    attach_to_workers,
    end_at_exit,
    get_global_config,
    new_service_proc_id,
    run_worker_loop_forever,
    this_host,
)
from .private import sockets_folder, sockets_in, temporary_files_beside_sockets, warn_if_exposed

_mesh_numbers = itertools.count()
# The program of a loopback host's worker.
_SERVE = (
    "import sys; from forge.runtime.controller.hosts import serve_host; "
    "serve_host(sys.stdin.readline(), int(sys.argv[1]))"
)


@cache
def start_client() -> str:
    """Start Monarch in this process, and have it end in order with the process; return its transport."""
    with temporary_files_beside_sockets():
        this_host()
    end_at_exit()
    warn_if_exposed()
    return monarch_transport()


def monarch_transport() -> str:
    """Return the transport of what Monarch starts from now on: `unix` reaches this machine only."""
    return str(get_global_config()["default_transport"])


def attach_workers(name: str, workers: list[str]) -> HostMesh:
    """Return a mesh of workers, by their addresses."""
    start_client()
    return attach_to_workers(ca="trust_all_connections", workers=workers, name=f"{name}_{next(_mesh_numbers)}")


class Hosts:
    """One or more hosts that a replica's processes are started on: this class is the controller's host, whose
    processes end one by one with their replicas, and with the controller.

    Attributes:
        size: number of hosts.
        borrowed: the processes exist already and are the user's.
        own_program: start what the hosts start by default; another machine may have another Python.
        notice_after: seconds in which the death of a process is known.
    """

    size = 1
    borrowed = False
    own_program = False
    notice_after = 1.0

    async def mesh(self) -> HostMesh | ProcMesh:
        """Return the hosts as one mesh, lost ones started again first; or the processes, if they exist already."""
        start_client()
        return this_host()

    @property
    def spans_machines(self) -> bool:
        """Return whether the processes are on several machines."""
        return False

    def gpus(self) -> dict[str, list[str]]:
        """Return devices that the processes may see, by the address of their machine; the empty string is this
        machine."""
        return {}

    def variables(self) -> dict[str, str]:
        """Return the environment variables of processes here, in addition to the controller's."""
        return {"TMPDIR": str(sockets_folder())}

    async def rendezvous(self) -> str:
        """Return where the ranks of a new process group meet, see `process_store`."""
        return f"ranks-{uuid4().hex}"

    def process(self, pid: int, host: str, ended: Callable[[], None]) -> Watched:
        """Watch one of the processes; `ended` is called when it ends."""
        return Process(pid, ended)

    def when_lost(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost(reason)` once one of the machines, or the worker on it, is lost."""

    def give_up(self) -> None:
        """Count the hosts as lost: no process could be started on them."""

    async def stop(self) -> None:
        """Stop the workers."""


class LoopbackHosts(Hosts):
    """Hosts on this machine: a worker process each, which the controller attaches to as to another machine.

    A host counts as lost when its worker ended or was stopped by a signal, or when no process could be started on it: a
    connection that was silent for too long, as while a machine is suspended, stays broken. The next `mesh` then starts
    all of them again, each at a new address: an address that was attached to once cannot be attached to again.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self._workers: list[subprocess.Popen] = []
        self._mesh: HostMesh | None = None
        self._lock = asyncio.Lock()

    async def mesh(self) -> HostMesh:
        """Return the mesh of all workers, started if needed; lost ones are replaced first."""
        async with self._lock:
            if self._mesh is None or any(
                worker.poll() is not None or is_stopped(worker.pid) for worker in self._workers
            ):
                await self.stop()
                folder = sockets_folder()
                addresses = [f"{new_service_proc_id()}@ipc://{folder}/{os.urandom(8).hex()}" for _ in range(self.size)]
                self._workers = [_start_worker(address, self.variables()) for address in addresses]
                self._mesh = attach_workers(self.name, addresses)
            return self._mesh

    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers]

    def give_up(self) -> None:
        """Start all workers again at the next use."""
        self._mesh = None

    async def stop(self) -> None:
        """Kill the workers and wait for their end."""
        workers, self._workers, self._mesh = self._workers, [], None
        for worker in workers:
            worker.kill()
        for worker in workers:
            await asyncio.to_thread(worker.wait)


def _start_worker(address: str, variables: dict[str, str]) -> subprocess.Popen:
    """Start a worker process. Other users may read the arguments of a process, so the address comes on its standard
    input."""
    words = [sys.executable, "-c", _SERVE, str(os.getpid())]
    worker = subprocess.Popen(words, stdin=subprocess.PIPE, text=True, env=os.environ | variables)
    assert worker.stdin is not None
    with worker.stdin as pipe:
        pipe.write(f"{address}\n")
    return worker


def serve_host(address: str, parent: int) -> None:
    """Serve as a host until the process `parent` ends."""
    end_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGHUP):  # the controller handles what a terminal sends
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # and a scheduler; children get the default
    serve_forever(address.strip(), Path(os.environ["TMPDIR"]))


def serve_forever(address: str, folder: Path) -> None:
    """Run a Monarch worker at `address`, with its sockets of this machine in a private folder."""
    sockets_in(folder)
    run_worker_loop_forever(address=address, ca="trust_all_connections")
