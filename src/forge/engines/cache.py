"""Keys and values of the running sequences of an engine, within a budget of memory."""

import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from ..config.plugin import resolve
from ..models.architecture import is_native, sparse_layers
from ..models.weight_layouts import head_size
from ..types import UNKNOWN_EXPERT

BLOCK = 128  # the number of positions of a row is a multiple of it
WIDTH = 8  # rows are padded to a multiple: kernels are prepared for every new number of rows


def round_up(count: int, multiple: int) -> int:
    """Return `count`, rounded up to the next multiple of `multiple`.

    >>> round_up(130, 128)
    256
    """
    return -(-count // multiple) * multiple


class KeyValueCache:
    """Cache of the keys and values of every row, (layers, rows, K, T, D) each: K key-value heads, T positions, D head
    size.

    T doubles on demand up to `max_seq_len`. One more row after those that decode, the `prefill_row`, is for long
    prompts computed in pieces.

    Args:
        rows: the number of rows that decode, without a `limit`.
        record: also store the `choices` of experts, (layers with experts, rows, 1, T, k): k experts of each token,
            `UNKNOWN_EXPERT` where they were not computed.
        limit: bytes; there are then as many rows, at most `rows`, as fit with T positions. For example 40 GB and
            114,688 bytes a token: 256 rows of 1,280 positions, or 64 of 4,096.
        granule: decoding reads a multiple of this many positions.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        rows: int,
        max_seq_len: int,
        dtype: torch.dtype,
        device: torch.device,
        record: bool = False,
        limit: int | None = None,
        granule: int = 1,
    ):
        heads = config.num_key_value_heads
        self.rows, self.limit = rows, limit
        self.heads = torch.arange(heads, device=device)
        self.longest = round_up(max_seq_len, BLOCK)
        self.min_length = min(2 * BLOCK, self.longest)
        self.step = round_up(granule, BLOCK)
        self.token_bytes = token_bytes(config, dtype, record)

        self.prefill_row = self.capacity(self.min_length)
        shape = config.num_hidden_layers, self.prefill_row + 1, heads, self.min_length, head_size(config)

        # Zeros, not empty: positions beyond a row's end are masked, but a NaN there would survive the mask.
        self.keys, self.values = (make_zeros(shape, dtype, device) for _ in range(2))
        self.stores = ["keys", "values"]

        if record:
            shape = len(sparse_layers(config)), self.prefill_row + 1, 1, self.min_length, config.num_experts_per_tok
            self.choices = torch.full(shape, UNKNOWN_EXPERT, dtype=torch.uint8, device=device)
            self.stores.append("choices")

    @property
    def length(self) -> int:
        """Return T, the number of positions of a row."""
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows of the cache together."""
        return sum(getattr(self, name).nbytes for name in self.stores)

    def capacity(self, length: int) -> int:
        """Return the number of rows with `length` positions each that fit, in addition to the prefill row."""
        if self.limit is None:
            return self.rows
        rows = self.limit // (self.padded_length(length) * self.token_bytes) - 1  # without the prefill row
        return min(self.rows, rows - rows % WIDTH if rows > WIDTH else rows)

    def padded_length(self, length: int) -> int:
        """Return the number of positions that a row of `length` tokens needs: the next multiple of `step`."""
        return min(round_up(length, self.step), self.longest)

    def clear(self) -> None:
        """Free all memory; the next `reserve` allocates again."""
        for name in self.stores:
            setattr(self, name, getattr(self, name)[:, :, :, :0].clone())

    def erase(self, row: int, start: int = 0) -> None:
        """Zero the keys and values of a row from position `start` on.

        With damaged weights they may be NaN, which the mask of the row's next sample would not remove.
        """
        self.keys[:, row, :, start:] = 0
        self.values[:, row, :, start:] = 0

    def reserve(self, length: int, rows: int, max_length: int | None = None) -> None:
        """Ensure capacity for at least `length` positions a row; reallocate if the capacity is smaller.

        The first `rows` rows and the prefill row keep their contents.

        Args:
            max_length: the most positions that one of these rows may ever need: with a limit no more are allocated.
        """
        length = round_up(length, BLOCK)
        if length <= self.length:
            return
        # The number doubles, so that each position is copied only a few times.
        size = min(max(length, 2 * self.length, self.min_length), self.longest)
        if self.limit is not None and max_length is not None:
            size = max(length, min(size, self.padded_length(max_length)))
        self.resize(size, rows)

    def resize(self, size: int, rows: int) -> None:
        """Reallocate for `size` positions a row, with as many rows as fit then.

        The first `rows` rows and the prefill row keep their contents.
        """
        capacity = self.capacity(size)
        length = min(size, self.length)  # positions that both have
        for name in self.stores:
            old: Tensor = getattr(self, name)
            shape = old.shape[0], capacity + 1, old.shape[2], size, old.shape[4]
            running = old[:, :rows, :, :length]
            prefilled = old[:, self.prefill_row, :, :length]

            if self.limit is not None:
                # The contents wait in host memory: old and new tensors together would exceed the limit.
                running = running.to("cpu", copy=True)
                prefilled = prefilled.to("cpu", copy=True)
                old = old[:, :0].clone()
                setattr(self, name, old)

            new = make_zeros(shape, old.dtype, old.device)
            new[:, :rows, :, :length] = running
            new[:, capacity, :, :length] = prefilled
            setattr(self, name, new)

        self.prefill_row = capacity

    def index(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the table entries (N * K,) in which `write` stores tokens of the given rows and positions, (N,)
        each."""
        return ((rows[:, None] * len(self.heads) + self.heads) * self.length + positions[:, None]).flatten()

    def tables(self) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of each layer as views with all rows in one dimension, (rows * K * T, D) each."""
        keys, values = (store.flatten(1, 3).unbind() for store in (self.keys, self.values))
        return list(zip(keys, values, strict=True))

    @staticmethod
    def write(table: tuple[Tensor, Tensor], index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of N tokens, (N, K, D) each, in a layer's entry of `tables`, at `index`."""
        table[0].index_copy_(0, index, keys.flatten(0, 1))
        table[1].index_copy_(0, index, values.flatten(0, 1))

    def write_choices(self, rows: Tensor, positions: Tensor, choices: Sequence[Tensor]) -> None:
        """Record the experts of N tokens, if the cache records experts.

        Args:
            rows, positions: (N,), of the tokens.
            choices: (N, k) for each layer with experts, in order; for omitted last layers `UNKNOWN_EXPERT` is recorded.
        """
        if "choices" in self.stores:
            self.choices[:, rows, 0, positions] = UNKNOWN_EXPERT
            if choices:
                self.choices[: len(choices), rows, 0, positions] = torch.stack(list(choices)).byte()

    def experts(self, row: int, tokens: int, earlier: np.ndarray | None = None) -> np.ndarray | None:
        """Return the experts of a row's first `tokens` tokens, as `Completion.experts`; None if they are not recorded.

        The last token is not in the cache yet: its experts are unknown.

        Args:
            earlier: the result when this sample was preempted: the tokens until then were computed again as a prompt,
                which skips the last layer, so that its experts are taken from there.
        """
        if "choices" not in self.stores:
            return None
        cached_choices = self.choices[:, row, 0, : tokens - 1].transpose(0, 1)
        experts = F.pad(cached_choices, (0, 0, 0, 0, 0, 1), value=UNKNOWN_EXPERT).cpu().numpy()
        if earlier is not None:
            recomputed = experts[: len(earlier)]
            np.copyto(recomputed, earlier, where=recomputed == UNKNOWN_EXPERT)
        return experts

    def read(self, row: int, length: int) -> tuple[Tensor, ...]:
        """Return the first `length` positions of a row as views, for `fill`: keys, values and, if recorded, choices."""
        return tuple(getattr(self, name)[:, row, :, :length] for name in self.stores)

    def fill(self, rows: Sequence[int], parts: Sequence[tuple[Tensor, ...]]) -> None:
        """Copy consecutive results of `read` into each of `rows`, from position 0 on."""
        start = 0
        for part in parts:
            end = start + part[0].shape[2]
            for name, values in zip(self.stores, part, strict=True):
                for row in rows:
                    getattr(self, name)[:, row, :, start:end] = values
            start = end


def make_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros, which on a CPU allocates memory only as it is written, a page at a time: most rows of a
    cache never reach their last position, and with few prompts most rows are never used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


def state_bytes(config: PreTrainedConfig) -> int:
    """Return the bytes of one row's states of recurrent layers, which it has at any length."""
    return 0 if is_native(config) else resolve("forge_families.sizes:measure_model", "model")(config).states


def token_bytes(config: PreTrainedConfig, dtype: torch.dtype, record: bool = False) -> int:
    """Return the bytes of one token of one row in a model's cache; with `record` including its choices of experts."""
    if not is_native(config):
        return resolve("forge_families.sizes:token_bytes", "model")(config, dtype)  # type: ignore[no-any-return]
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size(config)
    return numbers * dtype.itemsize + (len(sparse_layers(config)) * config.num_experts_per_tok if record else 0)
