"""TorchStore's functions on `forge.store`, with real tensors on the real store."""

import asyncio

import forge.store as ts
import pytest
import torch

from forge.runtime.controller import ForgeActor, endpoint
from forge.runtime.store import CorruptWeights, MissingVersion  # noqa: F401  (as users import them)

pytestmark = pytest.mark.processes


def stored(work):
    """Run a program with a store of its own."""

    async def main():
        await ts.initialize()
        try:
            return await work()
        finally:
            await ts.shutdown()

    return asyncio.run(main())


def test_torchforge_store_puts_and_gets_tensors_and_plain_values():
    async def work():
        await ts.put("a", torch.arange(4))
        await ts.put("b", {"step": 3, "rows": [torch.ones(2), "x"]})
        assert (await ts.get("a")).tolist() == [0, 1, 2, 3]
        value = await ts.get("b")
        assert (value["step"], value["rows"][0].tolist(), value["rows"][1]) == (3, [1.0, 1.0], "x")
        assert await ts.keys() == ["a", "b"]
        assert await ts.exists("a")
        await ts.delete("a")
        assert not await ts.exists("a")
        with pytest.raises(KeyError, match="the store has no 'a'; it holds"):
            await ts.get("a")

    stored(work)


def test_torchforge_store_get_batch_reads_all_keys_or_raises():
    async def work():
        await ts.put_batch({"x": torch.ones(2), "y": {"n": 1}})
        target = torch.zeros(2)
        batch = await ts.get_batch({"x": target, "y": None})
        assert batch["x"] is target
        assert target.tolist() == [1.0, 1.0]
        assert batch["y"] == {"n": 1}
        with pytest.raises(KeyError, match="'z'; nothing was read"):
            await ts.get_batch(["x", "z"])
        await ts.delete_batch(["x", "y", "z"])
        assert await ts.keys() == []

    stored(work)


def test_torchforge_store_casts_and_fills_state_dicts_in_place():
    async def work():
        model, serving = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        state = {"model": model.state_dict(), "step": 7}
        await ts.put_state_dict(state, "v0", transfer_dtype=torch.bfloat16)
        filled = await ts.get_state_dict("v0", {"model": serving.state_dict(), "step": 0})
        assert filled["step"] == 7
        assert torch.equal(serving.weight, model.weight.bfloat16().float())
        assert (await ts.get_state_dict("v0"))["model"]["bias"].dtype == torch.bfloat16
        with pytest.raises(ValueError, match="are in only one of the two state dicts: pass strict=False"):
            await ts.get_state_dict("v0", {"model": {"weight": torch.zeros(8, 8)}})
        part = torch.zeros(8, 8)
        await ts.get_state_dict("v0", {"model": {"weight": part}}, strict=False)
        assert torch.equal(part, serving.weight)

    stored(work)


class Reader(ForgeActor):
    """Reads and writes the store of its run."""

    @endpoint
    async def swap(self, key: str) -> list[float]:
        value = await ts.get(key)
        await ts.put(key, value + 1)
        return value.tolist()


@pytest.mark.full
async def test_actor_process_uses_weight_store_of_controller():
    await ts.initialize()
    reader = await Reader.as_actor()
    await ts.put("w", torch.zeros(2))
    assert await reader.swap.call_one("w") == [0.0, 0.0]
    assert (await ts.get("w")).tolist() == [1.0, 1.0]
    await ts.shutdown()
