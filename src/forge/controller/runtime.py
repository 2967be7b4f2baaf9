"""The controller's side of a run: what was started, what failed, and how everything ends.

`run(main())` owns the event loop. However `main` ends (return, exception, Ctrl-C, SIGTERM, death of a component),
every service is stopped and every process is gone before `run` returns.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from ..observability.metrics import Snapshot, drain
from . import processes
from ._monarch import set_fault_hook
from .context import ActorContext
from .errors import ForgeError, ReplicaDied
from .options import Options
from .replica import Replica, stop_mesh
from .service import Service

if TYPE_CHECKING:
    from .actor import ForgeActor

T = TypeVar("T")

# How long `main` may take over its own clean-up after it was told to stop.
STOP_PATIENCE = 5.0


class Runtime:
    """Everything that one controller has started."""

    def __init__(self) -> None:
        self._replicas: list[Replica] = []
        self._shared: dict[str, processes.ProcessGroup] = {}
        self._gpus: list[str] | None = None
        self._names: dict[str, int] = {}
        self.failure: asyncio.Future[ReplicaDied] = asyncio.get_running_loop().create_future()

    async def start(self, cls: type[ForgeActor], options: Options, args: tuple, kwargs: dict[str, Any]) -> Service:
        """Start `options.num_replicas` replicas of a component and wait until they serve."""
        name = self._name(cls)
        gpus: list[str] = []
        if options.with_gpus:
            if self._gpus is None:
                self._gpus = processes.visible_gpus()
            gpus = processes.take_gpus(self._gpus, options.procs * options.num_replicas, name)
        replicas = []
        for index in range(options.num_replicas):
            mine = gpus[index * options.procs : (index + 1) * options.procs]
            replicas.append(self._spawn(ActorContext(name, index, 0, options.procs), options, mine))
        self._replicas += replicas
        await asyncio.gather(*(replica.start((cls, args, kwargs)) for replica in replicas))
        for replica in replicas:
            replica.failed.add_done_callback(self._on_failure)
        return Service(name, cls.endpoints(), replicas)

    def _spawn(self, context: ActorContext, options: Options, gpus: list[str]) -> Replica:
        mesh_name = f"{context.component}{context.replica}"
        if options.share is None:
            mesh = processes.spawn(mesh_name, options.procs, threads=options.threads, env=options.env, gpus=gpus)
            return Replica(context, options, processes.ProcessGroup(mesh, shared=False))
        if options.share not in self._shared:
            mesh = processes.spawn(options.share, 1, threads=options.threads, env=options.env)
            self._shared[options.share] = processes.ProcessGroup(mesh, shared=True)
        return Replica(context, options, self._shared[options.share])

    def _name(self, cls: type[ForgeActor]) -> str:
        """`ReplayBuffer` -> `replay_buffer`, numbered from the second on."""
        base = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        self._names[base] = self._names.get(base, 0) + 1
        return base if self._names[base] == 1 else f"{base}{self._names[base]}"

    def _on_failure(self, failed: asyncio.Future[ReplicaDied]) -> None:
        if not self.failure.done():
            self.failure.set_result(failed.result())

    async def drain_metrics(self) -> Snapshot:
        """Everything recorded since the last call, in every process, merged."""
        merged = drain()
        seen: set[int] = set()
        replicas = []
        for replica in self._replicas:
            if not replica.stopped and not seen.intersection(replica.pids):
                seen.update(replica.pids)
                replicas.append(replica)
        for snapshots in await asyncio.gather(*(replica.drain_metrics() for replica in replicas)):
            for snapshot in snapshots:
                merged.merge(snapshot)
        return merged

    async def shutdown(self) -> None:
        """Stop every component; returns when their processes are gone."""
        pids = [pid for replica in self._replicas if not replica.stopped for pid in replica.pids]
        await asyncio.gather(*(replica.stop() for replica in self._replicas), return_exceptions=True)
        await asyncio.gather(*(stop_mesh(group.mesh, name, []) for name, group in self._shared.items()))
        for pid in pids:
            processes.kill(pid)


_runtime: Runtime | None = None


def runtime() -> Runtime:
    """The runtime of this controller; made on first use inside a running event loop."""
    global _runtime
    if _runtime is None:
        set_fault_hook(lambda failure: None)  # the replica's own watch sees it and names it
        _runtime = Runtime()
    return _runtime


async def shutdown() -> None:
    """Stop everything that this controller started. A new runtime may be made afterwards."""
    global _runtime
    if _runtime is not None:
        stopping, _runtime = _runtime, None
        await stopping.shutdown()


async def drain_metrics() -> Snapshot:
    """Everything recorded in any process since the last call, merged."""
    return await runtime().drain_metrics()


async def first_to_end(*loops: Coroutine[Any, Any, Any]) -> None:
    """Run loops side by side until one ends, then cancel the others. An exception in any of them ends all, and is
    raised as itself."""
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        try:
            task.result()
        except BaseExceptionGroup as group:
            # A task group wraps even a single failure; the first one is the cause of the rest.
            raise group.exceptions[0] from None


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a recipe to its end and leave no process behind.

    Raises:
        what `main` raised; ReplicaDied when a component died; SystemExit(130 or 143) after SIGINT or SIGTERM.
    """
    return asyncio.run(_run(main))


async def _run(main: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    interrupted: asyncio.Future[signal.Signals] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        if interrupted.done():
            os._exit(128 + number)  # asked twice: the children end with this process
        print(f"\n{number.name}: stopping (once more to stop at once)", file=sys.stderr)
        interrupted.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    task = loop.create_task(main)
    try:
        waits: set[asyncio.Future[Any]] = {task, interrupted, runtime().failure}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        died = runtime().failure
        if task.done() and not isinstance(task.exception(), ForgeError):
            return task.result()
        task.cancel()
        await asyncio.wait({task}, timeout=STOP_PATIENCE)
        if died.done():
            # The component that died first is the cause; what its callers saw follows from it.
            raise died.result()
        if interrupted.done():
            raise SystemExit(128 + interrupted.result())
        return task.result()
    finally:
        await shutdown()
