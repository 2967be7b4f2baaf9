"""What processes of a run do with TorchStore's package: `python package_program.py TASK`."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from forge.runtime.controller import ForgeActor, endpoint, run
from forge.runtime.controller.hosts import start_client
from forge.runtime.controller.runtime import runtime
from forge.runtime.store import CorruptWeights, IncompleteVersion, MissingVersion, Store, VersionConflict, VersionStore
from forge.runtime.store.torchstore import TorchStore, package
from tests.runtime.store.ranks import build

RANKS = 4
# Mesh shapes and dimensions of the layouts that are put, and that are read.
LAYOUTS = {
    "fsdp": ((4,), ("dp",)),
    "fsdp over tp": ((2, 2), ("dp", "tp")),
    "hsdp": ((2, 2), ("replicate", "shard")),
}


def local_part(shards: Any) -> torch.Tensor:
    """This rank's part of a DTensor."""
    return shards.to_local()


class Rank(ForgeActor):
    """A rank of a trainer, or of those that read its weights."""

    def __init__(self, stores: dict[str, Store], file: str) -> None:
        self.stores = stores
        self.file = file

    @endpoint
    def put_layout(self, layout: str, version: int) -> str:
        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=self.context.rank, world_size=RANKS, init_method=f"file://{self.file}")
        model = build(True, init_device_mesh("cpu", LAYOUTS[layout][0], mesh_dim_names=LAYOUTS[layout][1]))
        for store in self.stores.values():
            assert store.put("policy", dict(model.named_parameters()), version) == version
        ours, package_store = (store.manifest("policy", version).digest for store in self.stores.values())
        assert ours == package_store
        return ours

    @endpoint
    def get_layout(self, layout: str) -> None:
        mesh = init_device_mesh("cpu", LAYOUTS[layout][0], mesh_dim_names=LAYOUTS[layout][1])
        expected = build(True, mesh)
        for store in self.stores.values():
            read = build(False, mesh)
            store.get("policy", dict(read.named_parameters()))
            for (name, values), others in zip(read.named_parameters(), expected.parameters(), strict=True):
                assert torch.equal(local_part(values), local_part(others)), (layout, name)

    @endpoint
    def lack_a_rank(self) -> str:
        """All ranks but the last put."""
        if self.context.rank == RANKS - 1:
            return ""
        model = build(True, init_device_mesh("cpu", *LAYOUTS["fsdp"][:1], mesh_dim_names=("dp",)))
        try:
            self.stores["package"].put("policy", dict(model.named_parameters()), 9, timeout=1.0)
        except IncompleteVersion as error:
            return str(error)
        return "published"


class Single(ForgeActor):
    """A process that publishes plain tensors."""

    def __init__(self, store: TorchStore) -> None:
        self.store = store

    @endpoint
    def publish(self, version: int | None, scale: float = 1.0) -> int:
        weights = {"w": scale * torch.arange(6.0).view(2, 3), "b": {"c": torch.ones(2, dtype=torch.bfloat16)}}
        return self.store.put("policy", {**weights, "empty": torch.ones(0, 3)}, version)

    @endpoint
    def conflict(self, version: int, scale: float) -> str:
        try:
            return str(self.publish_now(version, scale))
        except VersionConflict as error:
            return str(error)

    def publish_now(self, version: int, scale: float) -> int:
        return self.store.put("policy", {"w": scale * torch.arange(6.0).view(2, 3)}, version)

    @endpoint
    def read(self, version: int | None = None) -> dict[str, torch.Tensor]:
        return self.store.get("policy", version=version)


async def resharding() -> None:
    """Each layout to each other; the same digests and values as in this library's store."""
    async with TorchStore() as store:
        plain = VersionStore.create()
        with tempfile.NamedTemporaryFile() as file:
            ranks = await Rank.options(procs=RANKS).as_actor({"plain": plain, "package": store}, file.name + ".group")
            for version, layout in enumerate(LAYOUTS, start=1):
                assert len({*await ranks.put_layout.call(layout, version)}) == 1
                for target in LAYOUTS:
                    await ranks.get_layout.call(target)
            assert await asyncio.to_thread(store.versions, "policy") == [2, 3]
            errors = await ranks.lack_a_rank.call()
            assert all("should put" in error and f"[{RANKS - 1}]" in error for error in errors[:-1]), errors
            assert await asyncio.to_thread(store.versions, "policy") == [2, 3]
        plain.close()


async def versions() -> None:
    """Versions are whole, ordered, dropped and read by the package's own functions."""
    async with TorchStore() as store:
        writer, reader = await Single.as_actor(store), await Single.as_actor(store)
        assert await writer.publish.call_one(1) == 1
        assert await writer.publish.call_one(1) == 1  # equal values again
        assert "was published before" in await writer.conflict.call_one(1, 2.0)
        read = await reader.read.call_one()
        assert torch.equal(read["w"], torch.arange(6.0).view(2, 3))
        assert read["b.c"].dtype == torch.bfloat16
        assert read["empty"].shape == (0, 3)
        state = await package().get_state_dict("policy/v1", store_name=store.name)
        assert torch.equal(state["w"], read["w"])
        assert await writer.publish.call_one(None, 2.0) == 2
        assert await writer.publish.call_one(4, 3.0) == 4
        assert "is older than the newest, 4" in await writer.conflict.call_one(3, 1.0)
        assert await asyncio.to_thread(store.versions, "policy") == [2, 4]
        assert torch.equal((await reader.read.call_one(2))["w"], 2 * torch.arange(6.0).view(2, 3))
        with pytest.raises(MissingVersion, match=r"policy version 1 is not in the store: it holds \[2, 4\]"):
            await reader.read.call_one(1)
        identities = await asyncio.to_thread(store.identities, "policy")
        assert sorted(identities) == [1, 2, 4]
        assert (await asyncio.to_thread(store.manifest, "policy", 1)).digest in identities[1]
        names = await package().keys(store_name=store.name)
        assert not [name for name in names if name.startswith("policy/v1/")]
        # A version of which a tensor was changed behind its back is not read.
        await package().put("policy/v4/w", torch.zeros(2, 3), store_name=store.name)
        with pytest.raises(CorruptWeights, match="does not have the checksum"):
            await reader.read.call_one()
        await asyncio.to_thread(store.delete, "policy")
        assert await asyncio.to_thread(store.keys) == []
        assert await package().keys(store_name=store.name) == []


async def main(task: str) -> None:
    runtime()
    start_client()
    await globals()[task]()
    print("done", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run(main(sys.argv[1]))
