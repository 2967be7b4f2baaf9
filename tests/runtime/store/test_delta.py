"""Differences of weights: what comes out is what went in, bit for bit, and damage is an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge.runtime.store import CorruptWeights, VersionStore
from forge.runtime.store.delta import PIECE, decode, encode
from forge.runtime.store.manifest import Manifest
from forge.runtime.store.patches import apply_patch, make_patch
from forge.system.boxes import Box

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
]
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple) | st.sampled_from([(300,), (17, 64), (1, 1, 1)])


@st.composite
def values(draw: st.DrawFn, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Any bits: NaNs with any payload, both zeros, infinities."""
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    return (data & 1 if dtype == torch.bool else data).view(dtype).view(shape)


@st.composite
def updates(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """A tensor and its next version, of which none, some or all elements changed, a little or to anything."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    base = draw(values(dtype, shape))
    after = draw(values(dtype, shape))
    share = draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
    chosen = torch.from_numpy(np.random.default_rng(draw(st.integers(0, 99))).random(base.numel()) < share)
    mixed = torch.where(chosen[:, None], bits(after), bits(base)).flatten().view(dtype).view(shape)
    return base, mixed


def bits(tensor: Tensor) -> Tensor:
    """The bytes of each element, (elements, itemsize)."""
    return tensor.reshape(-1).view(torch.uint8).view(tensor.numel(), tensor.element_size())


def assert_same(one: Tensor, other: Tensor) -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert torch.equal(bits(one), bits(other))


@settings(deadline=None, max_examples=300)
@given(updates())
def test_a_difference_gives_back_every_bit(pair):
    base, values = pair
    code = encode(values, base)
    decoded = torch.empty_like(values)
    decode(code, base, decoded)
    assert_same(decoded, values)
    assert len(code) <= 1.01 * values.nbytes + 9 * 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("share", [0.0, 1e-5, 0.004, 0.03, 0.3, 1.0])
def test_pieces_of_a_large_tensor_take_their_own_forms(dtype, share):
    """Over two pieces and some, with gaps of more than a byte, and changes that only one piece has."""
    random = torch.Generator().manual_seed(0)
    base = (torch.randn(2 * PIECE + 77, generator=random) * 50).to(dtype)
    values = base.clone()
    chosen = torch.rand(len(base), generator=random) < share
    chosen[:PIECE] &= share != 0.03
    values[chosen] = (base[chosen].double() * 1.01 + 1).to(dtype)
    code = encode(values, base)
    decoded = torch.empty_like(values)
    decode(code, base, decoded)
    assert_same(decoded, values)
    if share < 0.1:
        assert len(code) < 0.1 * values.nbytes


def test_a_small_update_takes_few_bytes():
    """Below what indices and values of the changed elements take, and far below blocks of 64 bytes."""
    torch.manual_seed(0)
    master = 0.02 * torch.randn(1 << 19)
    base, values = master.bfloat16(), (master + 1e-6 * torch.randn(1 << 19)).bfloat16()
    changed = int((base != values).sum())
    assert 0.02 < changed / len(base) < 0.05
    blocks = (base != values).view(-1, 32).any(1).sum() * 64
    size = len(encode(values, base))
    assert size < 2.3 * changed  # an index of one byte and a value of two are 3
    assert 5 * size < blocks


@settings(deadline=None, max_examples=200)
@given(updates(), st.data())
def test_a_damaged_difference_never_passes_for_another_shape(pair, data):
    """It is an error, or some tensor of this shape, which its checksum then tells apart."""
    base, values = pair
    code = encode(values, base)
    cut = code[: data.draw(st.integers(0, len(code)))]
    if len(cut) < len(code):
        with pytest.raises(ValueError, match="difference of weights"):
            decode(cut, base, torch.empty_like(values))


@pytest.fixture(scope="module")
def hosts(processes: None) -> Iterator[tuple[VersionStore, VersionStore]]:
    stores = VersionStore.create(), VersionStore.create()
    yield stores
    for store in stores:
        store.close()


def transferred(sender: VersionStore, receiver: VersionStore, version: int, base: int) -> tuple[int, Manifest]:
    """Bring a version from one store to another by a patch; returns the size of the patch and the manifest there."""
    manifest = sender.manifest("policy", version)
    (segment,) = manifest.segments
    shards = manifest.within(segment).shards
    held = sender.held("policy", base)
    with sender.segments.reading({segment, *held.segments}) as memory:
        patch = make_patch(shards, memory[segment], held, memory)
    held = receiver.held("policy", base)
    with receiver.segments.writing(manifest.extent(segment)) as (name, written):
        with receiver.segments.reading(held.segments) as memory:
            apply_patch(patch, shards, written, held, memory)
        copied = manifest.renamed({segment: name})
        receiver.keep_part(copied, "copy")
    return len(patch), copied


@st.composite
def state_dicts(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two versions: tensors changed, added, removed, reshaped, of another dtype."""
    before: dict[str, Tensor] = {}
    after: dict[str, Tensor] = {"always": torch.ones(1)}
    for name in "abcd":
        base, values = draw(updates())
        kind = draw(st.sampled_from(["changed", "added", "removed", "reshaped", "retyped", "same"]))
        if kind != "added":
            before[name] = base
        if kind in ("changed", "added"):
            after[name] = values
        elif kind == "same":
            after[name] = base
        elif kind == "reshaped":
            after[name] = base.reshape(-1)
        elif kind == "retyped":
            after[name] = bits(values).reshape(-1)
    return before | {"kept": torch.zeros(2)}, after


@settings(deadline=None, max_examples=40)
@given(versions=state_dicts())
def test_a_version_by_its_patch_is_the_version(hosts, versions):
    sender, receiver = hosts
    first = (sender.versions("policy") or [0])[-1] + 1
    before, after = versions
    for store in hosts:
        store.put("policy", before, first)
    sender.put("policy", after, first + 1)
    _, copied = transferred(sender, receiver, first + 1, first)
    assert copied.digest == sender.manifest("policy", first + 1).digest
    with receiver.segments.reading(copied.segments) as memory:
        for shard in copied.shards:
            block = shard.view(memory[shard.segment]) if shard.segment else after[shard.name]
            assert_same(block, after[shard.name])
    receiver.put("policy", after, first + 1)


def test_blocks_of_another_layout_are_sent_as_they_are(hosts):
    """A trainer that was divided otherwise when it wrote the base: an expert, a shard, or a whole tensor."""
    sender, receiver = hosts
    first = (sender.versions("policy") or [0])[-1] + 1
    before = {"a": torch.randn(40, 30), "b": torch.randn(64)}
    for store in hosts:
        store.put("policy", before, first)
    sender.put("policy", {name: values + 0.01 for name, values in before.items()}, first + 1)
    manifest = sender.manifest("policy", first + 1)
    (segment,) = manifest.segments
    sizes = []
    for is_divided in (False, True):
        sender_base, receiver_base = (store.held("policy", first) for store in hosts)
        if is_divided:
            sender_base, receiver_base = (
                replace(part, shards=tuple(replace(s, box=Box((0, 0), (20, 30))) for s in part.by_name["a"]))
                for part in (sender_base, receiver_base)
            )
        with sender.segments.reading({segment, *sender_base.segments}) as memory:
            patch = make_patch(manifest.shards, memory[segment], sender_base, memory)
        sizes.append(len(patch))
        writing = receiver.segments.writing(manifest.extent(segment))
        with receiver.segments.reading(receiver_base.segments) as memory, writing as (_, written):
            apply_patch(patch, manifest.shards, written, receiver_base, memory)
            for shard in manifest.shards:
                assert torch.equal(shard.view(written), before[shard.name] + 0.01)
    assert sizes[1] > sizes[0]


def test_a_change_of_high_bytes_alone_is_a_change():
    """Signs, and powers of two: the lowest byte stays what it was."""
    base = torch.randn(4096).bfloat16()
    values = base.clone()
    values[::7] *= -1
    values[3::50] *= 4
    decoded = torch.empty_like(values)
    decode(encode(values, base), base, decoded)
    assert_same(decoded, values)


@pytest.mark.parametrize("damage", ["base", "patch", "another base"])
def test_damage_is_found(hosts, damage):
    sender, receiver = hosts
    first = (sender.versions("policy") or [0])[-1] + 1
    before = {"a": torch.randn(40, 30), "b": torch.zeros(3)}
    for store in hosts:
        store.put("policy", before, first)
    sender.put("policy", {**before, "a": before["a"] + 0.01}, first + 1)
    manifest = sender.manifest("policy", first + 1)
    (segment,) = manifest.segments
    held = sender.held("policy", first)
    with sender.segments.reading({segment, *held.segments}) as memory:
        patch = make_patch(manifest.shards, memory[segment], held, memory)
    held = receiver.held("policy", first)
    with receiver.segments.reading(held.segments) as memory, receiver.segments.writing(8000) as (_, written):
        if damage == "base":
            (base_segment,) = held.segments
            memory[base_segment][100] ^= 1
        elif damage == "patch":
            patch[-1] ^= 1
        else:
            others = tuple(replace(shard, checksum="0") for shard in held.shards)
            held = replace(held, shards=others)
        with pytest.raises(CorruptWeights, match="tensor 'a'"):
            apply_patch(patch, manifest.shards, written, held, memory)
