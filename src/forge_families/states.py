"""States of recurrent layers (linear attention, state spaces, short convolutions) beside the engine's keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer

from forge.engines.cache import WIDTH, KeyValueCache

KINDS = ("conv_states", "recurrent_states")


class RowLayer(LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A layer of transformers' cache: it has states; keys and values pass through, as the engine keeps them."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values of the new tokens, as attention gets them."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return 0: positions are always passed."""
        return 0


class RowsCache(DynamicCache):  # type: ignore[misc]
    """transformers' cache of one forward pass over some rows, on views of the states of these rows."""

    def __init__(self, config: PreTrainedConfig, states: Sequence[Tensor] | None = None) -> None:
        """Start without states, or with those of all layers, in the order of `states`."""
        super().__init__(config=config)
        self.layers = [RowLayer(getattr(layer, "number_of_states", 1)) for layer in self.layers]
        self.kinds = [
            (layer, kind, i) for layer in self.layers for kind in KINDS for i in range(layer.number_of_states)
        ]
        if states is not None:
            self._restore(states)

    def states(self) -> list[Tensor | None]:
        """Return the states by layer, kind and number, (rows, ...) each; None where a layer has none."""
        return [getattr(layer, kind)[i] for layer, kind, i in self.kinds]

    def _restore(self, states: Sequence[Tensor | None]) -> None:
        for (layer, kind, i), state in zip(self.kinds, states, strict=True):
            layer.has_previous_state[i] = True
            if state is None:
                continue
            getattr(layer, kind)[i] = state
            getattr(layer, f"is_{kind}_initialized")[i] = True
            layer.device, layer.dtype = state.device, state.dtype
            if kind == "conv_states":
                layer.conv_kernel_size[i] = state.shape[-1]


class StateCache(KeyValueCache):
    """A cache of the engine with states of recurrent layers, one of each row.

    Results of `read` have the states as further parts. They are of the row's last token, so that only a whole row can
    be read.
    """

    def __init__(self, states: Sequence[Tensor], *args: Any, **options: Any) -> None:
        """Make a cache with states in the shapes of `states`, (1, ...) each, besides keys and values."""
        self.row_bytes = sum(state.nbytes for state in states)
        self.states: list[Tensor] = [state[:0] for state in states]
        super().__init__(*args, **options)
        self._resize_states(0)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows together."""
        return super().nbytes + sum(state.nbytes for state in self.states)

    def capacity(self, length: int) -> int:
        """Return the number of rows with `length` positions each that fit, in addition to the prefill row."""
        if self.limit is None:
            return self.rows
        rows = self.limit // (self.padded_length(length) * self.token_bytes + self.row_bytes) - 1
        return min(self.rows, rows - rows % WIDTH if rows > WIDTH else rows)

    def clear(self) -> None:
        """Free all memory; the next `reserve` allocates again."""
        super().clear()
        self.states = [state[:0].clone() for state in self.states]

    def erase(self, row: int, start: int = 0) -> None:
        """Zero the states, keys and values of a row; from position `start` on only keys and values."""
        super().erase(row, start)
        for state in self.states if start == 0 else ():
            state[row] = 0

    def resize(self, size: int, rows: int) -> None:
        """Reallocate as `KeyValueCache.resize`."""
        last = self.prefill_row
        super().resize(size, rows)
        self._resize_states(rows, last)

    def _resize_states(self, rows: int, last: int = 0) -> None:
        before, self.states = self.states, []
        for state in before:
            after = state.new_zeros(self.prefill_row + 1, *state.shape[1:])
            if len(state):
                after[:rows] = state[:rows]
                after[self.prefill_row] = state[last]
            self.states.append(after)

    def read(self, row: int, length: int) -> tuple[Tensor, ...]:
        """Return keys and values as `KeyValueCache.read`, and views of the row's states, (1, 1, 1, ...) each."""
        return (*super().read(row, length), *(state[row][None, None, None] for state in self.states))

    def fill(self, rows: Sequence[int], parts: Sequence[tuple[Tensor, ...]]) -> None:
        """Copy results of `read` to each of `rows`, the states of the last one."""
        count = len(self.stores)
        super().fill(rows, [part[:count] for part in parts])
        for part in parts[-1:]:
            for state, value in zip(self.states, part[count:], strict=True):
                for row in rows:
                    state[row] = value[0, 0, 0]
