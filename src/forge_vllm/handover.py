"""A policy's weights for vLLM's processes, in shared memory."""

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge.engines.weights import checked_parts
from forge.models.weight_layouts import EMBEDDING, HEAD, engine_layout, split_experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ALIGNMENT = 64  # bytes: a cache line, and what vectorised kernels load
TensorLocation = tuple[str, tuple[int, ...], int]  # name, shape, first byte


class Handover:
    """A policy's weights for another process of this host: all tensors, checked and in one dtype, in shared memory.

    The memory is a file in memory (memfd) of the writing process: others open it by that process's path in /proc, and
    it is freed when that process ends. `path`, `locations` and `dtype` are the arguments of `read_handover`.
    """

    def __init__(
        self,
        config: "PreTrainedConfig",
        named_tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        version: int,
        identity: str,
    ):
        """Copy (name, tensor) pairs, by Hugging Face name, to shared memory in `dtype`.

        Raises:
            ValueError: an unknown, duplicate or missing name, or a wrong shape; the message names the tensor.
            OSError: there is not enough memory.
        """
        self.version = version
        self.identity = identity
        self.dtype = str(dtype).removeprefix("torch.")
        table = engine_layout(config)
        self.locations: list[TensorLocation] = []
        total = 0

        for part in (part for parts in table.values() for part in parts):
            self.locations.append((part.name, part.shape, total))
            # Each tensor starts at a multiple of ALIGNMENT.
            size = torch.Size(part.shape).numel() * dtype.itemsize
            total += -(-size // ALIGNMENT) * ALIGNMENT

        self._file = os.memfd_create("forge-weights")
        try:
            os.posix_fallocate(self._file, 0, total)
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
            shared = dict(read_handover(self.path, self.locations, self.dtype, shared=True))
            with torch.no_grad():
                for entry, i, tensor in checked_parts(table, split_experts(named_tensors), config.tie_word_embeddings):
                    shared[table[entry][i].name].copy_(tensor)
        except BaseException:
            self.close()
            raise

        if config.tie_word_embeddings:
            # vLLM loads a tied head only under its own name, and is silently wrong without it.
            self.locations += [(HEAD, shape, start) for name, shape, start in self.locations if name == EMBEDDING]

    def close(self) -> None:
        """Free the memory, once no other process has it open."""
        os.close(self._file)


def read_handover(
    path: str, locations: list[TensorLocation], dtype: str, shared: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) of each tensor in a handover, as a view of its memory.

    Args:
        path, locations, dtype: the attributes of the `Handover`.
        shared: write to the shared memory; by default writes stay private to this process.
    """
    storage = torch.UntypedStorage.from_file(path, shared, os.stat(path).st_size)
    element: torch.dtype = getattr(torch, dtype)
    memory = torch.empty(0, dtype=element).set_(storage)  # type: ignore[arg-type]
    for name, shape, start in locations:
        first = start // element.itemsize
        yield name, memory[first : first + torch.Size(shape).numel()].view(shape)
