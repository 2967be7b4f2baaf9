"""Decoders of `forge.models.FAMILIES` for inference: a static key-value cache, prefill of prompts, one-token steps.

Letters in shapes: B active rows, N tokens, C hidden size, H heads, K key-value heads, G = H / K, D head size,
T cache positions, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..models.architecture import attention_kinds, rotary_parameters
from ..models.exact import (
    ACTIVATIONS,
    attend_by_query,
    attention_granule,
    bias_of,
    embedding_bag_indices,
    rms_norm,
    rms_norm_wide,
    rotate_heads,
)
from ..models.weight_layouts import head_size
from .cache import BLOCK, KeyValueCache, round_up
from .experts import Experts
from .weights import Layer, Weights

FUSED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
# Prompt tokens in one attention call: a multiple of the kernels' blocks, and few enough that masked scores cost little.
QUERIES = 64


class Decoder:
    """Forward pass of a decoder-only model, whose `weights` may be replaced between any two calls.

    On a CPU in float32 it is batch invariant, bit for bit: a row's result does not depend on other rows or their number
    (2 to 8, or a multiple of 8), on the pieces of its prompt, or on the length of the cache. Where kernels round
    differently with the shape, products use blocks of a fixed shape, and attention reads multiples of `granule`.

    Args:
        rows: maximum number of rows that decode together.
        max_seq_len: maximum number of tokens of a sequence, prompt and answer together.
        dtype: of the weights, and of the cache unless `exact`.
        record: record the experts of each token, for the trainer to replay; see `KeyValueCache`.
        cache_bytes: maximum bytes of keys and values; None: as many as all rows need.
        granule: attention reads a multiple of this many positions; on a CPU in float32 it is measured instead.
        exact: compute as the trainer does with `training.exact`, rounding in the same places.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        weights: Weights,
        rows: int,
        max_seq_len: int,
        dtype: torch.dtype,
        device: torch.device,
        record: bool = False,
        cache_bytes: int | None = None,
        granule: int = 16,
        exact: bool = False,
    ):
        is_gemma = config.model_type == "gemma3_text"
        self.weights, self.device, self.exact = weights, device, exact
        self.vocab = config.vocab_size
        self.eps = config.rms_norm_eps
        self.H, self.K, self.D = config.num_attention_heads, config.num_key_value_heads, head_size(config)
        self.scale = config.query_pre_attn_scalar**-0.5 if is_gemma else self.D**-0.5

        # Only a CPU in float32 promises the same bits at any length.
        is_invariant = device.type == "cpu" and (exact or dtype == torch.float32)
        longest = round_up(max_seq_len, BLOCK)
        self.granule = attention_granule(self.H // self.K, self.D, self.scale, longest) if is_invariant else granule
        cache_dtype = torch.float32 if exact else dtype
        self.cache = KeyValueCache(config, rows, max_seq_len, cache_dtype, device, record, cache_bytes, self.granule)

        # A kind of attention is a rotary embedding and a window; most models have one kind for all layers.
        layer_kinds = attention_kinds(config)
        self.kinds = list(dict.fromkeys(layer_kinds))
        self.kind_of = [self.kinds.index(kind) for kind in layer_kinds]  # by layer, an index of `kinds`

        # transformers does not round the rotary tables of OLMo 2.
        rotary_dtype = torch.float32 if exact and config.model_type == "olmo2" else dtype
        self.rotary: dict[str | None, RotaryTables | None] = {  # a kind without rotation has the key None
            key: None if key is None else rotary_tables(config, key, max_seq_len, rotary_dtype, device)
            for key in {None, *(kind.rotary for kind in layer_kinds)}
        }

        activation = "gelu_pytorch_tanh" if is_gemma else "silu"
        self.activation = (ACTIVATIONS if exact else FUSED_ACTIVATIONS)[activation]
        self.embed_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype, device=device) if is_gemma else None
        self.row_ids = torch.arange(rows, device=device)
        self.cache_positions = torch.arange(self.cache.longest, device=device)
        self.queries = QUERIES if device.type == "cpu" else None  # elsewhere one large product is faster

    exact = False  # whether prompts and answers are computed as by a trainer with `training.exact`
    takes_images = False
    has_prefixes = True  # whether the cache of a prompt has that of its first tokens

    def release(self) -> None:
        """Free the memory of weights and cache; assign new weights before the next `prefill` or `decode`."""
        self.weights = None  # type: ignore[assignment]
        self.cache.clear()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def decode(self, tokens: Tensor, positions: Tensor, length: int) -> Tensor:
        """Run one token of each of the first B rows; return the logits of the next tokens, (B, V), at least float32.

        Args:
            tokens, positions: (B,), the last token of each row and the position where its key and value are stored.
            length: attention reads the first `length` positions: more than any position, and a multiple of `granule`.
        """
        rows = len(tokens)
        cache = self.cache
        index = cache.index(self.row_ids[:rows], positions)
        rotations = self._rotations_at(positions)
        biases = self._biases_at(positions, length)
        bag_indices = (
            embedding_bag_indices(rows * self.K, self.H // self.K, length, cache.length)
            if self.device.type == "cpu"
            else None
        )

        # Rows and key-value heads are one batch dimension, without a copy; the heads of a group share its keys.
        keys, values = (
            store.flatten(1, 2)[:, : rows * self.K, :length].unbind() for store in (cache.keys, cache.values)
        )
        tables = cache.tables()
        x = self._embed_tokens(tokens)
        choices: list[Tensor] = []

        for i, layer in enumerate(self.weights.layers):
            kind = self.kind_of[i]
            q, k, v = self._project_qkv(layer, x, rotations[kind])
            cache.write(tables[i], index, k, v)

            q = q.flatten(0, 1)
            probs = torch.baddbmm(biases[kind], q, keys[i].transpose(1, 2), alpha=self.scale).softmax(-1)
            if bag_indices is None:
                attended = torch.bmm(probs, values[i])
            else:
                attended = torch.embedding_bag(tables[i][1], *bag_indices, mode=0, per_sample_weights=probs.view(-1))[0]

            self._finish_layer(layer, x, attended.view(rows, -1), choices)

        cache.write_choices(self.row_ids[:rows], positions, choices)
        return self.weights.head.wide(self._normalise(x, self.weights.norm))

    def prefill(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[int], starts: Sequence[int] = (), images: Any = ()
    ) -> None:
        """Write keys and values of each prompt's tokens into its row of the cache, which must have room.

        There are no logits: the caller passes the last token of a prompt to the first `decode`, so that the attention
        and MLP of the last layer are skipped here.

        Args:
            prompts: the tokens to compute; those before them are in the cache already.
            rows, starts: the row of each prompt and the position of its first token here, by default 0.
            images: the files of each prompt, as bytes, for decoders with `takes_images`.
        """
        tokens, positions, token_rows, index, blocks = self._plan_prompts(prompts, rows, starts)
        real = len(token_rows)  # the number of tokens without the padding at the end
        rotations = self._rotations_at(positions)
        tables = self.cache.tables()
        x = self._embed_tokens(tokens)
        choices: list[Tensor] = []

        for i, layer in enumerate(self.weights.layers):
            kind = self.kind_of[i]
            q, k, v = self._project_qkv(layer, x, rotations[kind])
            self.cache.write(tables[i], index, k[:real], v[:real])
            if i == len(self.weights.layers) - 1:
                self.cache.write_choices(token_rows, positions[:real], [experts[:real] for experts in choices])
                return

            kernel = attend_by_query if self.exact else F.scaled_dot_product_attention
            attend = partial(kernel, scale=self.scale, enable_gqa=True)
            self._finish_layer(layer, x, self._attend_blocks(blocks, i, kind, q, attend).flatten(1), choices)

    def _biases_at(self, positions: Tensor, length: int) -> list[Tensor]:
        """Return the attention bias (B * K, 1, length) of decoding at these positions, for each kind of attention."""
        keys = self.cache_positions[:length]
        biases = []
        for _, window in self.kinds:
            unseen = keys > positions[:, None]
            if window is not None:
                # An idle row may be beyond `length`: it sees the last key, as none would give NaN, which stays there.
                unseen |= keys <= (positions[:, None] - window).clamp(max=length - 2)
            biases.append(bias_of(unseen, self.cache.keys.dtype).repeat_interleave(self.K, 0)[:, None])
        return biases

    def _plan_prompts(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[int], starts: Sequence[int]
    ) -> "tuple[Tensor, Tensor, Tensor, Tensor, list[_Block]]":
        """Return the tokens of a prefill and their positions, padded to few sizes (N,); the row of each real token, its
        place in the cache (see `KeyValueCache.index`), and the calls of attention."""
        # All prompts are one sequence of tokens, each with its prompt, position and row of the cache.
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        first_positions = torch.tensor(starts or [0] * len(prompts))
        end_positions = first_positions + lengths
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        prompt_index = torch.arange(len(prompts)).repeat_interleave(lengths)

        # The last token of a prompt is at index `cumsum - 1` of the sequence and at position `end - 1`.
        positions = torch.arange(len(tokens)) + (end_positions - lengths.cumsum(0))[prompt_index]
        blocks = self._split_blocks(prompt_index, positions, torch.tensor(rows), first_positions, end_positions)
        token_rows = torch.tensor(rows)[prompt_index].to(self.device)
        index = self.cache.index(token_rows, positions.to(self.device))

        # Padded, as kernels are prepared for every new number of tokens; results of padding are never stored.
        padded_length = 32 if len(tokens) <= 32 else round_up(len(tokens), 64)
        padding = (0, padded_length - len(tokens))
        return F.pad(tokens, padding), F.pad(positions, padding).to(self.device), token_rows, index, blocks

    def _attend_blocks(
        self, blocks: "list[_Block]", layer: int, kind: int, q: Tensor, attend: Callable[..., Tensor]
    ) -> Tensor:
        """Return the attention (N, H, D) of a prefill's queries, (N, H, D) or (N, K, G, D), to the keys in the cache:
        each block is one call of `attend` for all its prompts, with queries in rows of one length."""
        attended = q.new_zeros(q.shape).flatten(1, -2)
        for block in blocks:
            # A prompt has a row of `size` slots, one for each position of the block; slots without a token stay 0.
            size, length = block.masks[kind].shape
            slot_queries = q.new_zeros(block.prompts * size, *attended.shape[1:])
            slot_queries.index_copy_(0, block.slots, q[block.tokens].flatten(1, -2))
            queries = slot_queries.unflatten(0, (block.prompts, size)).transpose(1, 2)  # (prompts, H, size, D)
            keys, values = (store[layer, :, :, :length][block.rows] for store in (self.cache.keys, self.cache.values))

            # Back from slots to tokens.
            by_head = attend(queries, keys, values, attn_mask=block.masks[kind])
            attended.index_copy_(0, block.tokens, by_head.transpose(1, 2).flatten(0, 1)[block.slots])

        return attended

    def _split_blocks(
        self, prompt_index: Tensor, positions: Tensor, rows: Tensor, starts: Tensor, ends: Tensor
    ) -> "list[_Block]":
        """Split prompt tokens into attention calls, each for `self.queries` positions of all prompts; None: one call.

        A block starts at a multiple of its size whatever the pieces of the prompt, so that its keys have a fixed shape.
        Half a block, for short prompts, rounds like a whole one.

        Args:
            prompt_index, positions: (N,), by token. rows, starts, ends: (prompts,); positions `starts` to `ends` - 1.
        """
        first = int(positions.min())
        longest = int(ends.max())
        size = longest - first
        if self.queries:
            size = self.queries if longest > self.queries // 2 else self.queries // 2
            first = first // size * size

        blocks = []
        for start in range(first, longest, size):
            end = start + size
            inside = ((positions >= start) & (positions < end)).nonzero().flatten()
            has_tokens = (ends > start) & (starts < end)  # by prompt
            if not has_tokens.any():
                continue

            block_prompt = has_tokens.cumsum(0) - 1  # a prompt's index among those with tokens in the block
            slots = block_prompt[prompt_index[inside]] * size + positions[inside] - start

            # Queries see keys up to their own position, within the window of each kind of attention.
            length = min(round_up(end, self.granule), self.cache.length) if self.exact else end
            keys = self.cache_positions[:length]
            queries = self.cache_positions[start:end, None]
            masks = []
            for _, window in self.kinds:
                unseen = keys > queries
                if window is not None:
                    unseen |= keys <= queries - window
                masks.append(bias_of(unseen, self.cache.keys.dtype))

            # Evenly spaced rows, the usual case, are a view.
            block_rows = rows[has_tokens].tolist()
            stride = block_rows[1] - block_rows[0] if len(block_rows) > 1 else 1
            is_even = stride > 0 and block_rows == list(range(block_rows[0], block_rows[-1] + 1, stride))
            index = slice(block_rows[0], block_rows[-1] + 1, stride) if is_even else block_rows
            blocks.append(_Block(inside.to(self.device), slots.to(self.device), len(block_rows), index, masks))
        return blocks

    def _embed_tokens(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.weights.embed)
        return x if self.embed_scale is None else x * self.embed_scale

    def _rotations_at(self, positions: Tensor) -> list[tuple[Tensor, Tensor, Tensor | None] | None]:
        """Return rotary cosines and sines (N, 1, 1, D) at the given positions and `RotaryTables.order` for each kind of
        attention; None for a kind without rotation."""
        rotations = {
            key: rotary and (rotary.cos[positions][:, None, None], rotary.sin[positions][:, None, None], rotary.order)
            for key, rotary in self.rotary.items()
        }
        return [rotations[kind.rotary] for kind in self.kinds]

    def _project_qkv(
        self, layer: Layer, x: Tensor, rotation: tuple[Tensor, Tensor, Tensor | None] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (N, K, G, D), k and v (N, K, D) of x (N, C), q and k rotated; tokens and heads flatten to a view."""
        qkv = layer.qkv(self._normalise(x, layer.input_norm)).view(len(x), self.K, -1, self.D)
        qk, v = qkv[:, :, :-1], qkv[:, :, -1]

        if layer.qk_norm is not None and layer.qk_norm.dim() > 1:
            qk = self._normalise(qk, layer.qk_norm)
        elif layer.qk_norm is not None:
            # One norm over all heads of q, and one over all heads of k.
            query_key = qk[:, :, :-1].flatten(1), qk[:, :, -1].flatten(1)
            norm_weights = layer.qk_norm.split([heads.shape[1] for heads in query_key])
            normed_heads = [self._normalise(heads, norm) for heads, norm in zip(query_key, norm_weights, strict=True)]
            qk = torch.cat([heads.view(len(x), self.K, -1, self.D) for heads in normed_heads], 2)

        if rotation is not None:
            cos, sin, order = rotation
            partner = qk.roll(self.D // 2, -1) if order is None else qk[..., order]
            qk = rotate_heads(qk, partner, cos, sin) if self.exact else (qk * cos).addcmul_(partner, sin)

        qk, v = (x.to(self.cache.keys.dtype) for x in (qk, v))  # of an exact bfloat16 model float32
        return qk[:, :, :-1], qk[:, :, -1], v

    def _finish_layer(self, layer: Layer, x: Tensor, attended: Tensor, choices: list[Tensor]) -> None:
        """Add output projection and feed-forward to the residual stream x (N, C) in place. A mixture appends the
        experts of each token to `choices`, (N, k)."""
        x += self._normalise(layer.output(attended.to(x.dtype)), layer.attended_norm)
        hidden = self._normalise(x, layer.mlp_norm)
        ffn = layer.feed_forward
        if isinstance(ffn, Experts):
            fed, experts = ffn(hidden, self.activation)
            choices.append(experts)
        else:
            gate, up = ffn.gate_up(hidden).chunk(2, -1)
            fed = ffn.down(self.activation(gate).mul_(up))
        x += self._normalise(fed, layer.fed_norm)

    def _normalise(self, x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is None:
            return x
        return (rms_norm_wide if self.exact else rms_norm)(x, norm, self.eps)


class _Block(NamedTuple):  # an attention call: the same range of positions of several prompts
    tokens: Tensor  # (n,): indices of its tokens among all tokens
    slots: Tensor  # (n,): their indices among the block's queries, prompt after prompt
    prompts: int
    rows: slice | list[int]  # index of the prompts' cache rows
    masks: list[Tensor]  # by kind of attention, (queries of a prompt, keys)


class RotaryTables(NamedTuple):
    """Tables of the rotary embedding by position: x * cos + turned * sin, where `turned` is roll(x, D / 2), or x[order]
    if a part rotates."""

    cos: Tensor  # (length, D)
    sin: Tensor  # (length, D), the first half of the rotating part negated
    order: Tensor | None  # (D,)


def rotary_tables(
    config: PreTrainedConfig, key: str, length: int, dtype: torch.dtype, device: torch.device
) -> RotaryTables:
    """Return the rotary tables of positions 0 to `length` - 1 for entry `key` of `rotary_parameters`."""
    rope = rotary_parameters(config)[key]
    D = head_size(config)
    if rope["rope_type"] == "default":
        # R dimensions of a head rotate.
        R = int(D * rope.get("partial_rotary_factor", 1.0)) if config.model_type == "phi3" else D
        frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, R, 2).float() / R)
        scale = 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), layer_type=key or None)

    # Both halves of the rotating part turn by the same angles.
    angles = torch.outer(torch.arange(length).float(), frequencies.float())
    cos = (angles.cos() * scale).repeat(1, 2)
    sin = angles.sin() * scale
    sin = torch.cat([-sin, sin], -1)
    R = 2 * len(frequencies)

    order = None
    if R < D:
        # Dimensions that do not rotate have angle 0.
        cos = F.pad(cos, (0, D - R), value=1.0)
        sin = F.pad(sin, (0, D - R))
        order = torch.cat([torch.arange(R).roll(R // 2), torch.arange(R, D)]).to(device)

    return RotaryTables(cos.to(device, dtype), sin.to(device, dtype), order)
