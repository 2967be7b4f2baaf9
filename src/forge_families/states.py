"""States of recurrent layers (linear attention, state spaces, short convolutions) and the engine's keys and values."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer

from forge.engines.cache import KeyValueCache

KINDS = ("conv_states", "recurrent_states")
States = list[Tensor | None]  # of some rows, (rows, ...) each, by layer, kind and number; None where there are none


class RowLayer(LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """Layer of a transformers cache with recurrent states; keys and values pass through, because the engine stores
    them."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values of the new tokens, as attention gets them."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return 0 as sequence length, because positions are always passed."""
        return 0


class RowStates(DynamicCache):  # type: ignore[misc]
    """Transformers' cache of one forward pass over some rows, on views of the states of these rows."""

    def __init__(self, config: PreTrainedConfig, states: States | None = None) -> None:
        """Start with these states, which the forward pass replaces in place; None: without any."""
        super().__init__(config=config)
        self.layers = [RowLayer(getattr(layer, "number_of_states", 1)) for layer in self.layers]
        self.slots = [(layer, kind, i) for layer in self.layers for kind in KINDS for i in layer.has_previous_state]
        for (layer, kind, i), state in zip(self.slots, states or (), strict=False):
            layer.has_previous_state[i] = True
            if state is not None:
                getattr(layer, kind)[i] = state
                getattr(layer, f"is_{kind}_initialized")[i] = True
                layer.device, layer.dtype = state.device, state.dtype
            if kind == "conv_states" and state is not None:
                layer.conv_kernel_size[i] = state.shape[-1]

    def read(self) -> States:
        """Return the recurrent states after the forward pass."""
        return [getattr(layer, kind)[i] for layer, kind, i in self.slots]


class StateCache(KeyValueCache):
    """A cache of the engine with states of recurrent layers: one row of each for every row, and for the prefill row.

    Results of `read` have the states as further parts. They are of the row's last token, so that only whole rows can be
    read.
    """

    def __init__(self, like: States, rows: int, limit: int | None, **options: Any) -> None:
        """Make a cache with states in the shapes of `like`, (1, ...) each.

        Args:
            limit: bytes, also of the states, which all rows have from the start.
        """
        self.like = like
        self.allocate(rows)
        super().__init__(rows=rows, limit=None if limit is None else max(0, limit - self.state_bytes), **options)

    def allocate(self, rows: int) -> None:
        """Allocate the recurrent states of all rows as zeros."""
        self.states = [None if s is None else s.new_zeros(rows + 1, *s.shape[1:]) for s in self.like]
        self.state_bytes = sum(state.nbytes for state in self.states if state is not None)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows together."""
        return super().nbytes + self.state_bytes

    def views(self, row: int, end: int | None = None) -> States:
        """Return views of the states of a row, or of rows `row` to `end` - 1, (rows, ...) each."""
        first = self.rows if row == self.prefill_row else row
        return [None if state is None else state[first : end or first + 1] for state in self.states]

    def store(self, row: int, states: States) -> None:
        """Copy the states (1, ...) of a row to another one."""
        for view, state in zip(self.views(row), states, strict=True):
            if view is not None:
                view.copy_(state)

    def clear(self) -> None:
        """Free all memory; the next `reserve` allocates again."""
        super().clear()
        self.allocate(-1)

    def resize(self, size: int, rows: int) -> None:
        """Reallocate as `KeyValueCache.resize`."""
        super().resize(size, rows)
        if not self.state_bytes:
            self.allocate(self.rows)

    def erase(self, row: int, start: int = 0) -> None:
        """Zero the states, keys and values of a row; from position `start` on only keys and values."""
        super().erase(row, start)
        for view in self.views(row) if start == 0 else ():
            if view is not None:
                view.zero_()

    def read(self, row: int, length: int) -> tuple[Tensor, ...]:
        """Return keys and values as `KeyValueCache.read`, and views of the row's states."""
        return (*super().read(row, length), *(view[None, None] for view in self.views(row) if view is not None))

    def fill(self, rows: Sequence[int], parts: Sequence[tuple[Tensor, ...]]) -> None:
        """Copy results of `read` to each of `rows`, the states of the last one."""
        count = len(self.stores)
        super().fill(rows, [part[:count] for part in parts])
        for row in rows if parts else ():
            states = iter(parts[-1][count:])
            self.store(row, [None if like is None else next(states)[0, 0] for like in self.like])
