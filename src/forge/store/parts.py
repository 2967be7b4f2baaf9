"""One rank's side of a put: which blocks it writes, and how ranks become a version together."""

from __future__ import annotations

import json
import operator
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..files import write_atomic
from . import errors
from .boxes import Box, local_boxes, whole, writes
from .manifest import Manifest, Shard, copy_and_hash
from .segments import ALIGNMENT

# After this long nobody waits any more for the outcome of a put.
ABANDONED = 3600.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who puts together: this one of `world`. `group` is a name that all of them know, and nobody else."""

    rank: int = 0
    world: int = 1
    group: str = ""


_group: tuple[Any, str] | None = None
_naming = threading.Lock()


def ranks_of(tensors: Mapping[str, Tensor]) -> Ranks:
    """All ranks of the process group if one of the tensors is spread over them, else this process alone.

    The first call in a process group is a collective.
    """
    global _group
    spread = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    if not spread or not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks()
    with _naming:
        if _group is None or _group[0] is not dist.group.WORLD:
            named = [uuid4().hex]
            dist.broadcast_object_list(named, src=0)
            _group = dist.group.WORLD, named[0]
    return Ranks(dist.get_rank(), dist.get_world_size(), _group[1])


def flatten(value: Any) -> tuple[dict[str, Tensor], bool]:
    """Tensors by name, those of nested mappings by dotted names, and whether it is one tensor without a name.

    Raises:
        TypeError: something is no tensor; names it.
        ValueError: there is no tensor, or two have one name.
    """
    if isinstance(value, Tensor):
        return {"": value}, True
    found: dict[str, Tensor] = {}

    def visit(at: str, part: Any) -> None:
        if isinstance(part, Mapping):
            for name, below in part.items():
                visit(f"{at}.{name}" if at else str(name), below)
        elif not isinstance(part, Tensor):
            raise TypeError(f"only tensors can be stored; {at or 'the value'!r} is a {type(part).__name__}")
        elif at in found:
            raise ValueError(f"two tensors have the name {at!r}")
        else:
            found[at] = part

    visit("", value)
    if not found:
        raise ValueError("there is no tensor in what is to be stored")
    return found, False


@dataclass(frozen=True, slots=True)
class Block:
    """A block to write: its place in the tensor and its values, None where there are none."""

    shard: Shard
    values: Tensor | None

    @property
    def size(self) -> int:
        """Bytes in the segment."""
        if self.values is None:
            return 0
        length = self.values.numel() * getattr(torch, self.shard.dtype).itemsize
        return -(-length // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Part:
    """What one rank puts of a version: of copies one, of plain tensors beside DTensors rank 0's."""

    key: str
    version: int | None
    single: bool
    ranks: Ranks
    blocks: tuple[Block, ...]

    @classmethod
    def of(
        cls,
        key: str,
        value: Any,
        version: int | None = None,
        dtype: torch.dtype | None = None,
        ranks: Ranks | None = None,
    ) -> Part:
        """This rank's part of a value, floating-point tensors as `dtype`; TypeError and ValueError as in `flatten`, or
        for a version that is not a whole number from 0."""
        version = None if version is None else operator.index(version)
        if version is not None and version < 0:
            raise ValueError(f"a version is a number from 0, got {version}")
        tensors, single = flatten(value)
        ranks = ranks or ranks_of(tensors)
        blocks: list[Block] = []
        for name, tensor in tensors.items():
            to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            shard = Shard(name, str(to).removeprefix("torch."), tuple(tensor.shape), whole(tensor.shape), "", 0, "")
            if not tensor.numel():
                blocks += [Block(shard, None)] if ranks.rank == 0 else []
            elif writes(tensor) and (isinstance(tensor, DTensor) or ranks.rank == 0):
                held: list[tuple[Box, Tensor]] = local_boxes(tensor)
                blocks += [Block(replace(shard, box=box), values.detach()) for box, values in held]
        return cls(key, version, single, ranks, tuple(blocks))

    @property
    def size(self) -> int:
        """Bytes of a segment that holds it."""
        return sum(block.size for block in self.blocks)

    @torch.no_grad()
    def write(self, segment: str, memory: Tensor) -> Manifest:
        """Write the blocks one behind the other into the bytes of a segment."""
        shards: list[Shard] = []
        start = 0
        for block in self.blocks:
            shard = block.shard
            if block.values is not None:
                shard = replace(shard, segment=segment, start=start)
                shard = replace(shard, checksum=copy_and_hash(block.values, shard.view(memory)))
            shards.append(shard)
            start += block.size
        return Manifest(self.key, self.version, self.single, tuple(shards))


class Attempt:
    """The meeting place of the ranks of one put. Every rank adds its part; the last one settles what becomes of it.

    A rank joins the first of the group's attempts after the last one that it has been in, those left out whose time is
    over; those too that another rank has given up, to hear of it. If there is none it opens one. To be made, like
    everything that writes here, under the store's lock.
    """

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._ranks = ranks
        self._all = folder / "attempts"
        self._all.mkdir(parents=True, exist_ok=True)
        numbers = sorted(int(path.name.rpartition("-")[2]) for path in self._all.glob(f"{ranks.group}-*"))
        mine = next((number for number in reversed(numbers) if self._been(number)), 0)
        ahead = (number for number in numbers if number > mine and self._concerns(number))
        self._place = self._at(next(ahead, max(numbers, default=0) + 1))
        self._place.mkdir(exist_ok=True)
        for other in self._all.iterdir():
            if time.time() - other.stat().st_mtime > ABANDONED:
                shutil.rmtree(other)

    def add(self, part: Manifest) -> bool:
        """Write this rank's part; whether all are there now."""
        write_atomic(self._part(self._ranks.rank), part.to_json())
        return not self.absent() and not self._result.exists()

    def give_up(self, reason: str) -> None:
        """This rank has no part to add: the put has failed for all."""
        self._gone(self._ranks.rank).touch()
        if not self._result.exists():
            self.end(["IncompleteVersion", reason])

    def settle(self, publish: Callable[[list[Manifest]], int]) -> None:
        """Publish the parts and leave word of the outcome for all ranks."""
        try:
            outcome: Any = publish([Manifest.from_json(part.read_text()) for part in map(self._part, self._everyone)])
        except Exception as error:  # whatever it was, every rank must hear of it
            outcome = [type(error).__name__, str(error)]
        self.end(outcome)
        for earlier in self._all.glob(f"{self._ranks.group}-*"):
            if earlier != self._place:  # every rank is here, and has read what became of those
                shutil.rmtree(earlier)

    def end(self, outcome: Any) -> None:
        """Leave word: a version, or the kind and text of an error."""
        write_atomic(self._result, json.dumps(outcome))

    def outcome(
        self, locked: Callable[[], AbstractContextManager], publish: Callable[[list[Manifest]], int], timeout: float
    ) -> int:
        """Wait for the last rank; the published version.

        Raises:
            IncompleteVersion: a rank did not write within `timeout` seconds, or the version is not whole.
            VersionConflict, OSError: see `VersionStore.put`.
        """
        end, pause = time.monotonic() + timeout, 0.0005
        while not self._result.exists():
            late = time.monotonic() > end
            if late or not self.absent():
                with locked():
                    # Under the lock: the last rank settles before it lets go, unless it is killed in between.
                    if not self._result.exists():
                        if not self.absent():
                            self.settle(publish)
                        elif late:  # nobody may publish what this rank now lets go of
                            names = ", ".join(map(str, self.absent()))
                            text = f"rank {self._ranks.rank} waited {timeout:g} s for what ranks {names} should put"
                            self.end(["IncompleteVersion", text])
                continue
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        outcome = json.loads(self._result.read_text())
        if isinstance(outcome, int):
            return outcome
        kind, text = outcome
        raise {"OSError": OSError}.get(kind, getattr(errors, kind, errors.IncompleteVersion))(text)

    def absent(self) -> list[int]:
        """The ranks that have not added their parts."""
        return [rank for rank in self._everyone if not self._part(rank).exists()]

    def _at(self, number: int) -> Path:
        return self._all / f"{self._ranks.group}-{number}"

    def _been(self, number: int) -> bool:
        """Whether this rank added its part to an attempt, or gave it up."""
        return any((self._at(number) / f"{self._ranks.rank}.{end}").exists() for end in ("part", "gone"))

    def _concerns(self, number: int) -> bool:
        place = self._at(number)
        return not (place / "outcome").exists() or any(place.glob("*.gone"))

    @property
    def _everyone(self) -> range:
        return range(self._ranks.world)

    @property
    def _result(self) -> Path:
        return self._place / "outcome"

    def _part(self, rank: int) -> Path:
        return self._place / f"{rank}.part"

    def _gone(self, rank: int) -> Path:
        return self._place / f"{rank}.gone"
