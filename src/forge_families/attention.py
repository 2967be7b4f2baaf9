"""The engine's attention within transformers' modules: which calls a model makes, found by one forward pass."""

from __future__ import annotations

import inspect
import threading
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

# Names of attention implementations. Under PROBE the masks are `describe_mask`'s; for ENGINE transformers makes none.
ENGINE, PROBE = "forge_engine", "forge_probe"
# Arguments of attention that change nothing in a forward pass of one sequence without padding, or that are handled.
KNOWN = {
    "position_ids",
    "use_cache",
    "cache",
    "output_attentions",
    "output_router_logits",
    "is_causal",
    "kwargs",
    "logits_to_keep",
}
FIRST = torch.zeros((), dtype=torch.long)


class UnsupportedAttention(ValueError):
    """A call of attention that the engine does not compute; names the feature."""


class AttentionCall(NamedTuple):
    """One call of attention in a forward pass."""

    heads: int
    kv_heads: int
    size: int  # of a head's keys, or of its values if they are larger
    scale: float
    window: int | None  # a token sees itself and the `window` - 1 before it; None: all before it


class Attention(Protocol):
    """What computes the attention calls of a forward pass, in their order."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        """Return (B, N, H, D) of query (B, H, N, D), key and value (B, K, N, D)."""


class _Current(threading.local):
    attention: Attention | None = None


_current = _Current()


def run_model(attention: Attention, module: nn.Module, tokens: Tensor, positions: Tensor, cache: Any) -> Any:
    """Return the result of a model's forward pass whose attention calls `attention` computes.

    Args:
        tokens, positions: (B, N).
        cache: of states (`forge_families.states.RowsCache`); None for a model without them.
    """
    inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": cache is not None}
    parameters = inspect.signature(module.forward).parameters
    if "position_ids" in parameters:
        inputs["position_ids"] = positions
    if cache is not None:
        inputs["cache" if "cache" in parameters else "cache_params"] = cache
    _current.attention = attention
    try:
        return module(**inputs)
    finally:
        _current.attention = None


def set_attention(model: nn.Module, name: str) -> None:
    """Have all modules of a model call the attention of this name."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = name


class Recorder:
    """An `Attention` that records the calls; its values do not matter.

    Attributes:
        calls: those so far, in order.
    """

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: Any = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Record a call; return zeros in the shape of its result.

        Raises:
            UnsupportedAttention: the engine does not compute such a call; names the feature.
        """
        if unknown := sorted(name for name, option in options.items() if option is not None and name not in KNOWN):
            raise UnsupportedAttention(f"attention with {', '.join(unknown)}")
        if key.shape[2] != query.shape[2] or key.shape[:3] != value.shape[:3]:
            raise UnsupportedAttention("attention to other keys than those of the same tokens")
        if mask is not None and mask.numel() != 1:
            raise UnsupportedAttention("an attention mask that the model makes by itself")
        if mask is not None and int(mask) < 0:
            raise UnsupportedAttention("an attention mask that is neither causal nor a window")
        window = sliding_window or None
        if mask is not None:
            window = int(mask) or None
            if sliding_window not in (None, 0, window):
                raise UnsupportedAttention(f"sliding_window = {sliding_window} with a mask of {window}")
        scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
        size = max(key.shape[3], value.shape[3])
        self.calls.append(AttentionCall(query.shape[1], key.shape[1], size, scale, window))
        return value.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[3])


def call_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention by the object that runs this thread's forward pass: transformers' attention interface."""
    attention = _current.attention
    assert attention is not None
    if args:  # the scale may come without its name
        options["scaling"] = args[0]
    return attention.attend(query, key, value, attention_mask, **options), None


def describe_mask(*, mask_function: Any, use_vmap: bool = False, local_size: int | None = None, **_: Any) -> Tensor:
    """Return in place of a mask its window as a tensor of four dimensions: transformers' mask interface.

    The window is 0 for a causal mask without one, and -1 for one that is neither causal nor a window.
    """
    window = local_size or 0
    reach = 3 * window + 2 if window else 8
    queries = torch.tensor([0, 1, max(window - 1, 0), window, 2 * window + 1, reach - 1])[:, None]
    keys = torch.arange(reach)
    expected = (keys <= queries) & (keys > queries - window) if window else keys <= queries
    is_known = not use_vmap and torch.equal(mask_function(FIRST, FIRST, queries, keys).expand_as(expected), expected)
    return torch.full((1, 1, 1, 1), window if is_known else -1)


AttentionInterface.register(PROBE, call_attention)
AttentionMaskInterface.register(PROBE, describe_mask)
AttentionInterface.register(ENGINE, call_attention)
