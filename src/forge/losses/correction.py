"""Importance weights for tokens that another implementation sampled: the engine and the trainer differ by rounding, and
by the steps that were made since.

A weight multiplies a token's loss and passes no gradient. It is `pi / mu`, the trained policy over what sampled,
bounded one way or the other, because a few tokens with enormous ratios would else decide the update.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .common import importance_ratio

Correction = Literal["none", "truncate", "mask"]


def truncated(ratio: Tensor, high: float) -> Tensor:
    """`min(ratio, high)`: bounded variance for some bias (Ionides 2008; Yao et al. 2025, truncated importance sampling
    between training and inference engines). `ratio` of any shape."""
    return ratio.clamp(max=high)


def masked(ratio: Tensor, low: float, high: float) -> Tensor:
    """`ratio` within [low, high] and 0 outside: such tokens do not train (Ling team 2025, IcePop). `ratio` of any
    shape."""
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


@torch.no_grad()
def correction_weights(
    logprobs: Tensor, behaviour_logprobs: Tensor, correction: Correction, low: float, high: float
) -> Tensor:
    """The weights of tokens, of the shape of `logprobs`.

    Raises:
        ValueError: an unknown correction.
    """
    ratio = importance_ratio(logprobs, behaviour_logprobs)
    if correction == "none":
        return torch.ones_like(ratio)
    if correction == "truncate":
        return truncated(ratio, high)
    if correction == "mask":
        return masked(ratio, low, high)
    raise ValueError(f"correction must be none, truncate or mask, got {correction!r}")
