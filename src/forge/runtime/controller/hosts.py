"""Hosts that processes are started on: this machine, and worker processes on it that stand for additional hosts.

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

from ..process import Process, end_with_parent, is_stopped
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
# The program of a loopback host's worker. It gets the controller's process id as its argument, its address on stdin.
_SERVE = (
    "import sys; from forge.runtime.controller.hosts import serve_host; "
    "serve_host(sys.stdin.readline(), int(sys.argv[1]))"
)


@cache
def start_client() -> str:
    """Start Monarch in this process, and end it when the process exits; return Monarch's transport, e.g. "unix"."""
    with temporary_files_beside_sockets():
        this_host()
    end_at_exit()
    warn_if_exposed()
    return monarch_transport()


def monarch_transport() -> str:
    """Return the transport for what Monarch starts from now on; with "unix" only this machine can connect to it."""
    return str(get_global_config()["default_transport"])


def attach_workers(name: str, workers: list[str]) -> HostMesh:
    """Return a mesh of the worker processes at these addresses, one host for each."""
    start_client()
    return attach_to_workers(ca="trust_all_connections", workers=workers, name=f"{name}_{next(_mesh_numbers)}")


class Hosts:
    """The hosts that a replica's processes are started on. This class is the controller's own host.

    Attributes:
        size: number of hosts.
        borrowed: whether the processes exist already and are the user's.
        own_program: whether processes run the program that their host starts by default, and not this process's Python:
            another machine may have another one.
        notice_after: seconds within which the controller learns that a process died.
    """

    size = 1
    borrowed = False
    own_program = False
    notice_after = 1.0

    async def mesh(self) -> HostMesh | ProcMesh:
        """Return the hosts as one mesh, after restarting lost hosts; or the mesh of processes that exist already."""
        start_client()
        return this_host()

    @property
    def spans_machines(self) -> bool:
        """Return whether the processes are on several machines."""
        return self.size > 1

    def gpus(self) -> dict[str, list[str]]:
        """Return the devices that the processes may see, by the address of their machine, e.g. {"host:7000": ["0"]}.

        The empty address is this machine. An empty dict leaves the choice of devices to the controller.
        """
        return {}

    def variables(self) -> dict[str, str]:
        """Return the environment variables that processes here get in addition to the controller's."""
        return {"TMPDIR": str(sockets_folder())}

    async def rendezvous(self) -> str:
        """Return a new meeting point for the ranks of one process group, as `process_store` takes it."""
        return f"ranks-{uuid4().hex}"

    def process(self, pid: int, host: str, ended: Callable[[], None]) -> Process:
        """Return a watcher of one of the processes, which calls `ended()` when the process ends.

        Args:
            host: the address of its host or its machine, as the process itself states it.
        """
        return Process(pid, ended)

    def when_lost(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost(reason)` once one of the machines, or the worker on it, is lost."""

    def give_up(self) -> None:
        """Mark the hosts as lost, because no process could be started on them; the next `mesh` restarts them."""

    async def stop(self) -> None:
        """Stop the worker processes of these hosts, if there are any."""


class LoopbackHosts(Hosts):
    """Simulated hosts on this machine: one worker process each, attached like another machine.

    A host counts as lost when its worker ended or was stopped by a signal, or when no process could be started on it: a
    connection that was silent for too long, for example while a machine was suspended, stays broken. The next `mesh`
    then starts all workers again, each at a new address, because Monarch attaches to an address only once.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self._workers: list[subprocess.Popen] = []
        self._mesh: HostMesh | None = None
        self._lock = asyncio.Lock()

    @property
    def spans_machines(self) -> bool:
        """Return False: all of these hosts are this machine."""
        return False

    async def mesh(self) -> HostMesh:
        """Return the mesh of all workers, started if needed; lost ones are replaced first."""
        async with self._lock:
            is_lost = any(worker.poll() is not None or is_stopped(worker.pid) for worker in self._workers)
            if self._mesh is None or is_lost:
                await self.stop()
                folder = sockets_folder()
                addresses = [f"{new_service_proc_id()}@ipc://{folder}/{os.urandom(8).hex()}" for _ in range(self.size)]
                self._workers = [_start_worker(address, self.variables()) for address in addresses]
                self._mesh = attach_workers(self.name, addresses)
            return self._mesh

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [worker.pid for worker in self._workers]

    def give_up(self) -> None:
        """Mark the hosts as lost, so that the next `mesh` restarts all workers."""
        self._mesh = None

    async def stop(self) -> None:
        """Kill the workers and wait for their end."""
        workers, self._workers, self._mesh = self._workers, [], None
        for worker in workers:
            worker.kill()
        for worker in workers:
            await asyncio.to_thread(worker.wait)


def _start_worker(address: str, variables: dict[str, str]) -> subprocess.Popen:
    """Start a worker process that listens at `address`, with `variables` added to its environment.

    The address goes to its standard input: other users can read the arguments of a process.
    """
    command = [sys.executable, "-c", _SERVE, str(os.getpid())]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=os.environ | variables)
    with worker.stdin as pipe:  # type: ignore[union-attr]
        pipe.write(f"{address}\n")
    return worker


def serve_host(address: str, parent: int) -> None:
    """Serve as a host at `address` until the process with the id `parent` ends."""
    end_with_parent(parent)
    # The controller handles the signals of a terminal (SIGINT, SIGHUP) and of a scheduler (SIGTERM). SIGTERM gets an
    # empty handler: programs that a component starts must not inherit an ignored SIGTERM, which is how they are ended.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    serve_forever(address.strip(), Path(os.environ["TMPDIR"]))


def serve_forever(address: str, folder: Path) -> None:
    """Run a Monarch worker at `address` until the process ends; its local sockets are created in `folder`."""
    sockets_in(folder)
    run_worker_loop_forever(address=address, ca="trust_all_connections")
