"""The weight store: what is put is what is got, whole or not at all, and nothing stays behind."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch

from forge.store import VersionStore

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.fixture
def store() -> Iterator[VersionStore]:
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


def test_what_is_put_is_what_is_got(store: VersionStore):
    put = tensors()
    store.put(3, put.items())
    assert_equal(store.get(3), put)
    assert_equal(pickle.loads(pickle.dumps(store)).get(3), put)


def test_tied_tensors_are_got_under_each_name(store: VersionStore):
    shared = torch.randn(4, 3)
    put = {"embed": shared, "head": shared, "rows": shared[1:], "first": shared[0]}
    store.put(0, put.items())
    assert_equal(store.get(0), put)


def test_a_version_does_not_change_with_the_weights_it_was_made_of(store: VersionStore):
    weights = torch.zeros(100)
    store.put(1, [("w", weights)])
    got = store.get(1)
    weights += 1
    assert not store.get(1)["w"].any()
    store.put(1, [("w", weights)])
    assert not got["w"].any()
    assert store.get(1)["w"].all()


def test_the_newest_stay_and_those_in_use_are_not_lost(store: VersionStore):
    store.put(9, tensors(9).items())
    held = store.get(9)
    for version in (10, 11):
        store.put(version, tensors(version).items())
    assert store.versions() == [10, 11]
    assert len(list(store.root.iterdir())) == 2
    assert_equal(held, tensors(9))


def test_a_missing_version_is_told_what_is_there(store: VersionStore):
    for version in (4, 5):
        store.put(version, [("w", torch.ones(1))])
    with pytest.raises(KeyError, match=r"version 3 are not in the store; it holds \[4, 5\]"):
        store.get(3)


def test_a_version_that_failed_half_way_is_never_seen(store: VersionStore):
    store.put(1, [("w", torch.ones(2))])

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(2)
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        store.put(2, breaks())
    (store.root / "v3.unfinished").write_bytes(b"the writer was killed here")
    assert store.versions() == [1]
    for version in (2, 3):
        with pytest.raises(KeyError):
            store.get(version)
    store.put(3, [("w", torch.zeros(2))])
    assert store.versions() == [1, 3]


def test_readers_see_whole_versions_while_one_is_written(store: VersionStore):
    last = 60

    def write() -> None:
        for version in range(last + 1):
            store.put(version, [(name, torch.full((2000,), version)) for name in "abc"])

    writer = Thread(target=write)
    writer.start()
    seen = set()
    while last not in seen:
        for version in store.versions():
            try:
                got = store.get(version)
            except KeyError:  # dropped since it was listed
                continue
            assert all(bool((got[name] == version).all()) for name in "abc")
            seen.add(version)
        assert writer.is_alive() or last in store.versions()
    writer.join()


def test_a_removed_store_says_so(store: VersionStore):
    store.put(1, [("w", torch.ones(1))])
    store.close()
    store.close()
    with pytest.raises(FileNotFoundError, match="was removed"):
        store.put(2, [("w", torch.ones(1))])
    with pytest.raises(KeyError, match=r"it holds \[\]"):
        store.get(1)


def test_the_store_of_a_dead_process_is_swept_and_that_of_a_living_one_is_not(store: VersionStore):
    code = (
        "import os, torch; from forge.store import VersionStore; s = VersionStore.create();"
        "s.put(1, [('w', torch.ones(1))]); print(s.root, flush=True); os._exit(1)"
    )
    left = Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
    assert left.name.startswith("forge-weights-")
    assert left.parent == store.root.parent
    store.put(1, [("w", torch.ones(1))])
    other = VersionStore.create()
    assert not left.exists()
    assert store.versions() == [1]
    assert other.root != store.root
    assert f"-{os.getpid()}-" in other.root.name
    other.close()
    assert not other.root.exists()
