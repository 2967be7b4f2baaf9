"""Weights of an emulated accelerator in the store: cast on the device, taken over by an engine, filled into tensors."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from forge.engines import EmbeddedEngine
from forge.runtime.store import VersionStore
from forge.types import Completion, Sampling
from tests.emulated import NAME, emulated, lines
from tests.training.cases import write_model


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    """In a folder, without the process that removes one of shared memory."""
    empty = VersionStore(tmp_path)
    empty.prepare()
    return empty


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Others than in the folder, in host memory; one a transposed view."""
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    named = {name: tensor * 1.25 for name, tensor in state.items() if name != "lm_head.weight"}
    wide = "model.layers.0.mlp.up_proj.weight"
    return named | {wide: named[wide].T.contiguous().T}


def check_put(store: VersionStore, named: dict[str, torch.Tensor], dtype: torch.dtype | None) -> None:
    """What is read is what the CPU would have put; what is cast is cast on the device."""
    with emulated() as emulation:
        on_device = {name: tensor.to(emulation.device) for name, tensor in named.items()}
        with emulation.counted() as waits:
            store.put("policy", on_device, 1, dtype=dtype)
        casts = Counter({line: count for line, count in waits.items() if "cast" in line})
        assert not casts, lines(casts)
        assert waits.total() == len(named), lines(waits)
        into = {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in on_device.items()}
        with store.open("policy", 1) as snapshot:
            snapshot.fill(into)
        assert {tensor.device.type for tensor in into.values()} == {NAME}
        filled = {name: tensor.cpu() for name, tensor in into.items()}
    store.put("plain", named, 1, dtype=dtype)
    with store.open("plain", 1) as plain, store.open("policy", 1) as policy:
        assert plain.digest == policy.digest
        for name, tensor in plain.tensors():
            assert torch.equal(filled[name], tensor)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_stored_version_of_device_tensors_equals_cpu_version(
    store: VersionStore, folder: Path, dtype: torch.dtype | None
):
    check_put(store, weights(folder), dtype)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_engine_loads_stored_weights_on_emulated_device(store: VersionStore, folder: Path, dtype: torch.dtype | None):
    def drawn() -> Completion:
        with EmbeddedEngine(folder, slots=2, max_seq_len=40) as engine, store.open("policy", 1) as snapshot:
            engine.update_weights(snapshot.tensors(), 1, snapshot.digest).result(60)
            return engine.submit([5, 6, 7], Sampling(max_tokens=12, seed=1)).result(60)[0]

    with emulated() as emulation:
        store.put(
            "policy", {name: tensor.to(emulation.device) for name, tensor in weights(folder).items()}, 1, dtype=dtype
        )
        found = drawn()
    expected = drawn()
    assert (found.token_ids, found.versions) == (expected.token_ids, [1] * 12)
    assert found.identities == expected.identities
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)
