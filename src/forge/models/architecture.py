"""The layers of a model by its transformers config: their attention, and which are mixtures of experts."""

from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.plugin import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class AttentionKind(NamedTuple):
    """The rotary embedding and the window of a layer's attention.

    rotary: key of the layer's parameters in `rotary_parameters`; None: the layer has no rotary embedding (NoPE).
    window: a token sees itself and the `window` - 1 tokens before it; None: all tokens before it.
    """

    rotary: str | None
    window: int | None


# The model types that trainer and engines compute by themselves; the last two are mixtures of experts. Others run in
# transformers' modules (`forge_families`).
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "olmo2", "smollm3", "phi3", "gemma3_text", "qwen3_moe", "olmoe")
# The families whose code in transformers reads a key; in another family's config.json it does nothing.
WINDOWS = ("mistral", "phi3", "qwen3_moe")  # `sliding_window`, of all layers
LAYER_WINDOWS = ("qwen2", "qwen3", "smollm3", "gemma3_text")  # `sliding_window`, of the layers that `layer_types` names
BIASES = ("llama", "qwen3", "olmo2", "smollm3", "gemma3_text", "qwen3_moe", "olmoe")  # `attention_bias`
MLP_BIASES = ("llama", "smollm3")  # `mlp_bias`


def check_config(config: "PreTrainedConfig") -> None:
    """Check that trainer and engines compute the same as transformers for a config.

    Dropout is not checked: it is always off.

    Raises:
        ValueError: they differ in a value, which the message names.
    """
    if not is_native(config):
        resolve("forge_families.probe:check_config", "model")(config)


def is_native(config: "PreTrainedConfig") -> bool:
    """Return whether trainer and engines compute a model of this config by themselves, not by transformers' modules."""
    # The type may differ from config.json's: transformers reads some types as a related one.
    family, window = config.model_type, getattr(config, "sliding_window", None)
    is_bidirectional = family == "gemma3_text" and config.use_bidirectional_attention
    caps = ("attn_logit_softcapping", "final_logit_softcapping") if family == "gemma3_text" else ()

    # In these two families, transformers' implementations of attention disagree about the window.
    is_unclear = family == "olmoe" and window is not None
    if family == "smollm3" and not config.use_sliding_window and window is not None:
        is_unclear = "sliding_attention" in config.layer_types
    is_quantised = getattr(config, "quantization_config", None) is not None
    is_capped = any(getattr(config, name) is not None for name in caps)
    is_causal = getattr(config, "is_causal", True) and not is_bidirectional
    return family in FAMILIES and is_causal and not (is_capped or is_unclear or is_quantised)


def attention_kinds(config: "PreTrainedConfig") -> list[AttentionKind]:
    """Return the kind of attention of each layer, in order."""
    layers, family = config.num_hidden_layers, config.model_type
    has_window = [family in WINDOWS] * layers
    if family in LAYER_WINDOWS:
        has_window = [kind == "sliding_attention" for kind in config.layer_types]

    # Despite its name, `no_rope_layers` is true for the layers that rotate.
    has_rotation = config.no_rope_layers if family == "smollm3" else [True] * layers
    rotary_keys = config.layer_types if family == "gemma3_text" else [""] * layers
    return [
        AttentionKind(rotary_keys[i] if has_rotation[i] else None, config.sliding_window if has_window[i] else None)
        for i in range(layers)
    ]


def rotary_parameters(config: "PreTrainedConfig") -> dict[str, dict[str, Any]]:
    """Return transformers' parameters of the rotary embeddings by type of layer; by "" if all layers have the same."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if any(isinstance(parameters, dict) for parameters in rope.values()):
        return {key: rope[key] for key in dict.fromkeys(text.layer_types) if key in rope}
    return {"": rope}


def max_length(config: "PreTrainedConfig") -> int:
    """Return the maximum number of tokens of a sequence: `max_position_embeddings`, or less by `rotary_limit`.

    A model without positions, such as Mamba, has no maximum: a million stands for it.
    """
    longest: int = getattr(config.get_text_config(), "max_position_embeddings", None) or 2**20
    limit = rotary_limit(config)
    return longest if limit is None else min(longest, limit[0])


def rotary_limit(config: "PreTrainedConfig") -> tuple[int, str] | None:
    """Return the maximum number of tokens of a sequence, and the `rope_type` that sets it; None if there is no limit.

    With some types a longer sequence would change the frequencies of its whole batch: with LongRoPE beyond the length
    of its short factors (Ding et al. 2024), with dynamic ones beyond `max_position_embeddings`.
    """
    limits = []
    for rope in rotary_parameters(config).values():
        if rope.get("rope_type") == "longrope":
            limits.append((rope["original_max_position_embeddings"], "longrope"))
        elif rope.get("rope_type") == "dynamic":
            limits.append((config.get_text_config().max_position_embeddings, "dynamic rope"))
    return min(limits, default=None)


def sparse_layers(config: "PreTrainedConfig") -> list[int]:
    """Return the numbers of the layers that are mixtures of experts, in order; [] for a model without any."""
    if config.model_type == "qwen3_moe":
        dense, step = config.mlp_only_layers, config.decoder_sparse_step
        return [i for i in range(config.num_hidden_layers) if i not in dense and (i + 1) % step == 0]
    return list(range(config.num_hidden_layers)) if config.model_type == "olmoe" else []
