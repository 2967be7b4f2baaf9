"""Observers: a process on each host of a user's mesh that says what other processes there do, and ends them.

Monarch says that a process has ended. Of one that is silent it cannot say whether it hangs or gets no core.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import suppress
from typing import Any

from ...observability.console import log_failure
from ..cluster.process import DUMP_TIMEOUT, Activity, activity_of, descends, machine_id, stacks
from ._monarch import Actor, HostMesh, ProcMesh, concurrent_endpoint
from .orphans import client_address, end_with

log = logging.getLogger(__name__)

START_TIMEOUT = 60.0  # seconds; until then its host's processes are not judged
ANSWER_TIMEOUT = 10.0  # seconds; an observer of a host that is as busy as its processes says nothing
STOP_TIMEOUT = 5.0  # seconds; the hosts may be gone


class HostObserver(Actor):
    """Reads /proc of its host.

    Args:
        controller: its `client_address`, if it is on the network.
    """

    def __init__(self, controller: str | None) -> None:
        if controller is not None:
            end_with(controller)

    @concurrent_endpoint
    async def machine(self) -> str:
        """Return the host's `machine_id`."""
        return machine_id()

    @concurrent_endpoint
    async def activity(self, pid: int) -> tuple[float, bool]:
        """Return a process's `Activity`."""
        seconds, wants_cpu = activity_of(pid)
        return seconds, wants_cpu

    @concurrent_endpoint
    async def stacks(self, pid: int) -> str:
        """Return a process's stacks."""
        return await stacks(pid)

    @concurrent_endpoint
    async def kill(self, pid: int) -> None:
        """Send SIGKILL to a process that the host has started."""
        if descends(pid, os.getppid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Observers:
    """The observers of a mesh's hosts. They start with the first process that is watched, and end with `stop`."""

    def __init__(self, mesh: HostMesh | ProcMesh) -> None:
        self._mesh = mesh
        self._procs: list[ProcMesh] = []
        self._starting: asyncio.Task[None] | None = None
        self._by_machine: dict[str, Any] = {}
        self._sent: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Start them, if they are not started yet."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(log_failure)

    async def activity(self, machine: str, pid: int) -> Activity | None:
        """Return what a process on a machine does; None if its observer gives no answer."""
        values = await self._ask(machine, "activity", pid)
        return None if values is None else Activity(*values)

    async def stacks(self, machine: str, pid: int) -> str | None:
        """Return the Python stacks of a process on a machine; None if its observer gives no answer."""
        answer: str | None = await self._ask(machine, "stacks", pid, ANSWER_TIMEOUT + DUMP_TIMEOUT)
        return answer

    def kill(self, machine: str, pid: int) -> None:
        """Have a process on a machine killed, if its observer answers."""
        task = asyncio.create_task(self._ask(machine, "kill", pid))
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)

    async def stop(self) -> None:
        """End the observers."""
        if self._starting is not None:
            self._starting.cancel()
        await asyncio.gather(*self._sent)
        self._by_machine.clear()
        stops = (_answer(procs.stop(), STOP_TIMEOUT) for procs in self._procs)
        for error in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(error, Exception):
                log.debug("an observer could not be stopped: %s", error)

    async def _start(self) -> None:
        # A ProcMesh each: one of all hosts would be of no use once one of them is lost.
        self._procs = [host.spawn_procs({"procs": 1}, name="observer") for host in _hosts_of(self._mesh)]
        await asyncio.gather(
            *(self._register(procs.spawn("observer", HostObserver, client_address())) for procs in self._procs)
        )

    async def _register(self, observer: Any) -> None:
        try:
            machine = await _answer(observer.machine.call_one(), START_TIMEOUT)
        except Exception as error:
            log.warning("a host has no observer, so that its processes are judged by their answers alone: %s", error)
            return
        self._by_machine[machine] = observer

    async def _ask(self, machine: str, name: str, pid: int, timeout: float = ANSWER_TIMEOUT) -> Any:
        if self._starting is not None:
            await asyncio.wait([self._starting])
        observer = self._by_machine.get(machine)
        if observer is None:
            return None
        try:
            return await _answer(getattr(observer, name).call_one(pid), timeout)
        except Exception as error:
            log.debug("the observer on %s gave no answer: %s", machine.partition(" ")[0], error)
            return None


def _hosts_of(mesh: HostMesh | ProcMesh) -> list[HostMesh]:
    """Return the hosts of a mesh, one by one."""
    flat = mesh.flatten("part")
    parts = [flat.slice(part=number) for number in range(mesh.size())]
    hosts: list[HostMesh] = []
    for part in parts:
        host = part.host_mesh if isinstance(part, ProcMesh) else part
        # Processes share hosts.
        if host not in hosts:
            hosts.append(host)
    return hosts


async def _answer(future: Any, timeout: float) -> Any:
    return await asyncio.wait_for(future.as_asyncio(), timeout)
