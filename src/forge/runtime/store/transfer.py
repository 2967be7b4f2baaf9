"""Transfer of values: write them into segments (`RankPart`), agree on a version, and read it (`OpenVersion`)."""

from __future__ import annotations

import json
import operator
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from ...system.boxes import Box, full_box, is_dtensor, local_boxes
from .errors import CorruptWeights, IncompleteVersion, MissingVersion, VersionConflict
from .manifest import Manifest, Shard, copy_and_hash, hash_tensor
from .parallel import in_threads
from .segments import ALIGNMENT

GROUP = "forge/store/group"  # the key of a process group's name in its own store
ERRORS = {error.__name__: error for error in (OSError, VersionConflict, MissingVersion, CorruptWeights)}
_attempts: Counter[str] = Counter()  # puts of a version so far in this process, as all ranks count them


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a collective put: this `rank` of `world`. `group` is a unique name shared by all of them."""

    rank: int = 0
    world: int = 1
    group: str = ""


# The process group of the last put, and the name that its ranks agreed on.
_group: tuple[object, str] | None = None
_naming = threading.Lock()


def flatten_state(value: object) -> tuple[dict[str, Tensor], bool]:
    """Return tensors by (dotted) name, and whether the value is a single tensor.

    Raises:
        TypeError: a value is not a tensor; names it.
        ValueError: there is no tensor, or two have the same name.
    """
    # A single tensor has no name.
    if isinstance(value, Tensor):
        return {"": value}, True
    tensors: dict[str, Tensor] = {}

    def visit_part(path: str, part: object) -> None:
        if isinstance(part, Mapping):
            for name, child in part.items():
                visit_part(f"{path}.{name}" if path else str(name), child)
        elif not isinstance(part, Tensor):
            raise TypeError(f"only tensors can be stored; {path or 'the value'!r} is a {type(part).__name__}")
        # {"a.b": x, "a": {"b": y}} would be one name for two tensors.
        elif path in tensors:
            raise ValueError(f"two tensors have the name {path!r}")
        else:
            tensors[path] = part

    visit_part("", value)
    if not tensors:
        raise ValueError("the state dict has no tensors")
    return tensors, False


def check_storable(name: str, tensor: Tensor) -> None:
    """TypeError: a tensor has no plain memory whose bytes a store could hold."""
    kinds = {
        "not initialised": is_lazy(tensor),
        "quantised: dequantize() it": tensor.is_quantized,
        "nested: unbind() it": tensor.is_nested,
        "sparse: to_dense() it": tensor.layout is not torch.strided,
        "on the meta device or a FakeTensor": tensor.device.type == "meta" or isinstance(tensor, FakeTensor),
    }
    for reason in (reason for reason, applies in kinds.items() if applies):
        raise TypeError(f"{name} cannot be stored: it is {reason}")


def group_name() -> str:
    """Return a name that the ranks of the process group share, and no other group has."""
    global _group
    with _naming:
        if _group is None or _group[0] is not dist.group.WORLD:
            # By its key-value store: a collective would hang in a rank that puts alone.
            agreed = dist.distributed_c10d._get_default_store().compare_set(GROUP, "", uuid4().hex)
            _group = dist.group.WORLD, agreed.decode()
        return _group[1]


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a version. The first rank writes replicated blocks, rank 0 plain tensors alongside DTensors.

    blocks: with their values; None for an empty tensor.
    size: bytes of its segment.
    """

    key: str
    version: int | None
    single: bool
    ranks: Ranks
    blocks: tuple[tuple[Shard, Tensor | None], ...]
    size: int

    @classmethod
    def of_value(
        cls,
        key: str,
        value: object,
        version: int | None = None,
        dtype: torch.dtype | None = None,
        ranks: Ranks | None = None,
    ) -> RankPart:
        """Collect this rank's part of a value, floating-point tensors as `dtype`.

        With DTensors the default of `ranks` is the process group.

        Raises:
            TypeError, ValueError: as `flatten`, or the version is not an integer from 0.
        """
        version = None if version is None else operator.index(version)
        if version is not None and version < 0:
            raise ValueError(f"a version is a number from 0, got {version}")
        tensors, single = flatten_state(value)
        for name, tensor in tensors.items():
            check_storable(f"{key}: {name}" if name else key, tensor)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"the dtype of stored tensors must be a torch.dtype, got {dtype!r}")

        # Only DTensors make a put collective: ranks may put plain tensors independently of one another.
        if ranks is None:
            spread = any(is_dtensor(tensor) for tensor in tensors.values()) and dist.is_initialized()
            ranks = Ranks()
            if spread and dist.get_world_size() > 1:
                ranks = Ranks(dist.get_rank(), dist.get_world_size(), group_name())

        # Blocks are laid out one after the other, each at an aligned offset.
        blocks: list[tuple[Shard, Tensor | None]] = []
        size = 0
        for name, tensor in tensors.items():
            target_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            shard = Shard(
                name, str(target_dtype).removeprefix("torch."), tuple(tensor.shape), full_box(tensor.shape), "", 0, ""
            )
            if is_dtensor(tensor) and tensor.numel():
                # Along each mesh dimension that replicates the tensor, the first rank writes.
                coordinate = tensor.device_mesh.get_coordinate() or ()
                axes = zip(tensor.placements, coordinate, strict=False)
                is_writer = all(rank == 0 or not placement.is_replicate() for placement, rank in axes)
            else:
                is_writer = ranks.rank == 0

            if is_writer and not tensor.numel():
                blocks.append((shard, None))
            elif is_writer:
                for box, values in local_boxes(tensor):
                    blocks.append((replace(shard, box=box, start=size), values.detach()))
                    size += -(-values.numel() * target_dtype.itemsize // ALIGNMENT) * ALIGNMENT

        return cls(key, version, single, ranks, tuple(blocks), size)

    def write(self, segment: str, memory: Tensor) -> Manifest:
        """Write the blocks consecutively into the bytes of a segment."""

        @torch.no_grad()  # of the thread
        def write_block(block: tuple[Shard, Tensor | None]) -> Shard:
            shard, values = block
            if values is None:
                return shard
            shard = replace(shard, segment=segment)
            return replace(shard, checksum=copy_and_hash(values, shard.view(memory)))

        shards = in_threads(write_block, self.blocks, self.size)
        return Manifest(self.key, self.version, self.single, tuple(shards))


def publish_together(
    part: RankPart, write: Callable[[], Manifest], publish: Callable[[list[Manifest]], int], timeout: float
) -> int:
    """Write this rank's part and have rank 0 publish all parts; ranks meet in the store of their process group; return
    the version.

    Raises:
        IncompleteVersion: a rank did not write within `timeout` seconds, or a tensor is not whole.
        an error of another rank, of the same type where it is one of ERRORS.
    """
    ranks = part.ranks
    meeting = dist.distributed_c10d._get_default_store()
    name = f"{ranks.group}/{part.key}/{part.version}"
    _attempts[name] += 1
    name = f"{name}/{_attempts[name]}"

    def send_result(label: object, work: Callable[[], Any]) -> None:
        message: tuple[str | None, Any]
        try:
            message = None, work()
        except Exception as error:  # any error must reach every rank
            message = type(error).__name__, str(error)
        # The store may be a file that only grows.
        meeting.set(f"{name}/{label}", zlib.compress(json.dumps(message).encode()))  # type: ignore[arg-type]  # bytes are taken

    def receive_result(label: object) -> Any:
        try:
            meeting.wait([f"{name}/{label}"], timedelta(seconds=timeout))
            kind, content = json.loads(zlib.decompress(meeting.get(f"{name}/{label}")))
        except RuntimeError:  # each kind of store has its own, for a rank that is late or lost
            text = f"rank {ranks.rank} waited {timeout:g} s for what rank {label} should put"
            raise IncompleteVersion(text) from None
        if kind is not None:
            raise ERRORS.get(kind, IncompleteVersion)(content)
        return content

    send_result(ranks.rank, lambda: write().to_json())
    if ranks.rank == 0:
        send_result(
            "0, the outcome,",
            lambda: publish([Manifest.from_json(receive_result(rank)) for rank in range(ranks.world)]),
        )

    version: int = receive_result("0, the outcome,")
    return version


@dataclass
class OpenVersion:
    """A version open for reading into tensors of any layout; verifies the checksum of everything it reads."""

    manifest: Manifest
    memory: Mapping[str, Tensor]  # the bytes of its segments
    _verified: set[int] = field(default_factory=set, init=False)

    @property
    def version(self) -> int:
        """Return the version that is open."""
        assert self.manifest.version is not None
        return self.manifest.version

    @property
    def digest(self) -> str:
        """Return the identity of the version, see `Manifest.digest`."""
        return self.manifest.digest

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of every tensor. A tensor in one block is a view of shared memory, valid while the
        version is open."""
        names = list(self.manifest.by_name)
        yield from zip(names, self._join_whole(names), strict=True)

    def fill(self, into: Any = None) -> Any:
        """Fill a tensor, DTensor or (nested) state dict in place; return new tensors if it is None. See `Store.get`."""
        if into is None:
            new = self.some(list(self.manifest.by_name))
            return new[""] if self.manifest.single else new
        targets, single = flatten_state(into)
        if single != self.manifest.single:
            kinds = ("a state dict", "one tensor")
            raise ValueError(f"{self.manifest.key} is {kinds[self.manifest.single]}, not {kinds[single]}")
        # All before the first is written: a model must not be half of one version.
        for name, target in targets.items():
            self.check(name, target)
        for _ in in_threads(lambda target: self.read(*target), targets.items(), self._total_size):
            pass
        return into

    def some(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return new tensors of these names."""
        return dict(zip(names, self._join_whole(names, copies=True), strict=True))

    @torch.no_grad()
    def read(self, name: str, target: Tensor) -> None:
        """Fill this process's part of one tensor.

        Raises:
            KeyError, ValueError: as of `check`.
            CorruptWeights: its values differ from those that were put.
        """
        shards = self.check(name, target)
        # Each block of the target is filled from all stored blocks that overlap it, whatever the two layouts.
        for box, values in local_boxes(target):
            self._fill_box(shards, box, values.detach())

    def check(self, name: str, target: Tensor) -> Sequence[Shard]:
        """Return the blocks of a tensor that can be read into `target`.

        Raises:
            KeyError: no such tensor.
            ValueError: its shape differs, or the target has no memory.
        """
        shards = self.manifest.by_name.get(name)
        label = self._describe_block(name)
        if shards is None:
            names = list(self.manifest.by_name)
            raise KeyError(f"{label} is not there; it has {len(names)} tensors: {names[:3]} ...")
        if shards[0].shape != tuple(target.shape):
            raise ValueError(f"{label} has shape {shards[0].shape}, it cannot be read into {tuple(target.shape)}")
        if target.is_meta:
            raise ValueError(f"{label} cannot be read into a tensor on the meta device: it has no memory")
        return shards

    def _fill_box(self, shards: Sequence[Shard], box: Box, values: Tensor) -> None:
        """Copy what the stored blocks have of a block into its values."""
        for shard in shards:
            overlap = box.meet(shard.box)
            if not overlap:
                continue
            source = shard.view(self.memory[shard.segment])
            into = values[overlap.within(box)]
            # A block that is read as a whole is verified by the pass that copies it.
            if overlap == shard.box and id(shard) not in self._verified:
                self._verify_block(shard, source, copy_and_hash(source, into, of_source=True))
            else:
                self._verify_block(shard, source)
                into.copy_(source[overlap.within(shard.box)])

    @property
    def _total_size(self) -> int:
        """Return bytes of all blocks."""
        return sum(shard.box.numel * getattr(torch, shard.dtype).itemsize for shard in self.manifest.shards)

    def _join_whole(self, names: Sequence[str], copies: bool = False) -> Iterator[Tensor]:
        """Return full tensors, each joined from its blocks, or a view of the only one unless it shall be a copy."""

        def make_targets() -> Iterator[tuple[str, Tensor | None]]:
            # In the caller's thread, which has memory to use again: a new thread would touch new pages.
            for name in names:
                shards = self.manifest.by_name[name]
                joined = copies or len(shards) > 1 or not shards[0].segment
                dtype = getattr(torch, shards[0].dtype)
                yield name, torch.empty(shards[0].shape, dtype=dtype) if joined else None

        def read_target(target: tuple[str, Tensor | None]) -> Tensor:
            name, tensor = target
            if tensor is not None:
                self.read(name, tensor)
                return tensor
            (shard,) = self.manifest.by_name[name]
            values = shard.view(self.memory[shard.segment])
            self._verify_block(shard, values)
            return values

        return in_threads(read_target, make_targets(), self._total_size)

    def _verify_block(self, shard: Shard, values: Tensor, digest: str | None = None) -> None:
        """Compare the checksum of a block, once for each open version."""
        if id(shard) in self._verified:
            return
        if (hash_tensor(values) if digest is None else digest) != shard.checksum:
            part = "" if shard.box == full_box(shard.shape) else f" {shard.box}"
            raise CorruptWeights(
                f"{self._describe_block(shard.name)}{part} does not have the checksum that it was published with"
            )
        self._verified.add(id(shard))

    def _describe_block(self, name: str) -> str:
        tensor = f"tensor {name!r}" if name else "the tensor"
        return f"{self.manifest.key} version {self.manifest.version}: {tensor}"
