"""Decode with transformers' own modules: attention and cache are the engine's, all else is theirs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.engines.cache import BLOCK, KeyValueCache, round_up
from forge.engines.decoder import QUERIES, Decoder, attention_granule, embedding_bag_indices
from forge.models.architecture import FAMILIES

from .attention import run_model
from .states import RowsCache, StateCache
from .weights import ModuleWeights, Template

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class ModuleDecoder(Decoder):
    """A `Decoder` of any causal model of transformers whose attention goes through transformers' interface.

    Layers whose heads are smaller or fewer than others' are padded to those. With recurrent layers each prompt is
    computed separately, and a row's bits depend on the other rows.
    """

    weights: ModuleWeights  # type: ignore[assignment]

    def __init__(
        self,
        template: Template,
        config: PreTrainedConfig,
        weights: ModuleWeights,
        rows: int,
        max_seq_len: int,
        dtype: torch.dtype,
        device: torch.device,
        record: bool = False,
        cache_bytes: int | None = None,
        granule: int = 16,
    ):
        self.weights = weights
        self.device = device
        self.template = template
        self.vocab = template.vocab
        calls = template.calls
        self.K = max((call.kv_heads for call in calls), default=1)
        self.D = max((call.size for call in calls), default=1)
        if device.type == "cpu" and dtype == torch.float32:
            longest = round_up(max_seq_len, BLOCK)
            shapes = {(call.heads // self.K, call.scale) for call in calls}
            granule = max((attention_granule(group, self.D, scale, longest) for group, scale in shapes), default=16)
        self.granule = granule
        shape = SimpleNamespace(
            model_type=FAMILIES[0], num_hidden_layers=max(len(calls), 1), num_key_value_heads=self.K, head_dim=self.D
        )
        settings: tuple[Any, ...] = (shape, rows, max_seq_len, dtype, device, record, cache_bytes, granule)
        states = [state for state in template.states if state is not None]
        self.cache = StateCache(states, *settings) if states else KeyValueCache(*settings)

        windows = sorted({call.window or 0 for call in calls})
        self.kinds = [(None, window or None) for window in windows]  # type: ignore[misc]
        self.kind_of = [windows.index(call.window or 0) for call in calls]
        self.row_ids = torch.arange(rows, device=device)
        self.cache_positions = torch.arange(self.cache.longest, device=device)
        self.queries = QUERIES if device.type == "cpu" else None
        self.next_call = 0
        self.has_prefixes = not states

    def decode(self, tokens: Tensor, positions: Tensor, length: int) -> Tensor:
        """Run one token of each of the first B rows, as `Decoder.decode`."""
        rows = len(tokens)
        cache = self.cache
        self.blocks = None
        self.length = length
        self.index = cache.index(self.row_ids[:rows], positions)
        self.biases = self._biases_at(positions, length)
        self.keys, self.values = (
            c.flatten(1, 2)[:, : rows * self.K, :length].unbind() for c in (cache.keys, cache.values)
        )
        states = None
        if isinstance(cache, StateCache):
            # The row of a prompt of one token has the states of an earlier sample.
            first = (positions == 0).nonzero()[:, 0]
            for state in cache.states:
                state[first] = 0
            states = self._rows_cache([state[:rows] for state in cache.states])
        return self._run(self.weights.model, tokens[:, None], positions[:, None], states).logits[:, -1].float()

    def prefill(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], starts: Sequence[int] = ()) -> None:
        """Write keys, values and states of each prompt into its row of the cache, as `Decoder.prefill`."""
        starts = starts or [0] * len(prompts)
        base = self.weights.model.base_model
        cache = self.cache
        if not isinstance(cache, StateCache):
            self._prefill(base, prompts, rows, starts, None)
            return
        for prompt, row, start in zip(prompts, rows, starts, strict=True):
            size = len(prompt) if self.template.continues or not start else 1
            for first in range(0, len(prompt), size):
                position = start + first
                states = self._rows_cache([state[row : row + 1] for state in cache.states] if position else None)
                self._prefill(base, [prompt[first : first + size]], [row], [position], states)
                computed = [state for state in states.states() if state is not None]
                for state, value in zip(cache.states, computed, strict=True):
                    state[row] = value[0]

    def _prefill(
        self,
        base: nn.Module,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        starts: Sequence[int],
        states: RowsCache | None,
    ) -> None:
        tokens, positions, token_rows, self.index, self.blocks = self._plan_prompts(prompts, rows, starts)
        self.real = len(token_rows)
        if states is not None:  # padding would change them
            tokens, positions = tokens[: self.real], positions[: self.real]
        self._run(base, tokens[None], positions[None], states)

    def _rows_cache(self, states: Sequence[Tensor] | None) -> RowsCache:
        if states is None:
            return RowsCache(self.template.config)
        remaining = iter(states)
        return RowsCache(
            self.template.config, [None if like is None else next(remaining) for like in self.template.states]
        )

    def _run(self, module: nn.Module, tokens: Tensor, positions: Tensor, states: RowsCache | None) -> Any:
        self.next_call = 0
        self.tables = self.cache.tables()
        return run_model(self, module, tokens, positions, states)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: Any = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Compute the next attention call, as `forge_families.attention.Attention`."""
        slot = self.next_call
        self.next_call += 1
        size = value.shape[3]
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        query, key, value = (F.pad(x, (0, self.D - x.shape[3])) for x in (query, key, value))
        if key.shape[1] < self.K:
            key, value = (x.repeat_interleave(self.K // x.shape[1], 1) for x in (key, value))
        if self.blocks is None:
            attended = self._attend_step(slot, query, key, value, scale, softcap, s_aux)
        else:
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            self.cache.write(self.tables[slot], self.index, k[: self.real], v[: self.real])
            attend = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=True)
            if softcap is not None or s_aux is not None:
                attend = partial(attend_capped, scale=scale, softcap=softcap, sinks=s_aux)
            attended = self._attend_blocks(self.blocks, slot, self.kind_of[slot], q, attend)[None]
        return attended[..., :size]

    def _attend_step(
        self,
        slot: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return (B, 1, H, D) of one token of each row."""
        rows = len(query)
        self.cache.write(self.tables[slot], self.index, key[:, :, 0], value[:, :, 0])
        q = query.reshape(rows * self.K, -1, self.D)
        keys = self.keys[slot].transpose(1, 2)
        bias = self.biases[self.kind_of[slot]]
        if softcap is None:
            scores = torch.baddbmm(bias, q, keys, alpha=scale)
        else:
            scores = torch.bmm(q, keys).mul_(scale / softcap).tanh_().mul_(softcap).add_(bias)
        if sinks is not None:
            sink = sinks.to(scores.dtype).view(self.K, -1, 1).repeat(rows, 1, 1)
            scores = torch.cat([scores, sink], -1)
        probs = scores.softmax(-1)[..., : self.length]
        if self.device.type == "cpu":
            bag_indices = embedding_bag_indices(rows * self.K, q.shape[1], self.length, self.cache.length)
            weights = probs.reshape(-1)
            attended = torch.embedding_bag(self.tables[slot][1], *bag_indices, mode=0, per_sample_weights=weights)[0]
        else:
            attended = torch.bmm(probs, self.values[slot])
        return attended.view(rows, 1, -1, self.D)


def attend_capped(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    attn_mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention (P, H, N, D) with scores capped at +-`softcap`, and with sinks (H,).

    A sink is a further score without a value.

    Args:
        queries: (P, H, N, D). keys, values: (P, K, T, D).
        attn_mask: (N, T), added to the scores.
    """
    keys, values = (x.repeat_interleave(queries.shape[1] // x.shape[1], 1) for x in (keys, values))
    scores = queries @ keys.transpose(2, 3) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores + attn_mask
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    return scores.softmax(-1)[..., : keys.shape[2]] @ values
