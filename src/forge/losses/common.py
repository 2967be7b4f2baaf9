"""The pieces that losses share: importance ratio, KL estimate, aggregation."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(values: Tensor) -> Tensor:
    """Half precision raised to float32; float32 and float64 as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def where_trained(values: Tensor, weights: Tensor) -> Tensor:
    """`wide(values)` where `weights` is not 0, else 0: whatever stands elsewhere (NaN included) passes no gradient."""
    return torch.where(weights != 0, wide(values), 0.0)


def importance_ratio(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """`pi(a) / mu(a)` per token. Its logarithm is bounded to +-20 so that no ratio overflows."""
    return torch.exp((wide(logprobs) - wide(behaviour_logprobs)).clamp(-20.0, 20.0))


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference), non-negative and unbiased for samples of the policy.

    `exp(d) - 1 - d` with `d = ref - logp` (Schulman 2020, "Approximating KL divergence", k3).
    """
    d = (wide(ref_logprobs) - wide(logprobs)).clamp(-20.0, 20.0)
    return torch.expm1(d) - d


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """`sum(values * weights)`, where a weight of zero removes its token whatever its value is (NaN included)."""
    return torch.where(weights != 0, values * weights, torch.zeros_like(values)).sum()


def sequence_mean_weights(padding_mask: Tensor) -> Tensor:
    """Weights [batch, seq] with which every sequence counts the same and its tokens share its part.

    A sequence without trained tokens counts as a sequence of loss zero.
    """
    mask = padding_mask.float()
    return mask / mask.sum(dim=-1, keepdim=True).clamp(min=1.0) / mask[..., 0].numel()


def token_mean_weights(padding_mask: Tensor) -> Tensor:
    """Weights of any shape with which every trained token counts the same."""
    mask = padding_mask.float()
    return mask / mask.sum().clamp(min=1.0)
