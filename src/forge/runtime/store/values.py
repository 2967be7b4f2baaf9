"""Values beside tensors: nested state dicts and plain objects as tensors, which is what stores hold."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from ...system.boxes import Box

# The tensor, of bytes, that says how the others are nested, with everything but the tensors.
STRUCTURE = "__structure__"


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A block of a tensor, by TorchStore's names.

    Attributes:
        offsets, local_shape: where it begins and its size, in each dimension.
        global_shape: of the whole tensor.
        coordinates, mesh_shape: not used, a block is where its offsets say.
    """

    offsets: tuple[int, ...]
    coordinates: tuple[int, ...] | None = None
    global_shape: tuple[int, ...] = ()
    local_shape: tuple[int, ...] = ()
    mesh_shape: tuple[int, ...] | None = None

    @property
    def box(self) -> Box:
        """The block as this package has it."""
        return Box(tuple(self.offsets), tuple(self.local_shape))


@dataclass(frozen=True, slots=True)
class Leaf:
    """The place of a tensor in a structure."""

    name: str


def are_tensors(value: object) -> bool:
    """Whether a value is a tensor or a mapping that has nothing but tensors, however nested."""
    if isinstance(value, Mapping):
        return bool(value) and all(are_tensors(part) for part in value.values())
    return isinstance(value, Tensor)


def encode(value: object) -> dict[str, Tensor]:
    """Return the tensors of a value by dotted names, and the structure around them.

    Raises:
        ValueError: two tensors have the same name, or one has that of the structure.
        pickle.PicklingError, AttributeError, TypeError: a part without tensors cannot be pickled.
    """
    tensors: dict[str, Tensor] = {}

    # Sharded tensors stay tensors, which each rank writes its part of; only what surrounds them is pickled.
    def visit(path: str, part: Any) -> Any:
        if isinstance(part, Tensor):
            name = path or "value"
            if name in tensors or name == STRUCTURE:
                raise ValueError(f"two tensors have the name {name!r}")
            tensors[name] = part
            return Leaf(name)
        if isinstance(part, Mapping):
            return {name: visit(_join(path, name), child) for name, child in part.items()}
        if type(part) in (list, tuple):
            return type(part)(visit(_join(path, index), child) for index, child in enumerate(part))
        return part

    # By value where a class is a program's own or a function's: readers may not be able to import it.
    structure = cloudpickle.dumps(visit("", value))
    return tensors | {STRUCTURE: torch.from_numpy(np.frombuffer(structure, np.uint8).copy())}


def decode(tensors: Mapping[str, Tensor]) -> Any:
    """Return the value of `encode`, from all of its tensors; those without a structure are returned as they are."""
    if STRUCTURE not in tensors:
        return dict(tensors)

    def visit(part: Any) -> Any:
        if isinstance(part, Leaf):
            return tensors[part.name]
        if isinstance(part, dict):
            return {name: visit(child) for name, child in part.items()}
        if type(part) in (list, tuple):
            return type(part)(map(visit, part))
        return part

    # Of a process of this run: the store's folder is its user's alone.
    return visit(pickle.loads(tensors[STRUCTURE].numpy().tobytes()))


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
