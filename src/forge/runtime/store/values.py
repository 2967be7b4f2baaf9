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

# The tensor, of bytes, that says how the others are nested, with everything but the tensors: of an object, and of a
# state dict, whose parts are keys (`forge.runtime.store.parts`).
STRUCTURE = "__structure__"
STATE_DICT = "__state_dict__"
STRUCTURES = {STRUCTURE, STATE_DICT}


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
        """The block as this package has it. ValueError: its parts have different numbers of dimensions."""
        if len(self.offsets) != len(self.local_shape):
            raise ValueError(f"a TensorSlice has offsets {self.offsets} and local_shape {self.local_shape}")
        return Box(tuple(self.offsets), tuple(self.local_shape))

    def check(self, shape: tuple[int, ...]) -> None:
        """ValueError: the slice is of a tensor with another shape."""
        if self.global_shape and tuple(self.global_shape) != shape:
            raise ValueError(f"the tensor has shape {shape}, and the TensorSlice is of one with {self.global_shape}")
        if len(self.offsets) != len(shape):
            raise ValueError(f"the tensor has shape {shape}, and the TensorSlice has offsets {self.offsets}")


@dataclass(frozen=True, slots=True)
class Leaf:
    """The place of a tensor in a structure."""

    name: str


def are_tensors(value: object) -> bool:
    """Whether a value is a tensor, or a mapping of names to tensors alone, which a store holds as it is."""
    if isinstance(value, Mapping):
        return bool(value) and all(
            isinstance(name, str) and isinstance(part, Tensor) and name not in STRUCTURES
            for name, part in value.items()
        )
    return isinstance(value, Tensor)


def has_parts(value: object) -> bool:
    """Whether a value is a mapping that has nothing but tensors, however nested: they are parts under its key."""
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(part, Tensor) or has_parts(part) for part in value.values())
    return False


def encode(value: object, structure_name: str = STRUCTURE) -> dict[str, Tensor]:
    """Return the tensors of a value by dotted names, and the structure around them.

    Args:
        structure_name: STRUCTURE, or STATE_DICT.

    Raises:
        ValueError: two tensors have the same name, or one has that of a structure.
        pickle.PicklingError, AttributeError, TypeError: a part without tensors cannot be pickled.
    """
    tensors: dict[str, Tensor] = {}

    # Sharded tensors stay tensors, which each rank writes its part of; only what surrounds them is pickled.
    def visit(path: str, part: Any) -> Any:
        if isinstance(part, Tensor):
            name = path or "value"
            if name in tensors or name in STRUCTURES:
                raise ValueError(f"two tensors have the name {name!r}")
            tensors[name] = part
            return Leaf(name)
        if isinstance(part, Mapping):
            return {name: visit(_join(path, name), child) for name, child in part.items()}
        if type(part) in (list, tuple):
            return type(part)(visit(_join(path, index), child) for index, child in enumerate(part))
        return part

    # By value where a class is a program's own or a function's: readers may not be able to import it.
    encoded = cloudpickle.dumps(visit("", value))
    return tensors | {structure_name: torch.from_numpy(np.frombuffer(encoded, np.uint8).copy())}


def decode(tensors: Mapping[str, Tensor]) -> Any:
    """Return the value of `encode`, from all of its tensors; those without a structure are returned as they are."""
    encoded = [tensors[name] for name in STRUCTURES & tensors.keys()]
    if not encoded:
        return dict(tensors)
    # Of a process of this run: the store's folder is its user's alone.
    return filled(pickle.loads(encoded[0].numpy().tobytes()), tensors)


def filled(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a structure with tensors in their places."""
    if isinstance(structure, Leaf):
        return tensors[structure.name]
    if isinstance(structure, dict):
        return {name: filled(child, tensors) for name, child in structure.items()}
    if type(structure) in (list, tuple):
        return type(structure)(filled(child, tensors) for child in structure)
    return structure


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
