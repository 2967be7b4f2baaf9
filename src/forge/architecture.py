"""What the layers of a model are, from its transformers config: their attention, and which are mixtures of experts."""

from __future__ import annotations

from typing import Any, NamedTuple


class Kind(NamedTuple):
    """rotary: key of the layer's parameters in `rotary_parameters`; None: no positions (NoPE).
    window: a token sees itself and the `window` - 1 tokens before; None: all before."""

    rotary: str | None
    window: int | None


def attention_kinds(config: Any) -> list[Kind]:
    """The kind of every layer of a transformers config."""
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    if not getattr(config, "use_sliding_window", True):
        window = None
    rotates = getattr(config, "no_rope_layers", None) or [1] * layers  # SmolLM3's name says the opposite
    by_type = "" not in rotary_parameters(config)
    return [
        Kind((kind if by_type else "") if rotates[i] else None, window if kind == "sliding_attention" else None)
        for i, kind in enumerate(types)
    ]


def rotary_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """The parameters of the rotary embeddings by type of layer, or under "" if all layers have the same."""
    rope = config.rope_parameters or {}
    return rope if config.model_type == "gemma3_text" else {"": rope}


def longest(config: Any) -> int:
    """Most tokens of a sequence: `max_position_embeddings`, or `longrope_limit`."""
    return min(config.max_position_embeddings, longrope_limit(config) or config.max_position_embeddings)


def longrope_limit(config: Any) -> int | None:
    """Most tokens that LongRoPE's short factors serve (Ding et al. 2024), None without it. Beyond, the frequencies of
    a whole batch would depend on its longest sequence."""
    ropes = rotary_parameters(config).values()
    limits = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]
    return min(limits, default=None)


def sparse_layers(config: Any) -> list[int]:
    """The layers that are mixtures of experts."""
    if config.model_type not in ("qwen3_moe", "olmoe"):
        return []
    dense, step = getattr(config, "mlp_only_layers", None) or [], getattr(config, "decoder_sparse_step", 1)
    return [i for i in range(config.num_hidden_layers) if i not in dense and (i + 1) % step == 0]
