"""The layers of a model by its transformers config: their attention, and which are mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class AttentionKind(NamedTuple):
    """The positions and the window of a layer's attention.

    rotary: key of the layer's parameters in `rotary_parameters`; None: no positions (NoPE).
    window: a token sees itself and the `window` - 1 tokens before; None: all before.
    """

    rotary: str | None
    window: int | None


# The model types that trainer and engines have; the last two are mixtures of experts.
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "olmo2", "smollm3", "phi3", "gemma3_text", "qwen3_moe", "olmoe")
# The families whose code in transformers reads a key; in another family's config.json it does nothing.
WINDOWS = ("mistral", "phi3", "qwen3_moe")  # `sliding_window`, of all layers
LAYER_WINDOWS = ("qwen2", "qwen3", "smollm3", "gemma3_text")  # `sliding_window`, of the layers that `layer_types` names
BIASES = ("llama", "qwen3", "olmo2", "smollm3", "gemma3_text", "qwen3_moe", "olmoe")  # `attention_bias`
MLP_BIASES = ("llama", "smollm3")  # `mlp_bias`


def check_config(config: PreTrainedConfig) -> None:
    """Check that trainer and engines compute the same as transformers for a config.

    Dropout is not checked: it is always off.

    Raises:
        ValueError: they differ in a value, which the message names, or do not have the family.
    """
    if config.model_type not in FAMILIES:  # may be another than in config.json: transformers reads some as a relative
        raise ValueError(f"model_type {config.model_type!r} is not supported, but {', '.join(FAMILIES)}")
    family, window = config.model_type, getattr(config, "sliding_window", None)
    bidirectional = family == "gemma3_text" and config.use_bidirectional_attention
    caps = ("attn_logit_softcapping", "final_logit_softcapping") if family == "gemma3_text" else ()
    capped = next((f"{name} = {getattr(config, name)}" for name in caps if getattr(config, name) is not None), None)

    # In these two, transformers' implementations of attention disagree with one another.
    unclear = family == "olmoe" and window is not None
    if family == "smollm3" and not config.use_sliding_window and window is not None:
        unclear = "sliding_attention" in config.layer_types
    quantised = getattr(config, "quantization_config", None) is not None

    for supported, feature in (
        (getattr(config, "is_causal", True) and not bidirectional, "attention in both directions"),
        (capped is None, capped),
        (not unclear, f"sliding_window = {window}"),
        (not quantised, "quantization_config, which quantised weights have,"),
    ):
        if not supported:
            raise ValueError(f"{config.name_or_path or 'the model'} ({family}): {feature} is not supported")


def attention_kinds(config: PreTrainedConfig) -> list[AttentionKind]:
    """Return the kind of every layer of a transformers config."""
    layers, family = config.num_hidden_layers, config.model_type
    windowed = [family in WINDOWS] * layers
    if family in LAYER_WINDOWS:
        windowed = [kind == "sliding_attention" for kind in config.layer_types]
    rotates = config.no_rope_layers if family == "smollm3" else [True] * layers  # the name says the opposite
    keys = config.layer_types if family == "gemma3_text" else [""] * layers
    return [
        AttentionKind(keys[i] if rotates[i] else None, config.sliding_window if windowed[i] else None)
        for i in range(layers)
    ]


def rotary_parameters(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """Return the parameters of the rotary embeddings by type of layer, or under "" if all layers have the same."""
    rope = config.rope_parameters or {}
    if config.model_type == "gemma3_text":
        return {key: rope[key] for key in dict.fromkeys(config.layer_types)}
    return {"": rope}


def max_length(config: PreTrainedConfig) -> int:
    """Return maximum tokens of a sequence: `max_position_embeddings`, or the limit of `rotary_limit`."""
    limit = rotary_limit(config)
    return config.max_position_embeddings if limit is None else min(config.max_position_embeddings, limit[0])


def rotary_limit(config: PreTrainedConfig) -> tuple[int, str] | None:
    """Return maximum tokens of a sequence, and the `rope_type`, where a longer one would change the frequencies of a
    whole batch: the length of LongRoPE's short factors (Ding et al. 2024), or `max_position_embeddings` of dynamic
    ones. None: no limit."""
    limits = []
    for rope in rotary_parameters(config).values():
        if rope.get("rope_type") == "longrope":
            limits.append((rope["original_max_position_embeddings"], "longrope"))
        elif rope.get("rope_type") == "dynamic":
            limits.append((config.max_position_embeddings, "dynamic rope"))
    return min(limits, default=None)


def sparse_layers(config: PreTrainedConfig) -> list[int]:
    """Return the layers that are mixtures of experts."""
    layers = range(config.num_hidden_layers)
    if config.model_type == "qwen3_moe":
        dense, step = config.mlp_only_layers, config.decoder_sparse_step
        return [i for i in layers if i not in dense and (i + 1) % step == 0]
    return list(layers) if config.model_type == "olmoe" else []
