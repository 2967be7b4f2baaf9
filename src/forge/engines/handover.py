"""A policy's weights on their way to another process of this host: one piece of shared memory and what is where.

The memory has no name in any folder: it is reached through the process that wrote it, and goes with it however it ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from forge.engines.weights import checked
from forge.weight_layouts import EMBEDDING, HEAD, layout

ALIGNMENT = 64  # bytes

Place = tuple[str, tuple[int, ...], int]  # name, shape, first byte


class Handover:
    """All tensors of a model, checked and in one dtype. `path`, `places` and `dtype` are for `read_handover`."""

    def __init__(
        self, config: Any, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype, version: int, identity: str
    ):
        """Copy the tensors, given under their Hugging Face names.

        ValueError, naming the tensor: an unknown name, a wrong shape, a name given twice, a weight missing. OSError:
        there is not enough memory.
        """
        self.version, self.identity, self.dtype = version, identity, str(dtype).removeprefix("torch.")
        table = layout(config)
        self.places: list[Place] = []
        total = 0
        for part in (part for parts in table.values() for part in parts):
            self.places.append((part.name, part.shape, total))
            size = torch.Size(part.shape).numel() * dtype.itemsize
            total += -(-size // ALIGNMENT) * ALIGNMENT
        self._file = os.memfd_create("forge-weights")
        try:
            os.posix_fallocate(self._file, 0, total)
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
            there = {name: tensor for name, tensor in read_handover(self.path, self.places, self.dtype, shared=True)}
            with torch.no_grad():
                for whole, i, tensor in checked(table, named, config.tie_word_embeddings):
                    there[table[whole][i].name].copy_(tensor)
        except BaseException:
            self.close()
            raise
        if config.tie_word_embeddings:
            # vLLM loads a tied head only under its own name, and is silently wrong without it.
            self.places += [(HEAD, shape, start) for name, shape, start in self.places if name == EMBEDDING]

    def close(self) -> None:
        """Give the memory back, as soon as nobody reads it."""
        os.close(self._file)


def read_handover(path: str, places: list[Place], dtype: str, shared: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything in a handover, as views of its memory; not `shared`, writes to them stay private."""
    memory = torch.UntypedStorage.from_file(path, shared, os.stat(path).st_size)
    kind: torch.dtype = getattr(torch, dtype)
    whole = torch.empty(0, dtype=kind).set_(memory)  # type: ignore[arg-type]
    for name, shape, start in places:
        first = start // kind.itemsize
        yield name, whole[first : first + torch.Size(shape).numel()].view(shape)
