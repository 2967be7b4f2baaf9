"""Programs in the form of TorchStore's examples, with its import changed: `python programs.py TASK`."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile

import forge.store as ts
import torch
import torch.distributed as dist
from monarch.actor import Actor, ProcMesh, current_rank, endpoint, shutdown_context, this_host
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

RANKS = 2


class Neighbour(Actor):
    """Puts a tensor of its own, and gets that of the next rank."""

    def __init__(self) -> None:
        self.rank = current_rank().rank

    @endpoint
    async def store_tensor(self) -> None:
        await ts.put(f"{self.rank}_tensor", torch.tensor([self.rank]))

    @endpoint
    async def fetch(self) -> int:
        return int(await ts.get(f"{(self.rank + 1) % RANKS}_tensor"))


class Layer(Actor):
    """A linear layer in a process."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 4, bias=False)

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


class Learner(Layer):
    """Publishes the weights of its layer."""

    @endpoint
    async def step(self) -> torch.Tensor:
        with torch.no_grad():
            self.model.weight += 1
        await ts.put_state_dict(self.model.state_dict(), key="toy_app")
        return self.model.weight.detach()


class Server(Layer):
    """Loads the weights that were published."""

    @endpoint
    async def update_weights(self) -> torch.Tensor:
        await ts.get_state_dict(key="toy_app", user_state_dict=self.model.state_dict())
        return self.model.weight.detach()


class Sharded(Actor):
    """One rank of a mesh that shards a tensor in some way."""

    def __init__(self, file: str, placements: list) -> None:
        self.rank = current_rank().rank
        self.file = file
        self.placements = placements

    def shards(self, tensor: torch.Tensor):
        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=self.rank, world_size=RANKS, init_method=f"file://{self.file}")
        return distribute_tensor(tensor, init_device_mesh("cpu", (RANKS,)), placements=self.placements)

    @endpoint
    async def do_put(self, tensor: torch.Tensor) -> None:
        shards = self.shards(tensor)
        await ts.put("test_key", shards)
        await ts.put_state_dict({"layer": {"weight": shards, "step": 3}, "plain": tensor[0].clone()}, "state")

    @endpoint
    async def do_get(self, tensor: torch.Tensor) -> bool:
        shards = self.shards(torch.zeros_like(tensor))
        fetched = await ts.get("test_key", shards)
        is_equal = torch.equal(fetched.to_local(), self.shards(tensor).to_local())
        state = {"layer": {"weight": self.shards(torch.zeros_like(tensor)), "step": 0}, "plain": torch.zeros(6)}
        await ts.get_state_dict("state", user_state_dict=state)
        return is_equal and torch.equal(state["layer"]["weight"].to_local(), self.shards(tensor).to_local())


started: list[ProcMesh] = []


def processes(name: str, actor: type[Actor], *args: object, count: int = RANKS):
    """Spawn an actor in processes of its own."""
    started.append(this_host().spawn_procs(per_host={"procs": count}))
    return started[-1].spawn(name, actor, *args)


def end_monarch() -> None:
    """End all processes, then Monarch's client: it exits with 1, and says so in its log alone, if it hears of a process
    that ends after its host."""
    for procs in started:
        procs.stop().get(timeout=120.0)
    shutdown_context().get(timeout=120.0)


def values(mesh: object) -> list:
    """What the ranks of a mesh returned."""
    return [value for _, value in mesh.items()]  # type: ignore[attr-defined]


def say(line: str) -> None:
    """Print a line in one piece: several ranks write into the same pipe."""
    os.write(1, f"{line}\n".encode())


async def neighbours() -> None:
    """A tensor of each rank, read by the other."""
    await ts.initialize()
    actors = processes("neighbour", Neighbour)
    await actors.store_tensor.call()
    assert values(await actors.fetch.call()) == [1, 0]
    await ts.shutdown()


async def weights() -> None:
    """A learner and a generator, whose processes are older than the store."""
    learner = processes("learner", Learner, count=1)
    server = processes("server", Server, count=1)
    # Both processes run before there is a store.
    assert await learner.pid.call_one() != await server.pid.call_one()
    await ts.initialize(num_storage_volumes=2, strategy=ts.LocalRankStrategy())
    for _ in range(2):
        expected = await learner.step.call_one()
        assert torch.equal(await server.update_weights.call_one(), expected)
    await ts.shutdown()


async def resharding() -> None:
    """Rows are put by two ranks; columns, and all, are read by two others."""
    tensor = torch.arange(24.0).view(4, 6)
    with tempfile.TemporaryDirectory() as folder:
        await ts.initialize(num_storage_volumes=RANKS, strategy=ts.LocalRankStrategy())
        putters = processes("put", Sharded, f"{folder}/put", [Shard(0)])
        await putters.do_put.call(tensor)
        for name, placements in (("columns", [Shard(1)]), ("replicas", [Replicate()])):
            getters = processes(name, Sharded, f"{folder}/{name}", placements)
            assert values(await getters.do_get.call(tensor)) == [True, True]
        assert torch.equal(await ts.get("test_key"), tensor)
        block = ts.TensorSlice(offsets=(1, 2), global_shape=(4, 6), local_shape=(2, 3))
        assert torch.equal(await ts.get("test_key", tensor_slice_spec=block), tensor[1:3, 2:5])
        state = await ts.get_state_dict("state")
        assert state["layer"]["step"] == 3
        assert torch.equal(state["layer"]["weight"], tensor)
        await ts.shutdown()


async def spmd(has_group: bool) -> None:
    """Ranks of torchrun, with a process group or without."""
    rank = int(os.environ["RANK"])
    if has_group:
        dist.init_process_group("gloo")
    await ts.initialize_spmd(strategy=ts.HostStrategy())
    if not has_group:
        dist.init_process_group("gloo")
    if rank == 0:
        await ts.put("demo", torch.tensor([123]))
    dist.barrier()
    say(f"rank {rank}: {int(await ts.get('demo'))}")
    dist.barrier()
    await ts.shutdown()
    dist.destroy_process_group()


async def alone() -> None:
    """Each of two ranks puts its half of a tensor on its own, and rank 1 one that it has all of."""
    dist.init_process_group("gloo")
    await ts.initialize_spmd()
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (RANKS,))
    halves = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    if rank == 0:
        assert await ts.put("halves", halves) is None
    dist.barrier()
    if rank == 1:
        assert not await ts.exists("halves")
        try:
            await ts.get("halves")
        except KeyError as error:
            say(f"rank 1: {error}")
        assert await ts.put("halves", halves) == 1
        await ts.put("expert", DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False))
    dist.barrier()
    say(f"rank {rank}: {float((await ts.get('halves')).sum() + (await ts.get('expert')).sum()):g}")
    dist.barrier()
    await ts.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    task = sys.argv[1]
    torch.set_num_threads(1)
    if task.startswith("spmd"):
        asyncio.run(spmd(task == "spmd-group"))
    elif task == "alone":
        asyncio.run(alone())
    else:
        asyncio.run({"neighbours": neighbours, "weights": weights, "resharding": resharding}[task]())
        end_monarch()
    say("done")
