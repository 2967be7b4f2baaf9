"""What real ranks do in test_processes.py: `python ranks.py TASK ROOT RANK WORLD PORT`."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from forge.runtime.store import IncompleteVersion, VersionStore


def build(full: bool, mesh=None) -> torch.nn.Module:
    """Two layers and a norm with uneven sizes; zeros unless `full`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 10), torch.nn.Linear(10, 6, bias=False), torch.nn.LayerNorm(6, elementwise_affine=True)
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter) if full else torch.nn.init.zeros_(parameter)
    if mesh is not None and "tp" in mesh.mesh_dim_names:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    elif mesh is not None:
        fully_shard(model, mesh=mesh)
    return model


def layouts(store: VersionStore) -> None:
    """FSDP over tensor parallelism is put; FSDP, HSDP and FSDP over TP get their own parts."""
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    source = build(True, two)
    for _ in range(3):
        version = store.put("policy", dict(source.named_parameters()))
    assert version == 3
    for mesh in (
        two,
        init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
    ):
        got, expected = build(False, mesh), build(True, mesh)
        store.get("policy", dict(got.named_parameters()))
        for (name, a), b in zip(got.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local()), name


def killed(store: VersionStore) -> None:
    """Rank 1 is killed in the middle of its second put."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = build(True, mesh)
    store.put("policy", dict(model.named_parameters()))
    if dist.get_rank() == 1:
        import forge.runtime.store.transfer as module

        def dies(*_: object) -> str:
            os.kill(os.getpid(), 9)
            return ""

        module.copy_and_hash = dies
    try:
        store.put("policy", dict(model.named_parameters()), timeout=2.0)
    except IncompleteVersion as error:
        print(error, flush=True)
        os._exit(7)


def overwrite(store: VersionStore) -> None:
    """Put 1,000 versions of one number each, or as many as there is time for until killed."""
    for number in range(1, 1001):
        store.put("w", {name: torch.full((20_000,), float(number)) for name in "abc"})


def killed_allocating(store: VersionStore) -> None:
    """Is killed when its segment has a name and no memory yet."""
    os.posix_fallocate = lambda *_: os.kill(os.getpid(), 9)
    store.put("w", torch.zeros(10_000_000))  # larger than any free segment


def slow_put(store: VersionStore) -> None:
    """Puts for ever; is killed from outside."""
    print("putting", flush=True)
    number = 0.0
    while True:
        number += 1
        store.put("w", {name: torch.full((500_000,), number) for name in "abcdefgh"})


if __name__ == "__main__":
    task, root, rank, world, port = sys.argv[1:]
    torch.set_num_threads(1)
    if int(world) > 1:
        place = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=place, rank=int(rank), world_size=int(world))
    globals()[task](VersionStore(root))
    if int(world) > 1:
        dist.barrier()
        time.sleep(0.1)
        dist.destroy_process_group()
