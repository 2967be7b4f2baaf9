"""Our half of the TorchStore backend, over its published interface: the package itself does not install beside ours."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from forge.store import CorruptWeights, MissingVersion
from forge.store.torchstore import TorchStore


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A module with torchstore 0.1.2's functions, over a dictionary."""
    held: dict[str, Any] = {}

    async def put(key: str, value: Any) -> None:
        assert key not in held, "what is written twice can be torn"
        held[key] = value.clone() if isinstance(value, torch.Tensor) else value

    async def get(key: str) -> Any:
        return held[key]

    async def delete(key: str) -> None:
        del held[key]

    async def keys(prefix: str | None = None) -> list[str]:
        parts = (prefix or "").split("/") if prefix else []
        return [key for key in held if key.split("/")[: len(parts)] == parts]

    async def exists(key: str) -> bool:
        return key in held

    module = types.ModuleType("torchstore")
    module.__dict__.update(put=put, get=get, delete=delete, keys=keys, exists=exists)
    monkeypatch.setitem(sys.modules, "torchstore", module)
    return held


def test_versions_checksums_and_layouts_are_those_of_every_store(contents):
    store = TorchStore(keep=2)
    for version in range(1, 5):
        weights = {"a": torch.full((300,), float(version)), "b": torch.arange(6).view(2, 3)}
        assert store.put("policy", weights) == version
    assert store.versions("policy") == [3, 4]
    assert store.keys() == ["policy"]
    assert sum(key.endswith(".bytes") for key in contents) == 2
    into = {"a": torch.zeros(300, dtype=torch.float64)}
    assert store.get("policy", into, 3)["a"].eq(3).all()
    assert store.wait("policy", 4, timeout=1) == 4
    assert set(store.identities("policy")) == {1, 2, 3, 4}
    assert store.manifest("policy", 3).difference(store.manifest("policy", 4)) == "a"
    with pytest.raises(MissingVersion, match=r"policy version 1 is not in the store; it holds \[3, 4\]"):
        store.get("policy", version=1)
    with pytest.raises(TimeoutError, match=r"waited 0.05 s for policy version 9"):
        store.wait("policy", 9, timeout=0.05)
    store.adopt("policy", {0: {"earlier"}})
    assert store.identities("policy")[0] == {"earlier"}
    (segment,) = store.manifest("policy", 4).segments
    contents[segment][3] ^= 1
    with pytest.raises(CorruptWeights, match="policy version 4: tensor 'a' does not have the checksum"):
        store.get("policy")
    store.delete("policy")
    assert not store.exists("policy")
    assert not contents


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchstore", None)
    with pytest.raises(ModuleNotFoundError, match="pip install torchstore"):
        TorchStore()
