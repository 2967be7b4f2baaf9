"""Reads a checkpoint without running code that its files may hold: only tensors, plain data and forge's own types.

torch.distributed.checkpoint unpickles its metadata, and values that are not tensors, without restrictions, and a pickle
may call anything. A checkpoint may come from another person.

torch's own writer of safetensors, which needs no pickle, is not used: it copies all that a rank writes in memory
(602 MB for a state of 600 MB, against 1 MB of the writer that is used; torch 2.13).
"""

import io
import pickle
import re
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from numpy._core.multiarray import _reconstruct, scalar
from torch.distributed.checkpoint import filesystem as dcp_filesystem, metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from .. import types

# What a checkpoint may hold alongside tensors and plain data: rollouts, and the arrays of verifiers that learn.
ALLOWED: tuple[type, ...] = (
    types.Completion,
    types.Conversation,
    types.Episode,
    types.Group,
    types.Origin,
    types.Pair,
    types.Prompt,
    types.Sample,
    types.Sampling,
    types.Seen,
    types.Turn,
    set,
    frozenset,
)
_NUMBERS = "?bBhHiIlLqQefdgFDG"  # numpy's codes of number types
_ARRAYS: tuple[Any, ...] = (np.ndarray, np.dtype, *{type(np.dtype(code)) for code in _NUMBERS}, _reconstruct, scalar)
_METADATA = {
    *((cls.__module__, cls.__name__) for cls in vars(dcp_metadata).values() if isinstance(cls, type)),
    (dcp_filesystem.__name__, "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
}


class UnsafeCheckpoint(ValueError):
    """Error: a checkpoint file has objects of types that are not allowed, because loading them could run code."""


def dump_plain(value: Any, name: str) -> bytes:
    """Return the bytes that `torch.save` writes for a value, checked to be readable by `load_plain`.

    Args:
        name: of the file, for messages.

    Raises:
        UnsafeCheckpoint: the value holds something else than tensors, arrays, plain data and rollouts.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    load_plain(buffer, name)
    return buffer.getvalue()


def load_plain(file: Path | io.BytesIO, name: str = "a value in a shard") -> Any:
    """Return what a file of `torch.save` holds, if that is only tensors, arrays, plain data and rollouts.

    Args:
        name: of the value, for messages, if `file` is not a path.

    Raises:
        UnsafeCheckpoint: the file holds something else, which is not read.
    """
    with torch.serialization.safe_globals([*ALLOWED, *_ARRAYS]):
        try:
            return torch.load(file, weights_only=True)
        except pickle.UnpicklingError as error:
            name = str(file) if isinstance(file, Path) else name
            unsafe_class = re.search(r"GLOBAL (\S+)", str(error))
            reason = unsafe_class[1] if unsafe_class else str(error).splitlines()[0]
            raise UnsafeCheckpoint(f"{name} holds more than tensors and plain data: {reason}") from None


class Reader(dcp.FileSystemReader):
    """Checkpoint reader that loads metadata with the classes of torch's own metadata only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata, read without running code from it.

        Raises:
            UnsafeCheckpoint: it names a class that no metadata needs.
        """
        path = Path(self.path) / ".metadata"
        with path.open("rb") as file:
            metadata = _Unpickler(file, path).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Planner(dcp.DefaultLoadPlanner):
    """Load planner that reads values other than tensors as plain data."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Read an object as plain data, then load it as the base class does."""
        data = io.BytesIO()
        torch.save(load_plain(value), data)
        data.seek(0)
        super().load_bytes(read_item, data)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # how early releases of Python 3.11 write enumerations
            return self._enum_member
        if module == "pathlib._local":  # as Python 3.13 names it
            module = "pathlib"
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _METADATA:
            return super().find_class(module, name)
        raise UnsafeCheckpoint(
            f"{self._path} names {module}.{name}, which checkpoints never need: it is not loaded, because it could "
            "run code"
        )

    def _enum_member(self, kind: Any, name: str) -> Enum:
        if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
            return kind[name]
        raise UnsafeCheckpoint(
            f"{self._path} names an attribute {name!r}, which checkpoints never need: it is not loaded"
        )
