"""The engine's attention within transformers' modules, and the calls of attention that a model makes."""

import inspect
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

# Names of attention implementations. Under PROBE the masks are `describe_mask`'s; for ENGINE transformers makes none.
ENGINE, PROBE = "forge_engine", "forge_probe"
# Arguments of attention that change nothing in the forward pass of a sequence.
KNOWN = {
    *("dropout", "position_ids", "use_cache", "cache", "output_attentions", "output_router_logits", "is_causal"),
    *("kwargs", "logits_to_keep"),
}
Attend = Callable[..., Tensor]  # of query (B, H, N, D), key and value (B, K, N, D): (B, N, H, D)
_current = threading.local()  # `attend` of the forward pass that runs in this thread


class UnsupportedModel(ValueError):
    """Error: the engine does not support a feature of the model; names the feature."""


class AttentionCall(NamedTuple):
    """Shapes and settings of one attention call in a forward pass."""

    heads: int
    kv_heads: int
    size: int  # of a head's keys, or of its values if they are larger
    scale: float
    window: int | None  # a token sees itself and the `window` - 1 before it; None: all before it


def run_model(attend: Attend, module: nn.Module, tokens: Tensor, positions: Tensor | None, cache: Any = None) -> Any:
    """Return the result of a forward pass whose calls of attention `attend` computes.

    Args:
        tokens, positions: (B, N). Without positions the model takes its own.
        cache: the states of recurrent layers (`forge_families.states.RowStates`); None: the model has none.
    """
    inputs: dict[str, Any] = {"position_ids": positions, "cache": cache, "use_cache": cache is not None}
    parameters = inspect.signature(module.forward).parameters
    _current.attend = attend
    try:
        return module(input_ids=tokens, **{name: value for name, value in inputs.items() if name in parameters})
    finally:
        del _current.attend


def set_attention(model: nn.Module, name: str) -> None:
    """Have all modules of a model call the attention of this name."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = name


def call_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *scale: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention by `attend` of this thread's forward pass: transformers' attention interface."""
    named = dict(zip(("scaling",), scale, strict=False))
    return _current.attend(query, key, value, attention_mask, **named, **options), None


def record_call(
    calls: list[AttentionCall],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: Any = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Append a call of attention to `calls`; return zeros in the shape of its result.

    Raises:
        UnsupportedModel: the engine does not compute such a call.
    """
    window = int(mask) if mask is not None and mask.numel() == 1 else sliding_window or 0
    unknown = sorted(name for name, option in options.items() if option is not None and name not in KNOWN)
    for is_found, feature in (
        (unknown, f"attention with {', '.join(unknown)}"),
        (key.shape[2] != query.shape[2] or key.shape[:3] != value.shape[:3], "attention to other tokens' keys"),
        (mask is not None and mask.numel() != 1, "an attention mask that the model makes by itself"),
        (window < 0, "an attention mask that is neither causal nor a window"),
        (sliding_window not in (None, 0, window), f"sliding_window = {sliding_window} with a mask of {window}"),
    ):
        if is_found:
            raise UnsupportedModel(feature)
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    size = max(key.shape[3], value.shape[3])
    calls.append(AttentionCall(query.shape[1], key.shape[1], size, scale, window or None))
    return value.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[3])


def describe_mask(*, mask_function: Any, use_vmap: bool = False, local_size: int | None = None, **_: Any) -> Tensor:
    """Return a mask's window as a tensor of four dimensions instead of the mask: transformers' mask interface.

    The window is 0 for a causal mask without one, and -1 for one that is neither causal nor a window.
    """
    window = local_size or 0
    reach = 3 * window + 2 if window else 8
    queries = torch.tensor([0, 1, max(window - 1, 0), window, 2 * window + 1, reach - 1])[:, None]
    keys = torch.arange(reach)
    expected = (keys <= queries) & (keys > queries - (window or reach))
    first = torch.zeros((), dtype=torch.long)
    is_known = not use_vmap and torch.equal(mask_function(first, first, queries, keys).expand_as(expected), expected)
    return torch.full((1, 1, 1, 1), window if is_known else -1)


AttentionInterface.register(PROBE, call_attention)
AttentionMaskInterface.register(PROBE, describe_mask)
AttentionInterface.register(ENGINE, call_attention)
