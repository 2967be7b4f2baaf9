"""Transfers in several threads: the same versions, the same errors, and no more memory than a few tensors."""

from pathlib import Path

import pytest
import torch

from forge.runtime.store import CorruptWeights, VersionStore, parallel


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VersionStore:
    """In a folder; every transfer has four threads."""
    monkeypatch.setattr(parallel, "LARGE", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    empty = VersionStore(tmp_path)
    empty.prepare()
    return empty


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    plain = {f"{number}": torch.randn(50 + number, 30, generator=generator) for number in range(40)}
    return plain | {"view": plain["0"].T, "empty": torch.zeros(0, 3), "half": plain["1"].bfloat16()}


def test_parallel_weight_copy_matches_single_thread(store: VersionStore, monkeypatch: pytest.MonkeyPatch):
    named = weights()
    store.put("several", named, 1)
    filled = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
    store.get("several", filled)
    new = store.get("several")
    with store.open("several", 1) as several:
        order = [name for name, _ in several.tensors()]
        whole = {name: tensor.clone() for name, tensor in several.tensors()}
        digest = several.digest
    monkeypatch.setattr(parallel, "LARGE", 1 << 30)
    store.put("one", named, 1)
    with store.open("one", 1) as one:
        assert one.digest == digest
        assert order == [name for name, _ in one.tensors()]
    for found in (filled, new, whole):
        assert found.keys() == named.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in named.items())


def test_damaged_weight_block_raises_in_parallel_read(store: VersionStore):
    store.put("policy", weights(), 1)
    with store.open("policy", 1) as version:
        shard = version.manifest.by_name["17"][0]
        values = shard.view(version.memory[shard.segment])
        values[3, 4] += 1
        with pytest.raises(CorruptWeights, match="tensor '17' does not have the checksum"):
            list(version.tensors())
        values[3, 4] -= 1
    with store.open("policy", 1) as version, pytest.raises(ValueError, match="has shape"):
        version.fill({"17": torch.zeros(2)})
