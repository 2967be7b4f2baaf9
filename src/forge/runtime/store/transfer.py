"""Write values into segments (`RankPart`), publish them together with other ranks, and read them (`OpenVersion`)."""

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

GROUP = "forge/store/group"  # key of a process group's name in torch.distributed's key-value store
# Errors that keep their type on the way to other ranks.
ERRORS = {error.__name__: error for error in (OSError, VersionConflict, MissingVersion, CorruptWeights)}
# Collective puts of each version so far, in this process. Every rank counts the same, which tells repeated puts apart.
_attempts: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class Ranks:
    """Group of ranks that put one value together."""

    rank: int = 0  # index of this process
    world: int = 1  # number of ranks
    group: str = ""  # a unique name that all of them share; empty for a single process


# The process group of the last collective put, and the name that its ranks agreed on.
_group: tuple[object, str] | None = None
_naming = threading.Lock()


def flatten_state(value: object) -> tuple[dict[str, Tensor], bool]:
    """Return (tensors by name, whether the value is a single tensor).

    Names of a nested state dict are dotted, e.g. "layers.0.weight"; a single tensor has the empty name.

    Raises:
        TypeError: a value is not a tensor; names it.
        ValueError: there is no tensor, or two have the same name.
    """
    if isinstance(value, Tensor):
        return {"": value}, True

    tensors: dict[str, Tensor] = {}

    def visit_part(path: str, child_value: object) -> None:
        if isinstance(child_value, Mapping):
            for name, child in child_value.items():
                visit_part(f"{path}.{name}" if path else str(name), child)
        elif not isinstance(child_value, Tensor):
            raise TypeError(f"only tensors can be stored; {path or 'the value'!r} is a {type(child_value).__name__}")
        # {"a.b": x, "a": {"b": y}} would be one name for two tensors.
        elif path in tensors:
            raise ValueError(f"two tensors have the name {path!r}")
        else:
            tensors[path] = child_value

    visit_part("", value)
    if not tensors:
        raise ValueError("the state dict must have at least one tensor")
    return tensors, False


def check_storable(name: str, tensor: Tensor) -> None:
    """Raise TypeError if a tensor has no plain memory, whose bytes a store can hold; says how to convert it."""
    obstacles = {
        "not initialised": is_lazy(tensor),
        "quantised: dequantize() it": tensor.is_quantized,
        "nested: unbind() it": tensor.is_nested,
        "sparse: to_dense() it": tensor.layout is not torch.strided,
        "on the meta device or a FakeTensor": tensor.device.type == "meta" or isinstance(tensor, FakeTensor),
    }
    for obstacle, applies in obstacles.items():
        if applies:
            raise TypeError(f"{name} cannot be stored: it is {obstacle}")


def group_name() -> str:
    """Return a name that all ranks of the default process group share, and no other group has."""
    global _group
    with _naming:
        if _group is None or _group[0] is not dist.group.WORLD:
            # The first rank to ask decides, through the key-value store. A collective would hang in a rank that asks
            # alone.
            agreed = dist.distributed_c10d._get_default_store().compare_set(GROUP, "", uuid4().hex)
            _group = dist.group.WORLD, agreed.decode()
        return _group[1]


@dataclass(frozen=True)
class RankPart:
    """Blocks of a version that one rank writes.

    A block that several ranks hold is written by the first of them; plain tensors alongside DTensors by rank 0.

    Attributes:
        blocks: each block with its values; None for the values of an empty tensor.
        size: bytes of the segment that the blocks need.
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
    ) -> "RankPart":
        """Return the part of a value that this rank writes; see `VersionStore.put` for the arguments.

        Args:
            ranks: who puts the value; None is the process group if the value has DTensors, otherwise this process only.

        Raises:
            TypeError: a value is not a tensor or cannot be stored, or `version` or `dtype` has another type.
            ValueError: there is no tensor, two have the same name, or the version is negative.
        """
        version = None if version is None else operator.index(version)
        if version is not None and version < 0:
            raise ValueError(f"a version must be an integer of at least 0, got {version}")

        tensors, single = flatten_state(value)
        for name, tensor in tensors.items():
            check_storable(f"{key}: {name}" if name else key, tensor)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"the dtype of stored tensors must be a torch.dtype, got {dtype!r}")

        # Only DTensors make a put collective: ranks may put plain tensors independently of one another.
        if ranks is None:
            ranks = Ranks()
            has_dtensors = any(is_dtensor(tensor) for tensor in tensors.values())
            if has_dtensors and dist.is_initialized() and dist.get_world_size() > 1:
                ranks = Ranks(dist.get_rank(), dist.get_world_size(), group_name())

        # Blocks are laid out one after the other, each at an aligned offset.
        blocks: list[tuple[Shard, Tensor | None]] = []
        part_size = 0
        for name, tensor in tensors.items():
            target_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            shard = Shard(
                name, str(target_dtype).removeprefix("torch."), tuple(tensor.shape), full_box(tensor.shape), "", 0, ""
            )
            if is_dtensor(tensor) and tensor.numel():
                # Of the ranks along a mesh dimension that replicates the tensor, only the first one writes.
                mesh_axes = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=False)
                is_writer = all(rank == 0 for placement, rank in mesh_axes if placement.is_replicate())
            else:
                is_writer = ranks.rank == 0

            if is_writer and not tensor.numel():
                blocks.append((shard, None))
            elif is_writer:
                for box, values in local_boxes(tensor):
                    blocks.append((replace(shard, box=box, start=part_size), values.detach()))
                    part_size += -(-values.numel() * target_dtype.itemsize // ALIGNMENT) * ALIGNMENT  # rounded up

        return cls(key, version, single, ranks, tuple(blocks), part_size)

    def write(self, segment: str, memory: Tensor) -> Manifest:
        """Write the blocks into the bytes of a segment (`memory`, uint8), and return their manifest."""

        @torch.no_grad()  # it holds for one thread only
        def write_block(block: tuple[Shard, Tensor | None]) -> Shard:
            shard, values = block
            if values is None:
                return shard
            shard = replace(shard, segment=segment)
            return replace(shard, checksum=copy_and_hash(values, shard.view(memory)))

        return Manifest(self.key, self.version, self.single, tuple(in_threads(write_block, self.blocks, self.size)))


def publish_together(
    part: RankPart, write: Callable[[], Manifest], publish: Callable[[list[Manifest]], int], timeout: float
) -> int:
    """Write this rank's part, have rank 0 publish the parts of all ranks, and return the version.

    The ranks exchange the manifests, and rank 0's result, through the key-value store of their process group.

    Args:
        write: writes this rank's part, and returns its manifest.
        publish: publishes the manifests of all ranks, and returns the version; only rank 0 calls it.
        timeout: seconds to wait for other ranks.

    Raises:
        IncompleteVersion: a rank did not write within `timeout` seconds, or a tensor is not whole.
        Exception: an error of another rank, of the same type if it is one of ERRORS, otherwise IncompleteVersion.
    """
    ranks = part.ranks
    key_value_store = dist.distributed_c10d._get_default_store()
    prefix = f"{ranks.group}/{part.key}/{part.version}"
    _attempts[prefix] += 1
    prefix = f"{prefix}/{_attempts[prefix]}"

    def send_result(label: object, work: Callable[[], Any]) -> None:
        try:
            message: tuple[str | None, Any] = (None, work())
        except Exception as error:  # any error must reach every rank
            message = type(error).__name__, str(error)

        # Compressed, as the store may be a file that only grows.
        key_value_store.set(
            f"{prefix}/{label}",
            zlib.compress(json.dumps(message).encode()),  # type: ignore[arg-type]  # it takes bytes as well
        )

    def receive_result(label: object) -> Any:
        try:
            key_value_store.wait([f"{prefix}/{label}"], timedelta(seconds=timeout))
            data = key_value_store.get(f"{prefix}/{label}")
        except RuntimeError:  # each kind of store raises a different subclass if a rank is late or lost
            raise IncompleteVersion(
                f"rank {ranks.rank} waited {timeout:g} s for the tensors of rank {label}, which did not put them: "
                "check that rank's log"
            ) from None

        error_type, content = json.loads(zlib.decompress(data))
        if error_type is not None:
            raise ERRORS.get(error_type, IncompleteVersion)(content)
        return content

    # The label is part of an error: "rank 1 waited 300 s for what rank 0, the outcome, should put".
    outcome = "0, the outcome,"
    send_result(ranks.rank, lambda: write().to_json())
    if ranks.rank == 0:
        send_result(outcome, lambda: publish([Manifest.from_json(receive_result(rank)) for rank in range(ranks.world)]))
    return receive_result(outcome)


@dataclass
class OpenVersion:
    """A version that is open: reads it into tensors of any layout, and verifies the checksums of what it reads."""

    manifest: Manifest
    memory: Mapping[str, Tensor]  # the bytes of the version's segments by name, uint8
    _verified: set[int] = field(default_factory=set, init=False)  # the id() of each block that was

    @property
    def version(self) -> int:
        """Return the number of the version."""
        return self.manifest.version  # type: ignore[return-value]

    @property
    def digest(self) -> str:
        """Return the identity of the version, see `Manifest.digest`."""
        return self.manifest.digest

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) for every tensor.

        A tensor that is stored as one block is a view of shared memory, valid while the version is open.
        """
        names = list(self.manifest.by_name)
        yield from zip(names, self._join_whole(names), strict=True)

    def fill(self, into: Any = None) -> Any:
        """Fill a tensor, DTensor or (nested) state dict in place, and return it; None returns new tensors.

        See `Store.get`, which raises the same errors.
        """
        if into is None:
            copies = self.some(list(self.manifest.by_name))
            return copies[""] if self.manifest.single else copies

        targets, single = flatten_state(into)
        if single != self.manifest.single:
            kinds = ("a state dict", "one tensor")
            raise ValueError(f"{self.manifest.key} is {kinds[self.manifest.single]}, but into is {kinds[single]}")

        # All are checked before the first is written: a model must not be left with tensors of two versions.
        for name, target in targets.items():
            self.check(name, target)
        for _ in in_threads(lambda named: self.read(*named), targets.items(), self._total_size):
            pass  # `read` has no result
        return into

    def some(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return new, whole tensors by name, for the given names."""
        return dict(zip(names, self._join_whole(names, copies=True), strict=True))

    @torch.no_grad()
    def read(self, name: str, target: Tensor) -> None:
        """Fill `target` (of a DTensor, this process's part) with the tensor of this name.

        Raises:
            KeyError, ValueError: see `check`.
            CorruptWeights: the tensor's values differ from those that were put.
        """
        shards = self.check(name, target)
        # Each block of the target is filled from all stored blocks that overlap it, whatever the two layouts.
        for box, values in local_boxes(target):
            self._fill_box(shards, box, values.detach())

    def check(self, name: str, target: Tensor) -> Sequence[Shard]:
        """Check that a tensor can be read into `target`, and return its blocks.

        Raises:
            KeyError: there is no tensor of this name.
            ValueError: its shape differs, or the target has no memory.
        """
        shards = self.manifest.by_name.get(name)
        label = self._describe_tensor(name)
        if shards is None:
            names = list(self.manifest.by_name)
            raise KeyError(f"{label} is not in the version, which has {len(names)} tensors: {names[:3]} ...")
        if shards[0].shape != tuple(target.shape):
            raise ValueError(f"{label} has shape {shards[0].shape}, but into has {tuple(target.shape)}")
        if target.is_meta:
            raise ValueError(f"{label} cannot be read into a tensor on the meta device: it has no memory")
        return shards

    def _fill_box(self, shards: Sequence[Shard], box: Box, values: Tensor) -> None:
        """Fill the `values` of one block of a target, which is the part `box` of a tensor, from the stored blocks."""
        for shard in shards:
            if not (overlap := box.meet(shard.box)):
                continue
            source = shard.view(self.memory[shard.segment])
            target = values[overlap.within(box)]

            # A block that is read as a whole is verified by the pass that copies it.
            if overlap == shard.box and id(shard) not in self._verified:
                self._verify_block(shard, source, copy_and_hash(source, target, of_source=True))
            else:
                self._verify_block(shard, source)
                target.copy_(source[overlap.within(shard.box)])

    @property
    def _total_size(self) -> int:
        """Return the bytes of all blocks together."""
        return sum(shard.box.numel * getattr(torch, shard.dtype).itemsize for shard in self.manifest.shards)

    def _join_whole(self, names: Sequence[str], copies: bool = False) -> Iterator[Tensor]:
        """Yield the whole tensors of these names, in order, joined from their blocks.

        A tensor that is stored as one block is a view of it, unless `copies` are asked for.
        """

        # It runs in the caller's thread, which can reuse memory that was freed: a new thread would touch new pages.
        def make_targets() -> Iterator[tuple[str, Tensor | None]]:
            for name in names:
                shards = self.manifest.by_name[name]
                is_view = len(shards) == 1 and shards[0].segment and not copies
                yield name, None if is_view else torch.empty(shards[0].shape, dtype=getattr(torch, shards[0].dtype))

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
        """Raise CorruptWeights if the checksum of a block's stored `values` differs from the published one.

        Each block is verified once. `digest` is the checksum of the values if it is known already.
        """
        if id(shard) in self._verified:
            return
        if (digest or hash_tensor(values)) != shard.checksum:
            part = "" if shard.box == full_box(shard.shape) else f" {shard.box}"
            raise CorruptWeights(
                f"{self._describe_tensor(shard.name)}{part} does not have the checksum that it was published with"
            )
        self._verified.add(id(shard))

    def _describe_tensor(self, name: str) -> str:
        tensor = f"tensor {name!r}" if name else "the tensor"
        return f"{self.manifest.key} version {self.manifest.version}: {tensor}"
