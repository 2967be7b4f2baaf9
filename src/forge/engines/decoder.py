"""Llama, Qwen2 and Qwen3 for inference: a static key-value cache, prefill of whole prompts, one-token decode steps.

Letters in shapes: B active rows, N tokens, C hidden size, H heads, K key-value heads, G = H / K, D head size,
T cache positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.engines.weights import Layer, Weights, head_size


class Cache:
    """Keys and values of every row, (layers, rows, K, T, D) each. T doubles on demand up to `max_seq_len`."""

    def __init__(self, config: Any, rows: int, max_seq_len: int, dtype: torch.dtype, device: torch.device):
        self.max_seq_len = max_seq_len
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, min(256, max_seq_len), head_size(config))
        # Zeros, not empty: positions beyond a row's end are masked, but a NaN there would survive the mask.
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.heads = torch.arange(shape[2], device=device)

    def reserve(self, length: int, rows: int) -> None:
        """Make room for `length` positions. What the first `rows` rows hold is kept."""
        old = self.keys.shape[3]
        if length > old:
            size = min(max(length, 2 * old), self.max_seq_len)
            for name in ("keys", "values"):
                before = getattr(self, name)
                after = before.new_zeros(*before.shape[:3], size, before.shape[4])
                after[:, :rows, :, :old] = before[:, :rows]
                setattr(self, name, after)

    def index(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Where `write` puts tokens: rows and positions (N,) -> (N * K,)."""
        return ((rows[:, None] * len(self.heads) + self.heads) * self.keys.shape[3] + positions[:, None]).flatten()

    def write(self, layer: int, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, (N, K, D) each."""
        for cache, new in ((self.keys, keys), (self.values, values)):
            flat = cache[layer].view(-1, cache.shape[-1])
            flat.index_copy_(0, index, new.reshape(-1, cache.shape[-1]))

    def read(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """A view of one row's first positions, for `fill`."""
        return self.keys[:, row, :, :length], self.values[:, row, :, :length]

    def fill(self, rows: Sequence[int], prefix: tuple[Tensor, Tensor]) -> None:
        """Copy a prefix, keys and values of (layers, K, T, D), into each of `rows`."""
        length = prefix[0].shape[2]
        for row in rows:
            self.keys[:, row, :, :length] = prefix[0]
            self.values[:, row, :, :length] = prefix[1]


class Decoder:
    """The model: `weights` may be replaced between any two calls."""

    def __init__(
        self, config: Any, weights: Weights, rows: int, max_seq_len: int, dtype: torch.dtype, device: torch.device
    ):
        self.weights = weights
        self.device = device
        self.cache = Cache(config, rows, max_seq_len, dtype, device)
        self.H, self.K, self.D = config.num_attention_heads, config.num_key_value_heads, head_size(config)
        self.eps = config.rms_norm_eps
        self.cos, self.sin = rotary_tables(config, max_seq_len, dtype, device)
        self.row_ids = torch.arange(rows, device=device)
        self.steps = torch.arange(max_seq_len, device=device)

    def decode(self, tokens: Tensor, positions: Tensor, length: int) -> Tensor:
        """One token for each of the first B rows: tokens and positions (B,) -> next-token logits (B, V).

        `length` bounds every row's position plus one, and with it the cost of attention.
        """
        rows, cache, G = len(tokens), self.cache, self.H // self.K
        index = cache.index(self.row_ids[:rows], positions)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        unseen = self.steps[:length] > positions[:, None]
        bias = torch.zeros(unseen.shape, dtype=cos.dtype, device=self.device).masked_fill_(unseen, -torch.inf)
        bias = bias.repeat_interleave(self.K, 0)[:, None]
        x = F.embedding(tokens, self.weights.embed)
        for i, layer in enumerate(self.weights.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            cache.write(i, index, k, v)
            # Rows and heads merge into one batch dimension without a copy; the heads of a group share its keys.
            keys, values = (c[i].flatten(0, 1)[: rows * self.K, :length] for c in (cache.keys, cache.values))
            q = q.reshape(rows * self.K, G, self.D)
            scores = torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=self.D**-0.5)
            self._finish_layer(layer, x, torch.bmm(scores.softmax(-1), values).view(rows, -1))
        return self.weights.head(self._norm(x, self.weights.norm))

    def prefill(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], start: int = 0) -> None:
        """Write keys and values of each prompt's tokens into its row; there are no logits.

        The last token of a prompt is left to the first decode step: so the last layer's attention and MLP are never
        needed here. `start` > 0 continues a single prompt whose first `start` tokens are already in its row.
        """
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        inside = torch.arange(longest) < lengths[:, None]
        # Linear layers run on the tokens back to back. Attention sees them padded on the right, which causality
        # hides from every real token; `packed` are the places of the real ones.
        packed = inside.flatten().nonzero().flatten()
        # Kernels are prepared for every new number of tokens: so there are few, the last token being repeated.
        packed = F.pad(packed[None], (0, -len(packed) % 64), "replicate")[0].to(self.device)
        padded = (inside.flatten().cumsum(0) - 1).to(self.device)
        positions = packed % longest + start
        index = self.cache.index(torch.tensor(rows, device=self.device)[packed // longest], positions)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        tokens = torch.tensor([t for p in prompts for t in p], device=self.device)
        x = F.embedding(tokens[padded[packed]], self.weights.embed)
        last = len(self.weights.layers) - 1
        for i, layer in enumerate(self.weights.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            self.cache.write(i, index, k, v)
            if i == last:
                return
            if start:
                k, v = (c[i, rows[0], :, : start + longest][None] for c in (self.cache.keys, self.cache.values))
                q = q.transpose(0, 1)[None]
                seen = self.steps[: start + longest] <= positions[:, None]
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
            else:
                q, k, v = (t[padded].unflatten(0, (-1, longest)).transpose(1, 2) for t in (q, k, v))
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            self._finish_layer(layer, x, out.transpose(1, 2).reshape(-1, self.H * self.D)[packed])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def _qkv(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (N, C) -> q (N, H, D), k and v (N, K, D), rotated."""
        qkv = layer.qkv(self._norm(x, layer.input_norm)).view(len(x), -1, self.D)
        qk, v = qkv.split([self.H + self.K, self.K], 1)
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (self.D,), None, self.eps) * layer.qk_norm
        qk = (qk * cos).addcmul_(qk.roll(self.D // 2, -1), sin)
        return qk[:, : self.H], qk[:, self.H :], v

    def _finish_layer(self, layer: Layer, x: Tensor, attended: Tensor) -> None:
        """Output projection and MLP, added to the residual stream x (N, C) in place."""
        x += layer.output(attended)
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, -1)
        x += layer.down(F.silu(gate).mul_(up))


def rotary_tables(config: Any, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (length, D) each, with transformers' own frequencies for scaled variants.

    The first half of the sines is negated: rotation is then x * cos + roll(x, D / 2) * sin.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope, D = config.rope_parameters, head_size(config)
    if rope["rope_type"] == "default":
        frequencies, scale = 1.0 / rope["rope_theta"] ** (torch.arange(0, D, 2).float() / D), 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    angles = torch.outer(torch.arange(length).float(), frequencies.float())
    cos, sin = angles.cos() * scale, angles.sin() * scale
    tables = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return tables[0].to(device, dtype), tables[1].to(device, dtype)
