"""Generalised advantage estimation, and rewards that come before the end."""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# Values that deviate by less than this share of the largest one differ by float32's rounding only.
ROUNDING = 1e-6


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, discount: float = 1.0, trace: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns (Schulman et al. 2016, eq. 16).

        delta_t = r_t + discount * V_next - V_t,   A_t = delta_t + discount * trace * A_next,   return_t = A_t + V_t

    "Next" is the next token of the sequence that the policy wrote: what an environment or a user wrote in between is
    skipped. After the last token the value is 0.

    Args:
        rewards: [batch, seq], the reward that followed each token.
        values: [batch, seq], the critic's value before each token.
        mask: [batch, seq], nonzero on tokens that the policy wrote.
        discount: gamma.
        trace: lambda; with 1 an advantage is the return minus the value, with 0 it looks one token ahead.

    Returns:
        (advantages [batch, seq], returns [batch, seq]), 0 where `mask` is 0.

    >>> gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.25, 0.5]]), torch.ones(1, 2))
    (tensor([[0.7500, 0.5000]]), tensor([[1., 1.]]))
    """
    is_trained = mask.bool()
    rewards, values = (torch.where(is_trained, x, torch.zeros_like(x)) for x in (rewards, values))
    advantages = torch.zeros_like(values)

    # From the last token to the first; tokens that the policy did not write pass both on unchanged.
    next_advantage = next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + discount * next_value - values[:, t]
        advantage = delta + discount * trace * next_advantage
        advantages[:, t] = torch.where(is_trained[:, t], advantage, torch.zeros_like(advantage))
        next_advantage = torch.where(is_trained[:, t], advantage, next_advantage)
        next_value = torch.where(is_trained[:, t], values[:, t], next_value)

    return advantages, advantages + values


def whiten_values(values: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """Return `(values - mean) / sqrt(variance + epsilon)`, [tokens], with the variance of a sample (n - 1); zeros if
    all values are equal up to rounding."""
    wide = values.double()
    if len(values) < 2 or wide.std() <= ROUNDING * wide.abs().max():
        return torch.zeros_like(values)
    return ((wide - wide.mean()) * torch.rsqrt(wide.var() + epsilon)).to(values.dtype)


def pad_sequences(values: Tensor, counts: list[int]) -> Tensor:
    """Return packed values [tokens], of `counts` tokens a sequence, as [sequences, longest] with zeros on the right.

    >>> pad_sequences(torch.tensor([1, 2, 3]), [1, 2]).tolist()
    [[1, 0], [2, 3]]
    """
    return pad_sequence(list(values.split(counts)), batch_first=True)


def pack_sequences(values: Tensor, counts: list[int]) -> Tensor:
    """Return the first `counts` values of each row of [sequences, longest], packed: the inverse of `pad_sequences`.

    >>> pack_sequences(torch.tensor([[1, 0], [2, 3]]), [1, 2]).tolist()
    [1, 2, 3]
    """
    return torch.cat([row[:count] for row, count in zip(values, counts, strict=True)])
