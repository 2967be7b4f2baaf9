"""Bytes and operations of a model by its config: estimates from transformers' module without memory."""

import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from forge.models.find import quiet_loading
from forge.models.tokenizer import model_class

from .attention import ENGINE, AttentionCall, record_call, run_model, set_attention
from .modules import use_experts
from .probe import recall_answer
from .states import RowStates

EXPERTS_OF_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")


class ModelSizes(NamedTuple):
    """Element counts of a model: weights, head, queries, and cached keys and values.

    active: of weights that multiply a token, without the head and the embeddings.
    head: of the head's weights.
    queries: of all queries of a token, in all layers.
    cached: of all keys and values of a token.
    states: bytes of a row's states of recurrent layers, in float32.
    """

    active: float
    head: int
    queries: int
    cached: int
    states: int


def token_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of one token of one row; recurrent layers have none."""
    return measure_model(config).cached * dtype.itemsize


def forward_flops(config: PreTrainedConfig, tokens: float, attended: float, predicted: float) -> float:
    """Return the number of floating-point operations of a forward pass, as `forge.models.flops.forward_flops`."""
    sizes = measure_model(config)
    return 2.0 * (sizes.active * tokens + sizes.head * predicted) + 4.0 * sizes.queries * attended


def measure_model(config: PreTrainedConfig) -> ModelSizes:
    """Return the sizes of a model, which are computed once for each config."""
    return ModelSizes(*recall_answer(config, _count_sizes))


def _count_sizes(config: PreTrainedConfig) -> tuple[ModelSizes, str]:
    text: Any = config.get_text_config()
    with quiet_loading(), torch.device("meta"):
        model = model_class(config).from_config(copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False)
    head = model.get_output_embeddings()
    taken = next((getattr(text, name) for name in EXPERTS_OF_TOKEN if getattr(text, name, None)), 1)
    # Embeddings are looked up, and the head is counted separately.
    layers = [module for module in model.modules() if not isinstance(module, nn.Embedding) and module is not head]
    active = 0.0
    for module, parameter in ((layer, weight) for layer in layers for weight in layer.parameters(recurse=False)):
        if parameter.dim() == 3 and hasattr(module, "is_transposed"):
            active += parameter.numel() * taken / len(parameter)
        elif parameter.dim() > 1:
            active += parameter.numel()

    calls, states = find_calls(model)
    return ModelSizes(
        active=active,
        head=0 if head is None else head.weight.numel(),
        queries=sum(call.heads * call.size for call in calls),
        # Those of a layer with fewer or smaller heads than others are repeated and padded.
        cached=2 * len(calls) * max((c.kv_heads for c in calls), default=0) * max((c.size for c in calls), default=0),
        states=sum(state.nbytes for state in states if state is not None),
    ), ""


def find_calls(model: Any) -> tuple[list[AttentionCall], list[Tensor | None]]:
    """Return the calls of attention of a model on the meta device, and a row's states of its recurrent layers.

    For a model that the engine's attention cannot compute the calls are those that its config describes.
    """
    text = model.config.get_text_config()
    calls: list[AttentionCall] = []
    states = RowStates(text)
    token = torch.zeros(1, 1, dtype=torch.long, device="meta")
    set_attention(model, ENGINE)
    use_experts(model)
    try:
        with torch.inference_mode():
            run_model(partial(record_call, calls), model.eval(), token, token, states)
    except Exception:  # an operation that needs numbers
        calls, states = [], RowStates(text)
    if not calls and states.read().count(None) == len(states.slots):  # attention outside of transformers' interface
        # As written: some configs raise an error for a value that differs between layers.
        values = text.to_dict()
        heads = getattr(text, "num_attention_heads", 0)
        size = values.get("head_dim") or text.hidden_size // max(heads, 1)
        call = AttentionCall(heads, values.get("num_key_value_heads") or heads, size, size**-0.5, None)
        kinds = getattr(text, "layer_types", None) or ["attention"] * text.num_hidden_layers
        calls = [call for kind in kinds if "attention" in kind and "linear" not in kind]
    return calls, states.read()
