"""Values beside tensors: plain objects, and tensors within them, as the tensors that stores hold."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

# The tensor, of bytes, that has everything but the tensors.
STRUCTURE = "__structure__"


@dataclass(frozen=True, slots=True)
class Leaf:
    """The place of a tensor in a structure."""

    name: str


def are_tensors(value: object) -> bool:
    """Whether a value is a tensor, or a mapping of names to such, which a store holds as it is."""
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(name, str) and are_tensors(part) for name, part in value.items())
    return isinstance(value, Tensor)


def encode(value: object) -> dict[str, Tensor]:
    """Return the tensors of a value by dotted names, and the structure around them.

    Raises:
        ValueError: two tensors have the same name.
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
            return {name: visit(f"{path}.{name}" if path else str(name), child) for name, child in part.items()}
        if type(part) in (list, tuple):
            children = enumerate(part)
            return type(part)(visit(f"{path}.{index}" if path else str(index), child) for index, child in children)
        return part

    # By value where a class is a program's own or a function's: readers may not be able to import it.
    encoded = cloudpickle.dumps(visit("", value))
    return tensors | {STRUCTURE: torch.from_numpy(np.frombuffer(encoded, np.uint8).copy())}


def decode(tensors: Mapping[str, Tensor]) -> Any:
    """Return the value of `encode`, from all of its tensors; those without a structure are returned as they are."""
    if STRUCTURE not in tensors:
        return dict(tensors)

    def filled(structure: Any) -> Any:
        if isinstance(structure, Leaf):
            return tensors[structure.name]
        if isinstance(structure, dict):
            return {name: filled(child) for name, child in structure.items()}
        if type(structure) in (list, tuple):
            return type(structure)(map(filled, structure))
        return structure

    # Of a process of this run: the store's folder is its user's alone.
    return filled(pickle.loads(tensors[STRUCTURE].numpy().tobytes()))
