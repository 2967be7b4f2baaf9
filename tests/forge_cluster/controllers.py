"""Programs that tests run on a machine, as its controller: `python -m tests.forge_cluster.controllers NAME`.

They print a line of JSON for each event, and do what lines on their standard input ask for.
"""

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from forge.actors.publication import connect_store, share_store
from forge.runtime.controller import ForgeActor, endpoint, run, runtime
from forge.runtime.store import VersionStore
from forge_cluster.machine import Machine
from tests.forge_cluster.place import Place


class Rank(Place):
    """One of several."""

    @endpoint
    def reduce(self) -> tuple[float, str]:
        """The sum over ranks of their numbers from 1, also in a group of its own and by an object."""
        import torch.distributed as dist

        from forge.runtime.process_groups import process_store
        from forge.training.distributed import join_ranks, leave_ranks

        store = process_store(self.context.rendezvous, self.context.world_size, self.context.rank)
        join_ranks(self.context.rank, self.context.world_size, store)
        try:
            values = torch.full((100_000,), float(self.context.rank + 1))
            dist.all_reduce(values)
            dist.all_reduce(values, group=dist.new_group(list(range(self.context.world_size))))
            names = [socket.gethostname()]
            dist.broadcast_object_list(names, src=self.context.world_size - 1)
            assert len(set(values.tolist())) == 1
            return float(values[0]), names[0]
        finally:
            leave_ranks()


class Weights(ForgeActor):
    """Reads and writes versions."""

    def __init__(self, store: Any) -> None:
        self.store_ref = store

    def setup(self) -> None:
        self.store = connect_store(self.store_ref)

    @endpoint
    def put(self, version: int, size: int) -> int:
        values = torch.arange(size, dtype=torch.float32) * version
        return self.store.put("policy", {"a": values, "b": torch.full((3, 3), float(version))}, version)

    @endpoint
    def get(self, version: int) -> tuple[str, float, str]:
        """Where it is, the sum of the values, and the version's identity."""
        with self.store.open("policy", version) as snapshot:
            total = sum(float(values.double().sum()) for _, values in snapshot.tensors())
            return socket.gethostname(), total, snapshot.digest


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def hosts_of() -> list[Machine]:
    """The hosts that are up."""
    machines: Any = runtime().placement.machines
    return machines.pool.machines


async def lines() -> asyncio.StreamReader:
    """Standard input, as it comes."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def serve(handle: Callable[[dict[str, Any]], Any]) -> None:
    """Answer requests until `end`."""
    reader = await lines()
    say("ready")
    while line := await reader.readline():
        request = json.loads(line)
        if request["do"] == "end":
            return
        began = time.monotonic()
        try:
            say("answer", value=await handle(request), seconds=time.monotonic() - began)
        except Exception as error:
            say("answer", error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - began)


async def replicas(count: str, hosts: str) -> None:
    """Replicas of one process each over hosts."""
    service = await Place.options(num_replicas=int(count), hosts=int(hosts)).as_service()

    async def handle(request: dict[str, Any]) -> Any:
        match request["do"]:
            case "where":
                return await service.where.fanout()
            case "pause":
                calls = (service.pause.route(request["seconds"]) for _ in range(request["calls"]))
                return await asyncio.gather(*calls)
            case "time":
                began, cpu = time.perf_counter(), time.process_time()
                for _ in range(request["calls"]):
                    await getattr(service.where, request["verb"])()
                calls = request["calls"]
                return {"seconds": (time.perf_counter() - began) / calls, "cpu": (time.process_time() - cpu) / calls}
            case "states":
                return [replica.state for replica in service.status().replicas]
            case "hosts":
                return [machine.inventory.name for machine in hosts_of()]

    await serve(handle)


async def ranks(procs: str, hosts: str) -> None:
    """One replica over hosts."""
    actor = await Rank.options(procs=int(procs), hosts=int(hosts)).as_actor()

    async def handle(request: dict[str, Any]) -> Any:
        return await getattr(actor, request["do"]).call()

    await serve(handle)


async def weights(writer: str) -> None:
    """A writer on one host, a reader on each, and one on the controller's."""
    store = VersionStore.create()
    shared = await share_store(store)
    count = len(hosts_of())
    placed = Weights.options(mesh_name="writer", host=None if writer == "home" else writer)
    one, all_, here = await asyncio.gather(
        placed.as_actor(shared),
        Weights.options(num_replicas=count, hosts=count, mesh_name="readers").as_service(shared),
        Weights.options(mesh_name="here").as_actor(shared),
    )

    async def handle(request: dict[str, Any]) -> Any:
        match request["do"]:
            case "put":
                return await one.put.call_one(request["version"], request["size"])
            case "metrics":
                return (await runtime().drain_metrics({})).values()
            case "get":
                return await all_.get.fanout(request["version"])
            case "here":
                return await here.get.call_one(request["version"])

    await serve(handle)
    store.close()


if __name__ == "__main__":
    run(globals()[sys.argv[1]](*sys.argv[2:]), wait_for_hosts=float(os.environ.get("WAIT", "60")))
