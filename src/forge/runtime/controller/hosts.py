"""Hosts that processes are started on: this one, worker processes on it that stand for further hosts, other machines.

Monarch's connections are not authenticated and carry pickled code: on this host their sockets are in a folder that only
this user may enter, between machines they are TLS connections of peers that have the run's secret.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from uuid import uuid4

from ..cluster.machine import Machine, RemoteProcess
from ..cluster.pool import Allocation
from ..cluster.process import Process, Watched, is_stopped
from ..cluster.rendezvous import SCHEME
from ..cluster.wire import HostError
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
from .ending import let_threads_wait
from .errors import ReplicaDied
from .private import (
    hidden_announcement,
    sockets_folder,
    sockets_in,
    temporary_files_beside_sockets,
    warn_if_exposed,
)

_mesh_numbers = itertools.count()
# The program of a loopback host's worker.
_SERVE = (
    "import sys; from forge.runtime.controller.hosts import serve_host; "
    "serve_host(sys.stdin.readline(), int(sys.argv[1]))"
)
PR_SET_PDEATHSIG = 1


@cache
def start_client() -> str:
    """Start Monarch in this process, and have it end in order with the process; return its transport."""
    with hidden_announcement(), temporary_files_beside_sockets():
        this_host()
    end_at_exit()
    let_threads_wait()
    warn_if_exposed()
    return transport()


def transport() -> str:
    """Return the transport of what Monarch starts from now on: `unix` reaches this machine only."""
    return str(get_global_config()["default_transport"])


class Hosts:
    """One or more hosts that a replica's processes are started on: this class is the controller's host, whose
    processes end one by one with their replicas, and with the controller."""

    size = 1
    answer_limit = float("inf")  # seconds in which processes that exist already answer at all

    async def mesh(self) -> HostMesh | ProcMesh:
        """Return the hosts as one mesh, lost ones started again first; or the processes, if they exist already."""
        start_client()
        return this_host()

    @property
    def spans_machines(self) -> bool:
        """Whether the processes are on several machines."""
        return False

    def gpus(self) -> dict[str, list[str]]:
        """Devices that the processes may see, by the address of their machine; the empty string is this machine."""
        return {}

    def variables(self) -> dict[str, str]:
        """Return the environment variables of processes here, in addition to the controller's."""
        return {"TMPDIR": str(sockets_folder())}

    def rendezvous(self) -> str:
        """Return where the ranks of a new process group meet, see `forge.training.distributed.join`."""
        return f"ranks-{uuid4().hex}"

    def controller(self) -> str | None:
        """Return the controller's `client_address`, if the processes need it to end with the controller."""
        return None

    def process(self, pid: int, host: str, ended: Callable[[], None]) -> Watched:
        """Watch one of the processes; `ended` is called when it ends."""
        return Process(pid, ended)

    def when_lost(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost(reason)` once one of the machines, or the worker on it, is lost."""

    def pids(self) -> list[int]:
        """Process ids of the workers that were started on this machine."""
        return []

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
        self._unusable = False
        self._lock = asyncio.Lock()

    async def mesh(self) -> HostMesh:
        """The mesh of all workers, started if needed; lost ones are replaced first."""
        async with self._lock:
            lost = self._unusable or any(
                worker.poll() is not None or is_stopped(worker.pid) for worker in self._workers
            )
            # A worker may be dead, suspended, or alive with a broken connection.
            if self._mesh is None or lost:
                # All workers are replaced, the living ones too: none can be attached to a second time.
                await self.stop()
                folder = sockets_folder()
                addresses = [f"{new_service_proc_id()}@ipc://{folder}/{os.urandom(8).hex()}" for _ in range(self.size)]
                self._workers = [_start(address, self.variables()) for address in addresses]
                name = f"{self.name}_{next(_mesh_numbers)}"
                start_client()
                self._mesh = attach_to_workers(ca="trust_all_connections", workers=addresses, name=name)
            return self._mesh

    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers]

    def give_up(self) -> None:
        """Start all workers again at the next use."""
        self._unusable = True

    async def stop(self) -> None:
        """Kill the workers and wait for their end."""
        workers = self._workers
        self._workers = []
        self._mesh = None
        self._unusable = False
        for worker in workers:
            worker.kill()
        for worker in workers:
            await asyncio.to_thread(worker.wait)


class PooledHosts(Hosts):
    """The machines that the pool has leased to a replica, with a worker on each for this replica alone.

    A worker that was attached to and lost cannot be attached to again: `mesh` starts others then.
    """

    def __init__(self, name: str, allocation: Allocation) -> None:
        self.name = name
        self.allocation = allocation
        self.size = len(allocation.machines)
        self._workers: dict[Machine, str] = {}
        self._mesh: HostMesh | None = None
        self._unusable = False
        self._lock = asyncio.Lock()

    @property
    def spans_machines(self) -> bool:
        """Whether processes are on several machines."""
        return self.size > 1

    async def mesh(self) -> HostMesh:
        """Return the mesh of all workers, started if needed; lost ones are replaced first.

        Raises:
            ReplicaDied: no worker could be started on one of the machines.
        """
        async with self._lock:
            ended = any(worker in machine.ended for machine, worker in self._workers.items())
            if self._mesh is None or self._unusable or ended:
                await self.stop()
                machines = self.allocation.machines
                starts = [machine.request("start", identity=str(new_service_proc_id())) for machine in machines]
                started = await asyncio.gather(*starts, return_exceptions=True)
                # Also of a failed start: `stop` must end the workers that did come up.
                pairs = zip(machines, started, strict=True)
                self._workers = {machine: worker for machine, worker in pairs if isinstance(worker, str)}
                for error in started:
                    if isinstance(error, HostError):
                        self._unusable = True
                        raise ReplicaDied(str(error)) from error
                    if isinstance(error, BaseException):
                        raise error
                workers = [self._workers[machine] for machine in machines]
                name = f"{self.name}_{next(_mesh_numbers)}"
                start_client()
                self._mesh = attach_to_workers(ca="trust_all_connections", workers=workers, name=name)
            return self._mesh

    def gpus(self) -> dict[str, list[str]]:
        """GPUs that are leased, by the address of their machine."""
        return self.allocation.gpus

    def variables(self) -> dict[str, str]:
        """None: the workers on the machines have their own folders."""
        return {}

    def rendezvous(self) -> str:
        """On the first machine's board if there are several machines."""
        return (
            f"{SCHEME}{self.allocation.machines[0].peer_address}/{uuid4().hex}"
            if self.spans_machines
            else super().rendezvous()
        )

    def process(self, pid: int, host: str, ended: Callable[[], None]) -> RemoteProcess:
        """Watch a process on one of the machines; `ended` is called when it ends."""
        machine = next(machine for machine in self.allocation.machines if machine.peer_address == host)
        return RemoteProcess(machine, pid, ended)

    def when_lost(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost(reason)` when one of the machines, or the worker on it, is lost."""
        for machine in self.allocation.machines:

            def report(
                lost: asyncio.Future[str],
                machine: Machine = machine,
            ) -> None:
                on_lost(f"host {machine} was lost: {lost.result()}")

            machine.lost.add_done_callback(report)
        # A start that was sent to a worker that had just ended would wait for Monarch's limit of a minute.
        for machine, worker in self._workers.items():
            machine.when_worker_ends(worker, partial(on_lost, f"its worker on host {machine} ended"))

    def give_up(self) -> None:
        """Start all workers again at the next use."""
        self._unusable = True

    async def stop(self) -> None:
        """Stop the workers on all machines."""
        workers = self._workers
        self._workers = {}
        self._mesh = None
        self._unusable = False
        for machine, worker in workers.items():
            machine.forget_worker(worker)
        stopping = [machine.request("stop", worker=worker) for machine, worker in workers.items()]
        for error in await asyncio.gather(*stopping, return_exceptions=True):
            if isinstance(error, Exception) and not isinstance(error, HostError):  # lost hosts stop their workers
                raise error


def _start(address: str, variables: dict[str, str]) -> subprocess.Popen:
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
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above, whose signal never comes then
        return
    for number in (signal.SIGINT, signal.SIGHUP):  # the controller handles what a terminal sends
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # and a scheduler; children get the default
    serve_forever(address.strip(), Path(os.environ["TMPDIR"]))


def serve_forever(address: str, folder: Path) -> None:
    """Run a Monarch worker at `address`, with its sockets of this machine in a private folder."""
    sockets_in(folder)
    with hidden_announcement():
        run_worker_loop_forever(address=address, ca="trust_all_connections")
