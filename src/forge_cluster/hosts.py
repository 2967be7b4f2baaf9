"""The machines that the pool has leased to a replica, as hosts that processes are started on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from forge.runtime.controller._monarch import HostMesh, new_service_proc_id
from forge.runtime.controller.errors import ReplicaDied
from forge.runtime.controller.hosts import Hosts, attach_workers
from forge.runtime.process_groups import TCP
from forge_http.addresses import join_address

from .machine import Machine, RemoteProcess
from .pool import Allocation
from .wire import LEASE, HostError, split_address


class PooledHosts(Hosts):
    """The machines that the pool has leased to a replica, with a worker on each for this replica only.

    A worker that was attached to and lost cannot be attached to again: `mesh` starts others then.
    """

    def __init__(self, name: str, allocation: Allocation) -> None:
        self.name = name
        self.allocation = allocation
        self.size = len(allocation.machines)
        self.notice_after = LEASE + 1.0 if self.spans_machines else 1.0
        self._workers: dict[Machine, str] = {}
        self._mesh: HostMesh | None = None
        self._lock = asyncio.Lock()

    @property
    def spans_machines(self) -> bool:
        """Return whether processes are on several machines."""
        return self.size > 1

    async def mesh(self) -> HostMesh:
        """Return the mesh of all workers, started if needed; lost ones are replaced first.

        Raises:
            ReplicaDied: no worker could be started on one of the machines.
        """
        async with self._lock:
            if self._mesh is None or any(worker in machine.ended for machine, worker in self._workers.items()):
                await self.stop()
                machines = self.allocation.machines
                starts = [machine.request("start", identity=str(new_service_proc_id())) for machine in machines]
                started = await asyncio.gather(*starts, return_exceptions=True)

                # Also of a failed start: `stop` must end the workers that did come up.
                pairs = zip(machines, started, strict=True)
                self._workers = {machine: worker for machine, worker in pairs if isinstance(worker, str)}
                for error in started:
                    if isinstance(error, HostError):
                        raise ReplicaDied(str(error)) from error
                    if isinstance(error, BaseException):
                        raise error

                self._mesh = attach_workers(self.name, [self._workers[machine] for machine in machines])

            return self._mesh

    def gpus(self) -> dict[str, list[str]]:
        """Return GPUs that are leased, by the address of their machine."""
        return self.allocation.gpus

    def variables(self) -> dict[str, str]:
        """None: the workers on the machines have their own folders."""
        return {}

    async def rendezvous(self) -> str:
        """Return a port of the first machine, if there are several machines."""
        if not self.spans_machines:
            return await super().rendezvous()
        machine = self.allocation.machines[0]
        host, _ = split_address(machine.peer_address)
        return f"{TCP}{join_address(host, await machine.request('port'))}"

    def process(self, pid: int, host: str, ended: Callable[[], None]) -> RemoteProcess:
        """Watch a process on one of the machines; `ended` is called when it ends."""
        machine = next(machine for machine in self.allocation.machines if machine.peer_address == host)
        return RemoteProcess(machine, pid, ended)

    def when_lost(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost(reason)` when one of the machines, or the worker on it, is lost."""

        def report_loss(machine: Machine, lost: asyncio.Future[str]) -> None:
            on_lost(f"host {machine} was lost: {lost.result()}")

        for machine in self.allocation.machines:
            machine.lost.add_done_callback(partial(report_loss, machine))
        # A start that was sent to a worker that had just ended would wait for Monarch's limit of a minute.
        for machine, worker in self._workers.items():
            machine.when_worker_ends(worker, partial(on_lost, f"its worker on host {machine} ended"))

    def give_up(self) -> None:
        """Start all workers again at the next use."""
        self._mesh = None

    async def stop(self) -> None:
        """Stop the workers on all machines."""
        workers, self._workers, self._mesh = self._workers, {}, None
        for machine, worker in workers.items():
            machine.forget_worker(worker)
        stopping = [machine.request("stop", worker=worker) for machine, worker in workers.items()]
        for error in await asyncio.gather(*stopping, return_exceptions=True):
            if isinstance(error, Exception) and not isinstance(error, HostError):  # lost hosts stop their workers
                raise error
