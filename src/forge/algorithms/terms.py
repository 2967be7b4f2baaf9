"""Terms that algorithms share: importance ratio, clip, KL estimators, sums over sequences, aggregation.

Tensors are [batch, seq], where each row is a sequence, or packed [tokens] with `sequences` [tokens], the number of each
token's sequence from 0. A token is trained where its `weights` is not 0.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]

# Logarithms of ratios are clamped to this: exp(20) = 5e8 and its square fit into float32. Beyond it the gradient is 0.
BOUND = 20.0


def to_wide(values: Tensor) -> Tensor:
    """Return half-precision values as float32, and float32 or float64 values unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def where_trained(values: Tensor, weights: Tensor) -> Tensor:
    """Return values with 0 where `weights` is 0, so that values there, even NaN, have no gradient; at least float32.

    >>> where_trained(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.5])).tolist()
    [0.0, 2.0]
    """
    return torch.where(weights != 0, to_wide(values), 0.0)


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return `log(pi(a) / old(a))` per token, clamped to +-20."""
    return (to_wide(logprobs) - to_wide(old_logprobs)).clamp(-BOUND, BOUND)


def importance_ratio(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """Return `pi(a) / mu(a)` per token. Its logarithm is clamped to +-20 so that no ratio overflows."""
    return torch.exp(log_ratio(logprobs, behaviour_logprobs))


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Return PPO's clipped objective per token, to be maximised (Schulman et al. 2017, eq. 7).

        min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A), and where A < 0 not below dual_clip * A

    `dual_clip` bounds what a token with a negative advantage and a huge ratio can do (Ye et al. 2020, eq. 5).

    >>> clipped_surrogate(torch.tensor([1.5]), torch.tensor([1.0]), clip_low=0.25, clip_high=0.25)
    tensor([1.2500])
    """
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    if dual_clip is None:
        return surrogate
    return torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)


def beyond_clip(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Return a mask of the tokens without gradient in `clipped_surrogate`; bool, of the shape of `ratio`."""
    # The minimum takes the clipped term only where it is the smaller one: above for A > 0, below for A < 0.
    is_above = (ratio > 1.0 + clip_high) & (advantages > 0)
    is_below = (ratio < 1.0 - clip_low) & (advantages < 0)
    outside = is_above | is_below
    return outside if dual_clip is None else outside | ((ratio > dual_clip) & (advantages < 0))


def check_clip(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    """Check the bounds of `clipped_surrogate`.

    Raises:
        ValueError: `clip_low` is outside [0, 1), `clip_high` is negative or infinite, or `dual_clip` is not above
            1 + clip_high.
    """
    if not (0 <= clip_low < 1 and 0 <= clip_high < math.inf):
        raise ValueError(
            f"clip_low must be in [0, 1), and clip_high at least 0 and finite, got {clip_low} and {clip_high}"
        )
    if dual_clip is not None and not 1 + clip_high < dual_clip < math.inf:
        raise ValueError(f"dual_clip must be above 1 + clip_high and finite, or None, got {dual_clip}")


def weighted_gradient(ratio: Tensor, logprobs: Tensor, advantages: Tensor, high: float, low: float = 0.0) -> Tensor:
    """Return `stop_gradient(clip(r, low, high)) * A * log pi` per token, to be maximised: the importance weight is
    bounded, and every token keeps a gradient."""
    return ratio.detach().clamp(low, high) * advantages * logprobs


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return an estimate of KL(policy || reference) per token, non-negative and unbiased for samples of the policy.

    `exp(d) - 1 - d` with `d = ref - logp` (Schulman 2020, "Approximating KL divergence", k3).
    """
    # expm1: exp(d) - 1 would lose the digits of a small KL.
    d = log_ratio(ref_logprobs, logprobs)
    return torch.expm1(d) - d


def kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """Return an estimate of KL(policy || reference) per token from samples of the policy (Schulman 2020).

    With `d = ref - logp`, k1 is `-d` (unbiased, of either sign), k2 is `d^2 / 2` (low variance, biased), and k3
    is `kl_k3`. As a loss they differ in their gradients: the one of k1 is 0 in expectation and adds only noise, the one
    of k2 is the gradient of the reverse KL, and the one of k3 is close to it if the two policies are close.

    Raises:
        ValueError: an unknown estimator.
    """
    if estimator == "k1":
        return log_ratio(logprobs, ref_logprobs)
    if estimator == "k2":
        return 0.5 * log_ratio(logprobs, ref_logprobs) ** 2
    if estimator == "k3":
        return kl_k3(logprobs, ref_logprobs)
    raise ValueError(f"kl must be k1, k2 or k3, got {estimator!r}")


def sequence_sums(values: Tensor, sequences: Tensor | None) -> Tensor:
    """Return the sum over each sequence's tokens, [sequences].

    Raises:
        ValueError: packed values without `sequences`.

    >>> sequence_sums(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1])).tolist()
    [3.0, 3.0]
    """
    if sequences is not None:
        # Packed tokens; a sequence without tokens has the sum 0.
        count = int(sequences.max()) + 1 if sequences.numel() else 0
        return values.new_zeros(count).index_add(0, sequences, values)
    if values.dim() != 2:
        raise ValueError(
            f"values of shape {tuple(values.shape)} must be [sequences, tokens], or come with the argument sequences, "
            "the sequence index of each token"
        )
    return values.sum(-1)


def over_tokens(values: Tensor, like: Tensor, sequences: Tensor | None) -> Tensor:
    """Return for each token the value of its sequence, in the shape of `like`; `values` are [sequences]."""
    return values[sequences] if sequences is not None else values[:, None].expand_as(like)


def sequence_means(values: Tensor, weights: Tensor, sequences: Tensor | None) -> Tensor:
    """Return the mean of `values` over each sequence's trained tokens, [sequences]; 0 for a sequence without any."""
    trained = (weights != 0).to(values.dtype)
    return sequence_sums(values * trained, sequences) / sequence_sums(trained, sequences).clamp(min=1.0)


def sum_pairs(values: Tensor, sequences: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sums of `values` over the preferred sequences and over the others, [pairs] each.

    Sequences come in pairs, the preferred one first.

    Raises:
        ValueError: an odd number of sequences.
    """
    sums = sequence_sums(values, sequences)
    if len(sums) % 2:
        raise ValueError(
            "a batch of preference pairs must have an even number of sequences, chosen and rejected in turn, got "
            f"{len(sums)}"
        )
    return sums[0::2], sums[1::2]


def in_order(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return for each pair 1 if the preferred answer scores higher, 0 if lower, 0.5 at a tie. All tensors are [pairs].

    >>> in_order(chosen=torch.tensor([2.0, 1.0]), rejected=torch.tensor([0.0, 1.0])).tolist()
    [1.0, 0.5]
    """
    return (chosen > rejected).float() + 0.5 * (chosen == rejected).float()


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return `sum(values * weights)`, without the tokens of weight 0, whose values may be NaN.

    >>> weighted_sum(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5])).item()
    1.5
    """
    return torch.where(weights != 0, values * weights, torch.zeros_like(values)).sum()


def sequence_mean_weights(padding_mask: Tensor) -> Tensor:
    """Return weights [batch, seq] that make the weighted sum the mean over sequences of the mean over their tokens.

    A sequence without trained tokens counts as a sequence of loss zero.

    >>> sequence_mean_weights(torch.tensor([[1, 1], [1, 0]])).tolist()
    [[0.25, 0.25], [0.5, 0.0]]
    """
    mask = padding_mask.float()
    return mask / mask.sum(dim=-1, keepdim=True).clamp(min=1.0) / mask[..., 0].numel()


def token_mean_weights(padding_mask: Tensor) -> Tensor:
    """Return weights that make the weighted sum the mean over trained tokens; of the mask's shape."""
    mask = padding_mask.float()
    return mask / mask.sum().clamp(min=1.0)
