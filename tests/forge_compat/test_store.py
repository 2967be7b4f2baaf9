"""TorchStore's functions on `forge.store`: every one of them, with real tensors on the real store."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from pathlib import Path

import forge.store as ts
import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

PROGRAMS = Path(__file__).parent / "programs.py"
pytestmark = pytest.mark.processes  # a store has a shell that removes it


@pytest.fixture
def on_store(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Coroutine]], None]:
    """Run a coroutine on a store of its own."""
    monkeypatch.setenv("FORGE_STORE", "")
    monkeypatch.delenv("FORGE_STORE")

    def run(main: Callable[[], Coroutine]) -> None:
        async def between() -> None:
            await ts.initialize()
            root = ts.default_store().root
            try:
                await main()
            finally:
                await ts.shutdown()
            assert not root.exists()

        asyncio.run(between())

    return run


def test_single_values(on_store):
    async def main():
        tensor = torch.randn(10, 10)
        await ts.put("a", tensor)
        assert torch.equal(await ts.get("a"), tensor)
        memory = torch.empty(10, 10)
        assert await ts.get("a", inplace_tensor=memory) is memory
        assert torch.equal(memory, tensor)
        other = torch.empty(10, 10)
        assert await ts.get("a", other) is other
        # Put again: readers get the newest.
        await ts.put("a", tensor + 1)
        assert torch.equal(await ts.get("a"), tensor + 1)
        assert await ts.exists("a")
        assert not await ts.exists("b")
        with pytest.raises(KeyError, match="the store has no 'b'"):
            await ts.get("b")
        await ts.delete("a")
        with pytest.raises(KeyError):
            await ts.delete("a")

    on_store(main)


@pytest.mark.parametrize(
    "value", [{"data": [1, 2, 3]}, "text", 7, None, (1, "a"), {"mixed": [torch.arange(3), {"x": 1.5}], 4: None}, []]
)
def test_objects_come_back_as_they_were(on_store, value):
    def same(a: object, b: object) -> bool:
        if isinstance(a, torch.Tensor):
            return isinstance(b, torch.Tensor) and torch.equal(a, b)
        if isinstance(a, dict):
            return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        if isinstance(a, list | tuple):
            return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
        return a == b

    async def main():
        await ts.put("object", value)
        assert same(await ts.get("object"), value)
        assert same((await ts.get_batch(["object"]))["object"], value)

    on_store(main)


def test_blocks_of_tensors(on_store):
    async def main():
        tensor = torch.arange(60.0).view(6, 10)
        await ts.put("t", tensor)
        block = ts.TensorSlice(offsets=(1, 2), coordinates=(), global_shape=(6, 10), local_shape=(3, 5), mesh_shape=())
        assert torch.equal(await ts.get("t", tensor_slice_spec=block), tensor[1:4, 2:7])
        buffer = torch.empty(3, 5)
        assert await ts.get("t", buffer, block) is buffer  # by position, as TorchStore has it
        assert torch.equal(buffer, tensor[1:4, 2:7])
        with pytest.raises(ValueError, match=r"needs a plain tensor of shape \(3, 5\), got \(5, 3\)"):
            await ts.get("t", torch.empty(5, 3), block)
        outside = ts.TensorSlice(offsets=(5, 0), local_shape=(3, 5))
        with pytest.raises(ValueError, match=r"has shape \(6, 10\): the block .* is not within it"):
            await ts.get("t", tensor_slice_spec=outside)
        await ts.put("state", {"a": tensor})
        with pytest.raises(ValueError, match="state is a state dict: a block can be read of one tensor"):
            await ts.get("state", tensor_slice_spec=block)

    on_store(main)


def test_batches(on_store):
    async def main():
        one, two = torch.randn(4), torch.randn(2, 2)
        await ts.put_batch({"key1": one, "key2": two, "other": {"n": 1}})
        got = await ts.get_batch(["key1", "other"])
        assert torch.equal(got["key1"], one)
        assert got["other"] == {"n": 1}
        memory = torch.empty(4)
        filled = await ts.get_batch({"key1": memory, "key2": None})
        assert filled["key1"] is memory
        assert torch.equal(memory, one)
        assert torch.equal(filled["key2"], two)
        memory.zero_()
        with pytest.raises(KeyError, match="the store has no 'x', 'y'; nothing was read"):
            await ts.get_batch({"key1": memory, "x": None, "y": None})
        assert not memory.any()
        for wrong, error in (([], ValueError), (["key1", "key1"], ValueError), ("key1", TypeError)):
            with pytest.raises(error, match="get_batch"):
                await ts.get_batch(wrong)
        with pytest.raises(ValueError, match="put_batch needs"):
            await ts.put_batch({})
        await ts.put("key1.a/b", one)
        assert await ts.keys("key1") == ["key1", "key1.a/b"]  # whole parts, not key10 or key2
        assert await ts.keys("key1.a") == await ts.keys("key1.") == ["key1.a/b"]
        assert await ts.keys("key") == await ts.keys("") == []
        await ts.delete("key1.a/b")
        assert await ts.keys() == ["key1", "key2", "other"]
        await ts.delete_batch(["key1", "never", "other"])
        await ts.delete_batch(["key1"])
        assert await ts.keys() == ["key2"]

    on_store(main)


def test_state_dicts(on_store):
    async def main():
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 4}
        await ts.put_state_dict(state, "v0")
        fresh = await ts.get_state_dict("v0")
        assert fresh["step"] == 4
        assert fresh["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
        other = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        other.load_state_dict(fresh["model"])
        torch.optim.AdamW(other.parameters()).load_state_dict(fresh["optimizer"])
        assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))

        # Into the tensors of a model that serves.
        await ts.put_state_dict(OrderedDict(model.state_dict()), key="policy")
        served = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        target = served.state_dict()
        assert await ts.get_state_dict("policy", user_state_dict=target, direct_rdma=True) is target
        assert all(map(torch.equal, served.state_dict().values(), model.state_dict().values()))

        part = {"0.weight": torch.zeros(3, 4), "new": torch.ones(2)}
        with pytest.raises(ValueError, match=r"policy: the tensors \['0.bias', .* pass strict=False"):
            await ts.get_state_dict("policy", part)
        assert not part["0.weight"].any()
        merged = await ts.get_state_dict("policy", part, strict=False)
        assert torch.equal(part["0.weight"], model[0].weight)
        assert torch.equal(merged["0.bias"], model[0].bias)

        await ts.put_state_dict(model.state_dict(), "half", transfer_dtype=torch.bfloat16)
        half = await ts.get_state_dict("half")
        assert half["0.weight"].dtype == torch.bfloat16
        assert half["1.num_batches_tracked"].dtype == torch.int64
        assert torch.equal(half["0.weight"], model[0].weight.bfloat16())
        with pytest.raises(KeyError):
            await ts.get_state_dict("absent")
        with pytest.raises(ValueError, match="needs the state dict each time"):
            await ts.put_state_dict(None, "policy", direct_rdma=True)
        with pytest.raises(ValueError, match="needs a user_state_dict"):
            await ts.get_state_dict("policy", direct_rdma=True)
        with pytest.raises(ValueError, match=r"two tensors have the name 'a\.b'"):
            await ts.put_state_dict({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}, "n": 1}, "twice")

    on_store(main)


def test_parts_of_a_state_dict_are_keys(on_store):
    async def main():
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 4, "shapes": [[3], [4]]}
        state |= {"pair": (torch.ones(2), 1), "several": [torch.zeros(1), {"x": 1}], 7: None}
        mine = await ts.client("mine")
        for key, put in (("v0", ts), ("runs/1", ts), ("v0", mine)):
            await put.put_state_dict(state, key)
            # As torch itself names the parts, and TorchStore with it.
            values, mapping = flatten_state_dict(state)
            names = sorted([*values, "MAPPING"])
            assert await put.keys(key) == [key, *(f"{key}/{name}" for name in names)]
            assert await put.get(f"{key}/MAPPING") == mapping
            fetched = await put.get_batch([f"{key}/{name}" for name in values])
            for name, value in values.items():
                got = fetched[f"{key}/{name}"]
                assert torch.equal(got, value) if isinstance(value, torch.Tensor) else str(got) == str(value), name
        assert await ts.keys("v0/model.0") == ["v0/model.0.bias", "v0/model.0.weight"]
        assert await ts.keys() == ["runs/1", "v0"]  # as they were put

        memory = torch.empty(3, 4, dtype=torch.bfloat16)
        assert await ts.get("v0/model.0.weight", inplace_tensor=memory) is memory
        assert torch.equal(memory, model[0].weight.bfloat16())
        block = ts.TensorSlice((1, 0), local_shape=(2, 2), global_shape=(3, 4))
        assert torch.equal(await ts.get("v0/model.0.weight", tensor_slice_spec=block), model[0].weight[1:3, :2])
        with pytest.raises(ValueError, match="v0/step is not a tensor, but 4"):
            await ts.get("v0/step", inplace_tensor=memory)
        with pytest.raises(ValueError, match=r"shape \(3, 4\)"):
            await ts.get("v0/model.0.weight", inplace_tensor=torch.empty(4, 3))
        with pytest.raises(ValueError, match="is a part of the state dict 'v0', which is deleted as a whole"):
            await ts.delete("v0/step")
        assert torch.equal(await ts.get("v0/pair.0"), torch.ones(2))
        for absent in ("v0/model", "v0/none", "v1/step", "v0/step/x", "/v0", "v0/", "v0/__state_dict__"):
            assert not await ts.exists(absent)
            with pytest.raises(KeyError):
                await ts.get(absent)
        # A newer version, and what was put under a part's own name.
        await ts.put_state_dict({"step": 5}, "v0")
        assert await ts.get("v0/step") == 5
        assert await ts.get("v0/step", version=1) == 4
        assert not await ts.exists("v0/model.0.weight")
        await ts.put("v0/step", torch.ones(1))
        assert torch.equal(await ts.get("v0/step"), torch.ones(1))
        assert (await ts.get_state_dict("v0"))["step"] == 5
        await ts.delete_batch(await ts.keys("v0"))
        assert await ts.keys("v0") == []
        # Neither tensors nor objects have parts; a mapping of tensors has, however it was put.
        await ts.put_batch({"tensor": torch.ones(2), "object": {"a": 1}, "weights": {"a": torch.ones(3)}})
        assert not await ts.exists("tensor/a")
        assert await ts.keys("object") == ["object"]
        assert torch.equal(await ts.get("weights/a"), torch.ones(3))

    on_store(main)


def test_stores_by_name_and_clients(on_store):
    async def main():
        await ts.initialize(store_name="mine")
        await ts.put("a", torch.zeros(1))
        await ts.put("a", torch.ones(1), store_name="mine")
        mine = await ts.client("mine")
        await mine.put("b", torch.ones(2))
        ts.reset_client("mine")
        assert await mine.keys() == await ts.keys(store_name="mine") == ["a", "b"]
        assert await mine.keys("b") == ["b"]
        assert await ts.keys() == ["a"]
        assert (await mine.get("a")).item() == 1
        assert (await ts.get("a")).item() == 0
        with pytest.raises(AttributeError, match="a client has no 'putt'; it has put, put_batch"):
            mine.putt  # noqa: B018
        await ts.shutdown("mine")
        assert await ts.keys(store_name="mine") == []
        assert await ts.exists("a")

    on_store(main)


def test_an_object_of_a_local_class_comes_back_elsewhere(on_store):
    class Local:
        number = 3

    async def main():
        await ts.put("local", Local())
        program = "import asyncio, forge.store as ts; print(asyncio.run(ts.get('local')).number)"
        read = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
        )
        assert read.stdout == "3\n", read.stderr

    on_store(main)


def test_a_put_waits_for_no_other_rank(tmp_path: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = run_program(command, "alone")
    absent = "rank 1: 'halves' is partially committed: only the ranks [0] have put their parts"
    assert {absent, "rank 0: 9", "rank 1: 9", "done"} <= {*output.splitlines()}


def test_strategies_are_accepted_and_others_are_not(on_store):
    async def main():
        for strategy in (ts.LocalRankStrategy, ts.HostStrategy, ts.ControllerStorageVolumes):
            await ts.initialize(num_storage_volumes=4, strategy=strategy(), mesh=None)
        with pytest.raises(TypeError, match=r"strategy must be one of forge\.store"):
            await ts.initialize(strategy="LocalRankStrategy")
        await ts.initialize(strategy=ts.HostStrategy(ts.TransportType.Gloo))
        with pytest.raises(TypeError, match="default_transport_type must be a TransportType, got 'gloo'"):
            ts.HostStrategy(default_transport_type="gloo")

    on_store(main)


def test_ranks_need_torchruns_variables(monkeypatch: pytest.MonkeyPatch):
    place = {"LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match="needs the environment variable RANK: start the ranks with torchrun"):
        ts.spmd.SPMDEnv.from_env()
    monkeypatch.setenv("RANK", "3")
    assert ts.spmd.SPMDEnv.from_env() == ts.spmd.SPMDEnv(3, 1, 4, 2, "a", 7)
    assert ts.spmd.SPMDEnv.from_env().group_rank == 1
    with pytest.raises(ValueError, match="must be divisible by local_world_size"):
        ts.spmd.SPMDEnv(0, 0, 3, 2, "a", 7)
    with pytest.raises(RuntimeError, match="shares the memory of one host, and the job has 2"):
        asyncio.run(ts.initialize_spmd())


def run_program(command: list[str], task: str) -> str:
    ended = subprocess.run([*command, str(PROGRAMS), task], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("task", ["neighbours", "weights", pytest.param("resharding", marks=pytest.mark.full)])
def test_programs_of_monarchs_actors(task: str):
    """A tensor of each rank; weights to a process that is older than the store; rows to columns over two ranks."""
    assert run_program([sys.executable], task).endswith("done\n")


@pytest.mark.full
@pytest.mark.parametrize("task", ["spmd", "spmd-group"])
def test_programs_of_torchrun(task: str):
    output = run_program([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], task)
    assert {"rank 0: 123", "rank 1: 123", "done"} <= {*output.splitlines()}


def test_a_read_that_fails_fills_nothing(on_store):
    async def main():
        await ts.put_state_dict({f"l{i}": torch.ones(4) for i in range(6)}, "sd")
        target = {f"l{i}": torch.zeros(4) for i in range(5)} | {"l5": torch.zeros(5)}
        with pytest.raises(ValueError, match="tensor 'l5' has shape"):
            await ts.get_state_dict("sd", target)
        assert not any(tensor.any() for tensor in target.values())
        with pytest.raises(KeyError, match="'zz' is not there"):
            await ts.get("sd", {"l0": target["l0"], "zz": torch.zeros(4)})
        assert not target["l0"].any()
        await ts.put_batch({"a": torch.ones(1), "b": torch.ones(1)})
        memory = torch.zeros(1)
        for wrong in ({"a": memory, "b": torch.zeros(2)}, {"a": memory, "sd/l0": torch.zeros(3)}):
            with pytest.raises(ValueError, match="has shape"):
                await ts.get_batch(wrong)
            assert not memory.any()

    on_store(main)


def test_a_state_dict_comes_back_as_it_was_put_with_the_targets_in_its_places(on_store):
    async def main():
        await ts.put_state_dict({"model": {"w": torch.ones(1), "b": torch.full((1,), 2.0)}, "step": 7}, "sd")
        weight = torch.zeros(1)
        value = await ts.get_state_dict("sd", {"model": {"w": weight}, "extra": 1}, strict=False)
        assert value == {"model": {"w": torch.ones(1), "b": torch.full((1,), 2.0)}, "step": 7}
        assert value["model"]["w"] is weight
        target = {"model": {"w": torch.zeros(1), "b": torch.zeros(1)}, "step": 0}
        assert (await ts.get_state_dict("sd", target))["step"] == 7
        assert target["model"]["b"] == 2.0

    on_store(main)


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"b": torch.ones(1)}, 0: torch.zeros(1)},
        {"layers.0": {"weight": torch.ones(2)}},
        {"flat.name": torch.ones(2), "other": torch.zeros(1)},
        {"list": [torch.ones(1), {"x": torch.zeros(2)}]},
        {"empty": {}, "x": torch.ones(1)},
    ],
)
def test_a_mapping_comes_back_as_it_was_put(value, on_store):
    async def main():
        await ts.put("n", value)
        assert str(await ts.get("n")) == str(value)

    on_store(main)


def test_keys_that_are_none(on_store):
    async def main():
        await ts.put_batch({"p": torch.ones(1), "policy": torch.ones(1)})
        with pytest.raises(TypeError, match="delete_batch takes a list of keys, or a mapping, got the text 'policy'"):
            await ts.delete_batch("policy")
        assert await ts.keys() == ["p", "policy"]
        with pytest.raises(ValueError, match="put_batch needs a mapping"):
            await ts.put_batch([("a", 1)])
        for key, error in ((3, TypeError), ("a\x1fb", ValueError), ("\ud800", ValueError), ("\u6f22" * 40, ValueError)):
            for call in (ts.put(key, torch.ones(1)), ts.get(key), ts.exists(key)):
                with pytest.raises(error, match="key"):
                    await call
        with pytest.raises(ValueError, match="p is one tensor, not a state dict"):
            await ts.get_state_dict("p", {"p": torch.zeros(1)})
        with pytest.raises(TypeError, match=r"must be a torch\.dtype, got 'bfloat16'"):
            await ts.put_state_dict({"x": torch.ones(1)}, "sd", transfer_dtype="bfloat16")
        for name in ("__structure__", "__state_dict__"):
            with pytest.raises(ValueError, match="name"):
                await ts.put("s", {name: torch.ones(1)})

    on_store(main)


def test_blocks_of_another_tensor(on_store):
    async def main():
        await ts.put("t", torch.arange(12.0).view(3, 4))
        right = ts.TensorSlice((1, 0), global_shape=(3, 4), local_shape=(1, 4))
        assert torch.equal(await ts.get("t", tensor_slice_spec=right), torch.arange(4.0, 8.0)[None])
        for wrong in (
            ts.TensorSlice((1, 0), global_shape=(9, 9), local_shape=(1, 4)),
            ts.TensorSlice((1,), local_shape=(1,)),
            ts.TensorSlice((1, 0), local_shape=(1,)),
        ):
            with pytest.raises(ValueError, match="TensorSlice"):
                await ts.get("t", tensor_slice_spec=wrong)

    on_store(main)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8), r"quantised: dequantize\(\) it"),
        (lambda: torch.eye(3).to_sparse(), r"sparse: to_dense\(\) it"),
        (lambda: torch.eye(3).to_sparse_csr(), r"sparse: to_dense\(\) it"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), r"nested: unbind\(\) it"),
        (lambda: torch.ones(2, device="meta"), "meta"),
        (lambda: torch.nn.UninitializedParameter(), "not initialised"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_tensors_without_plain_memory_are_named(tensor, reason, on_store):
    async def main():
        for value, name in ((tensor(), "q"), ({"x": {"y": tensor()}}, "q: x.y")):
            with pytest.raises(TypeError, match=f"^{name} cannot be stored: it is .*{reason}"):
                await ts.put("q", value)
        assert not await ts.exists("q")

    on_store(main)
