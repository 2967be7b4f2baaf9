"""The weight store within one process: what is put is what is got, whole or not at all, and nothing stays behind."""

import asyncio
import os
import pickle
from collections.abc import Iterator
from threading import Thread

import pytest
import torch

from forge.runtime.store import CorruptWeights, MissingVersion, VersionConflict, VersionStore
from forge.runtime.store.manifest import Manifest, Shard
from forge.system.boxes import Box
from forge_compat import store as ts

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.fixture
def store(processes: None) -> Iterator[VersionStore]:
    store = VersionStore.create(keep=2)
    yield store
    store.close()


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    known = {str(dtype): (10 * torch.randn(3, 5)).to(dtype) for dtype in DTYPES}
    strange = {"transposed": torch.randn(4, 3).T, "scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3)}
    return known | strange | {"parameter": torch.nn.Parameter(torch.randn(2))}


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor.detach()), name


def used(store: VersionStore) -> int:
    return sum(path.stat().st_size for path in store.root.rglob("*") if path.parent.name in ("segments", "free"))


def test_store_get_returns_tensors_equal_to_put(store: VersionStore):
    put = tensors()
    assert store.put("policy", put, 3) == 3
    assert_equal(store.get("policy", version=3), put)
    assert_equal(pickle.loads(pickle.dumps(store)).get("policy"), put)
    into = {name: torch.zeros_like(tensor) for name, tensor in put.items() if name != "scalar"}
    assert store.get("policy", into) is into
    assert_equal(into, {name: put[name] for name in into})


def test_nested_state_dicts_are_stored_under_dotted_names(store: VersionStore):
    nested = {"layer": {"weight": torch.ones(2), "bias": torch.zeros(2)}, "scale": torch.tensor(3.0)}
    store.put("model", nested)
    assert set(store.get("model")) == {"layer.weight", "layer.bias", "scale"}
    assert store.get("model", {"layer": {"weight": torch.empty(2)}})["layer"]["weight"].eq(1).all()
    with pytest.raises(KeyError, match=r"tensor 'layer.weigth' is not in the version, which has 3 tensors"):
        store.get("model", {"layer": {"weigth": torch.empty(2)}})
    with pytest.raises(TypeError, match=r"'layer\.step' is a int"):
        store.put("model", {"layer": {"step": 3}})
    with pytest.raises(ValueError, match="at least one tensor"):
        store.put("model", {})


def test_republishing_store_version_with_other_values_raises(store: VersionStore):
    store.put("w", {"a": torch.zeros(4), "b": torch.zeros(4)}, 5)
    assert store.put("w", {"a": torch.zeros(4), "b": torch.zeros(4)}, 5) == 5
    with pytest.raises(
        VersionConflict, match="w version 5 was already published with other values: tensor 'b' was different"
    ):
        store.put("w", {"a": torch.zeros(4), "b": torch.ones(4)}, 5)
    with pytest.raises(VersionConflict, match="version 4 is older than the newest, 5"):
        store.put("w", {"a": torch.zeros(4)}, 4)
    assert (store.versions("w"), store.put("w", {"a": torch.zeros(4)})) == ([5], 6)


def test_store_keeps_newest_versions_and_versions_being_read(store: VersionStore):
    store.put("policy", tensors(9), 9)
    with store.open("policy", 9) as held:
        views = dict(held.tensors())
        for version in (10, 11, 12, 13, 14):
            store.put("policy", tensors(version), version)
        assert store.versions("policy") == [13, 14]
        assert_equal(views, tensors(9))
    assert_equal(store.get("policy", version=13), tensors(13))
    with pytest.raises(MissingVersion, match=r"policy version 9 is not in the store; it holds \[13, 14\]"):
        store.get("policy", version=9)


def test_store_reuses_memory_of_old_versions(store: VersionStore):
    weights = torch.randn(1 << 18)
    sizes = []
    for _ in range(30):
        weights += 1
        store.put("w", weights)
        sizes.append(used(store))
    assert sizes[0] < max(sizes[3:]) == min(sizes[3:]) <= 4 * (1 << 20) + 4096
    files = {path.name for path in store.root.rglob("*") if path.parent.name in ("segments", "free")}
    store.put("w", weights)
    assert {path.name for path in store.root.rglob("*") if path.parent.name in ("segments", "free")} == files
    for _ in range(3):
        store.put("small", torch.ones(8))
        store.put("w", torch.ones(8))
    assert used(store) < 1 << 20, "what is not needed any more is given back"


def test_store_read_retries_after_version_deletion(store: VersionStore, monkeypatch: pytest.MonkeyPatch):
    store.put("w", torch.zeros(100))
    reading, overtaken = store.segments.reading, []

    def late(names):
        if not overtaken:
            overtaken.append(1)
            store.delete("w")
            store.put("w", torch.ones(100))
        return reading(names)

    monkeypatch.setattr(store.segments, "reading", late)
    assert store.get("w").eq(1).all()


def test_store_digest_depends_on_shard_layout_of_equal_values():
    def manifest(*boxes: Box) -> Manifest:
        return Manifest("k", 3, False, tuple(Shard("w", "float32", (4,), box, "s", 0, str(box)) for box in boxes))

    one, two = manifest(Box((0,), (4,))), manifest(Box((0,), (2,)), Box((2,), (2,)))
    assert one.digest != two.digest
    assert one.first_difference(two) is None


def test_store_wait_returns_new_version_or_times_out(store: VersionStore):
    with pytest.raises(TimeoutError, match=r"waited 0.05 s for w version 2; the store has none"):
        store.wait("w", 2, timeout=0.05)
    later = Thread(target=lambda: [store.put("w", torch.full((3,), float(n))) for n in range(1, 4)])
    later.start()
    assert store.wait("w", 3, timeout=20) == 3
    assert store.get("w", version=3, timeout=1).tolist() == [3, 3, 3]
    later.join()


def test_flipped_bytes_in_store_raise_corrupt_weights(store: VersionStore):
    put = {"a": torch.randn(1000), "b": torch.randn(1000)}
    store.put("policy", put)
    shard = store.manifest("policy", 1).by_name["b"][0]
    with (store.root / "segments" / shard.segment).open("r+b") as file:
        file.seek(shard.start + 2000)
        file.write(b"\xff\x00\xff")
    with pytest.raises(CorruptWeights, match="policy version 1: tensor 'b' does not have the checksum"):
        store.get("policy")
    with store.open("policy") as snapshot, pytest.raises(CorruptWeights, match="'b'"):
        dict(snapshot.tensors())
    assert torch.equal(store.get("policy", {"a": torch.empty(1000)})["a"], put["a"])


def test_missing_store_segment_raises_corrupt_weights(store: VersionStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forge.runtime.store.versions.SETTLE_TIMEOUT", 0.05)
    store.put("policy", torch.ones(10))
    (segment,) = store.manifest("policy", 1).segments
    (store.root / "segments" / segment).unlink()
    with pytest.raises(CorruptWeights, match="policy version 1 is published, but its memory is gone"):
        store.get("policy")


def test_store_manifest_blocks_with_gaps_or_overlaps_raise():
    def manifest(*boxes: Box) -> Manifest:
        return Manifest("k", 3, False, tuple(Shard("w", "float32", (4, 2), box, "s", 0, "") for box in boxes))

    manifest(Box((0, 0), (3, 2)), Box((3, 0), (1, 2))).check()
    with pytest.raises(
        ValueError, match=r"k version 3: tensor 'w' is incomplete: 2 of its 8 elements were not written"
    ):
        manifest(Box((0, 0), (3, 2))).check()
    with pytest.raises(ValueError, match=r"\[0:3, 0:2\] and \[2:4, 0:2\] were both written"):
        manifest(Box((0, 0), (3, 2)), Box((2, 0), (2, 2))).check()


def test_store_put_beyond_shared_memory_raises_and_leaves_nothing(store: VersionStore):
    enormous = torch.empty(1, dtype=torch.uint8).expand(1 << 45)
    with pytest.raises(OSError, match="do not fit into shared memory"):
        store.put("w", enormous)
    assert not store.exists("w")
    assert used(store) == 0


@pytest.mark.processes
def test_documented_weight_store_functions_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORGE_STORE", "")  # put back afterwards, whatever happens to it

    async def main() -> None:
        dtensor = torch.randn(4, 4)
        await ts.put("policy_v42", dtensor)
        other = torch.empty(4, 4)
        await ts.get("policy_v42", other)
        assert torch.equal(other, dtensor)
        assert await ts.exists("policy_v42")
        assert await ts.keys() == ["policy_v42"]
        assert await ts.wait("policy_v42", 1) == 1
        await ts.delete("policy_v42")
        assert not await ts.exists("policy_v42")

    asyncio.run(main())
    root = ts.default_store().root
    assert os.environ["FORGE_STORE"] == str(root)
    ts.default_store().close()
    assert ts.default_store().root != root
    ts.default_store().close()
    assert "FORGE_STORE" not in os.environ  # a program started later makes its own
    monkeypatch.setenv("FORGE_PROCESS", "generator_0")
    monkeypatch.setattr("forge_compat.store._store", None)
    with pytest.raises(RuntimeError, match="in the controller first"):
        ts.default_store()


def test_republished_store_manifest_can_move_to_another_host(store: VersionStore):
    shard = Shard("a", "uint8", (8,), Box((0,), (8,)), "x", 0, "checksum")
    manifest = Manifest("policy", 1, False, (shard,))
    assert manifest.on_host("a:1").segments == {"x@a:1"}
    assert manifest.on_host("a:1").on_host("b:2").segments == {"x@a:1"}
    assert (manifest.extent("x"), manifest.on_host("a:1").digest) == (8, manifest.digest)
    assert store.publish([manifest.on_host("a:1")]) == 1
    assert store.publish([manifest.on_host("b:2")]) == 1
    assert store.manifest("policy", 1).segments == {"x@b:2"}
    other = Manifest("policy", 1, False, (Shard("a", "uint8", (8,), Box((0,), (8,)), "x@c:3", 0, "another"),))
    with pytest.raises(VersionConflict, match="with other values"):
        store.publish([other])
