"""Resharding: whatever layout put a tensor, every rank of any other layout gets its own part of it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge.runtime.store import IncompleteVersion, VersionStore
from forge.runtime.store.transfer import RankPart, Ranks

pytestmark = pytest.mark.processes

Layout = tuple[tuple[int, ...], tuple[Placement, ...]]


@pytest.fixture(scope="module")
def store() -> Iterator[VersionStore]:
    store = VersionStore.create()
    yield store
    store.close()


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def spread(full: torch.Tensor, layout: Layout) -> DTensor:
    mesh_shape, placements = layout
    return distribute_tensor(full, init_device_mesh("cpu", mesh_shape), placements, src_data_rank=None)


def put(store: VersionStore, key: str, full: torch.Tensor, layout: Layout, dtype: torch.dtype | None, lost=()) -> None:
    """Every rank's part, made under a process group of its own, put at the same time."""
    world, group, parts = prod(layout[0]), uuid4().hex, []
    for rank in range(world):
        with rank_of(rank, world):
            value = {"w": spread(full, layout), "plain": full}
            part = RankPart.of_value(key, value, 1, dtype, Ranks(rank, world, group))
            parts.append(replace(part, blocks=()) if rank in lost else part)
    with ExitStack() as writing:
        written = [part.write(*writing.enter_context(store.segments.writing(part.size))) for part in parts]
        assert store.publish(written) == 1


@st.composite
def layouts(draw: st.DrawFn, dims: int) -> Layout:
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    choice = st.one_of(st.just(Replicate()), *([st.integers(0, dims - 1).map(Shard)] if dims else []))
    return mesh, tuple(draw(choice) for _ in mesh)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, Layout, Layout, torch.dtype, torch.dtype | None]:
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int32]
    full = torch.arange(1, prod(shape) + 1).reshape(shape).to(draw(st.sampled_from(dtypes)))
    source, target = draw(layouts(len(shape))), draw(layouts(len(shape)))
    on_the_way = draw(st.sampled_from([None, torch.float64]))
    return full, source, target, draw(st.sampled_from(dtypes)), on_the_way


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_weight_resharding_between_any_layouts_is_exact(store: VersionStore, case):
    full, source, target, dtype, on_the_way = case
    if store.exists("w"):
        store.delete("w")
    put(store, "w", full, source, on_the_way)
    got = store.get("w")
    assert torch.equal(got["w"], got["plain"])
    assert torch.equal(got["w"], full.to(got["w"].dtype))
    world = prod(target[0])
    for rank in range(world):
        with rank_of(rank, world):
            expected = spread(full.to(dtype), target)
            into = spread(torch.zeros_like(full, dtype=dtype), target)
            store.get("w", {"w": into})
            assert torch.equal(into.to_local(), expected.to_local()), (rank, source, target)


def test_store_put_without_all_shards_raises(store: VersionStore):
    with pytest.raises(IncompleteVersion, match=r"tensor 'w' is incomplete: 3 of its 8 elements .* \[0:3\], \[6:8\]"):
        put(store, "lost", torch.arange(8), ((3,), (Shard(0),)), None, lost=[1])
    assert not store.exists("lost")
