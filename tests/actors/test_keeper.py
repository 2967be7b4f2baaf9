"""The weight store from another host: every byte goes through the keeper's memory windows."""

from __future__ import annotations

import asyncio

import pytest
import torch

from forge.actors.keeper import Keeper, Reach, RemoteStore, connect
from forge.controller import ForgeActor, endpoint, run
from forge.store import MissingVersion

pytestmark = pytest.mark.processes


class Far(ForgeActor):
    """Puts and gets as a trainer or generator on another host does."""

    def __init__(self, store: Reach) -> None:
        self.reach = store

    def setup(self) -> None:
        self.store = connect(self.reach)

    @endpoint
    def kind(self) -> str:
        return type(self.store).__name__

    @endpoint
    def double(self, key: str, version: int) -> int:
        """Read a version and put its double; as plain endpoints do, in a thread."""
        into = {name: torch.zeros_like(tensor) for name, tensor in self.store.get(key, version=version).items()}
        self.store.get(key, into, version)
        return self.store.put(key, {name: 2 * tensor for name, tensor in into.items()}, timeout=30)

    @endpoint
    async def view(self, key: str) -> tuple[int, float]:
        def read() -> tuple[int, float]:
            with self.store.open(key) as snapshot:
                return snapshot.version, sum(float(tensor.sum()) for _, tensor in snapshot.tensors())

        return await asyncio.to_thread(read)

    @endpoint
    def missing(self) -> None:
        self.store.get("policy", version=77)

    @endpoint
    def facts(self) -> tuple:
        store = self.store
        store.adopt("policy", {0: {"before"}})
        known = store.identities("policy")
        return store.versions("policy"), store.keys(), store.exists("x"), store.wait("policy", 3, timeout=1), known[0]


@pytest.mark.full
def test_a_process_of_another_host_puts_and_gets(store):
    weights = {"a": torch.arange(300_000.0), "b": torch.ones(7, 3), "empty": torch.zeros(0, 2)}

    async def main():
        keeper = await Keeper.as_actor(store)
        far = await Far.options(hosts=1).as_actor(Reach(store, keeper, remote=True))
        assert await far.kind.route() == RemoteStore.__name__
        store.put("policy", weights)
        for version in (1, 2):
            assert await far.double.route("policy", version) == version + 1
        got = store.get("policy", version=3)
        assert all(torch.equal(got[name], 4 * tensor) for name, tensor in weights.items())
        assert await far.view.route("policy") == (3, sum(float(tensor.sum()) for tensor in got.values()))
        assert await far.facts.route() == ([2, 3], ["policy"], False, 3, {"before"})
        with pytest.raises(MissingVersion, match=r"policy version 77 is not in the store; it holds \[2, 3\]"):
            await far.missing.route()
        for version in range(4, 8):  # nobody holds on to a version that was read
            store.put("policy", weights, version)
        assert len(list((store.root / "segments").iterdir())) == 2

    run(main())


def test_a_process_on_the_same_host_takes_shared_memory(store):
    async def main():
        keeper = await Keeper.options(share="helpers").as_actor(store)
        near = await Far.options(share="helpers").as_actor(Reach(store, keeper))
        assert await near.kind.route() == "VersionStore"

    run(main())
