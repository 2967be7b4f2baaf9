"""A small model and a weight store."""

import pytest

from forge.models import build_small_model
from forge.runtime.store import VersionStore


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_small_model(
        tmp_path_factory.mktemp("model"),
        seed=0,
        alphabet="abcdefghijklmnopqrstuvwxyz>",
        hidden_size=32,
        layers=2,
        heads=2,
        kv_heads=1,
        max_positions=32,
    )


@pytest.fixture
def store(processes):
    store = VersionStore.create()
    yield store
    store.close()
