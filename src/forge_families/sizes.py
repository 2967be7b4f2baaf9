"""Bytes and operations of a model by its config: estimates from transformers' module without memory."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from forge.models.find import quiet_loading
from forge.models.tokenizer import model_class

EXPERTS_OF_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")


_sizes: dict[str, ModelSizes] = {}  # by the config's values


class ModelSizes(NamedTuple):
    """Element counts of a model: weights, head, queries, and cached keys and values.

    active: of weights that multiply a token, without the head and the embeddings.
    head: of the head's weights.
    queries: of all queries of a token, in all layers.
    cached: of all keys and values of a token.
    """

    active: float
    head: int
    queries: int
    cached: int


def token_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of one token of one row; recurrent layers have none."""
    return measure_model(config).cached * dtype.itemsize


def forward_flops(config: PreTrainedConfig, tokens: float, attended: float, predicted: float) -> float:
    """Return the number of floating-point operations of a forward pass, as `forge.models.flops.forward_flops`."""
    sizes = measure_model(config)
    return 2.0 * (sizes.active * tokens + sizes.head * predicted) + 4.0 * sizes.queries * attended


def measure_model(config: PreTrainedConfig) -> ModelSizes:
    """Return the sizes of a model, which are computed once for each config."""
    key = config.to_json_string(use_diff=False)
    if key not in _sizes:
        _sizes[key] = _measure_model(copy.deepcopy(config))
    return _sizes[key]


def _measure_model(config: PreTrainedConfig) -> ModelSizes:
    text: Any = config.get_text_config()
    with quiet_loading(), torch.device("meta"):
        model = model_class(config).from_config(config, trust_remote_code=False)
    head = model.get_output_embeddings()
    taken = next((getattr(text, name) for name in EXPERTS_OF_TOKEN if getattr(text, name, None)), 1)
    active = 0.0
    for module in model.modules():
        if isinstance(module, nn.Embedding) or module is head:
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 3 and hasattr(module, "is_transposed"):
                active += parameter.numel() * taken / len(parameter)
            elif parameter.dim() > 1:
                active += parameter.numel()

    # Layers whose name says that they have no attention have neither queries nor keys.
    kinds = getattr(text, "layer_types", None) or ["attention"] * text.num_hidden_layers
    layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    # As written: some configs raise an error for a value that differs between layers.
    values = text.to_dict()
    heads = getattr(text, "num_attention_heads", 0)
    kv_heads = values.get("num_key_value_heads") or heads
    size = getattr(text, "qk_head_dim", None) or values.get("head_dim") or text.hidden_size // max(heads, 1)
    return ModelSizes(
        active=active,
        head=0 if head is None else head.weight.numel(),
        queries=layers * heads * size,
        cached=2 * layers * kv_heads * size,
    )
