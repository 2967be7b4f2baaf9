"""GRPO: group-relative policy optimisation, clipped off-policy (`GRPO`) and on-policy (`SimpleGRPOLoss`)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from .base import Aggregation
from .clipped import Clipped, GroupRelative
from .terms import kl_k3, sequence_mean_weights, weighted_sum, where_trained


@dataclass(eq=False)
class GRPO(Clipped, GroupRelative):
    """Group-relative policy optimisation (Shao et al. 2024, DeepSeekMath, eq. 3).

        A_i = (r_i - mean(r)) / (std(r) + std_epsilon)  over the rewards r of a prompt's samples
        per token:  -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) + beta * KL(pi || ref)

    The paper's aggregation is "sequence_mean"; the default here is "token_mean", as in most recipes since.
    `clip_high > clip_low` keeps exploration alive (Yu et al. 2025, DAPO, section 3.1).

    Args:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound on the loss of a token with a negative advantage, see `terms.clipped_surrogate`; None: off.
        normalize: divide by the standard deviation; False only subtracts the mean.
        std: "sample" divides by n - 1, "population" by n.
        std_epsilon: added to the deviation.
    """


class SimpleGRPOLoss(nn.Module):
    """GRPO for batches that the current policy sampled (Shao et al. 2024, DeepSeekMath, eq. 3 at pi = pi_old).

        per token:  -(pi / stop_gradient(pi)) * advantage + beta * KL(pi || ref)

    averaged over the tokens of each sequence, then over sequences.
    """

    aggregation: ClassVar[Aggregation] = "sequence_mean"

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.beta = beta

    def forward(
        self,
        logprobs: Tensor,
        ref_logprobs: Tensor,
        advantages: Tensor,
        padding_mask: Tensor,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, a scalar. All tensors are [batch, seq]; `weights` replace the default aggregation."""
        weights = sequence_mean_weights(padding_mask) if weights is None else weights
        logprobs = where_trained(logprobs, weights)
        ratio = torch.exp(logprobs - logprobs.detach())  # its value is 1; its gradient is the log-probability's
        return weighted_sum(self.beta * kl_k3(logprobs, ref_logprobs) - ratio * advantages, weights)
