"""Direct preference optimisation: which of two answers is preferred, without a reward model."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Aggregation
from .terms import in_order, log_ratio, sum_pairs, weighted_sum, where_trained


@dataclass(eq=False)
class DPOLoss:
    """DPO (Rafailov et al. 2023, eq. 7), with the label smoothing of conservative DPO (Mitchell 2023).

        per pair:  -(1 - s) * log sigmoid(m) - s * log sigmoid(-m)
        m = beta * (sum of log(pi / ref) over the preferred answer - the same over the other)

    Sequences come in pairs, the preferred one first. The weight of a pair is the sum of its tokens' weights, so that
    "sequence_mean" is the mean over pairs.

    Args:
        beta: the strength of the KL penalty that holds the policy near the reference, above 0.
        label_smoothing: `s`, the assumed share of wrong labels, in [0, 0.5).

    Raises:
        ValueError: a setting outside its range.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0

    aggregation: ClassVar[Aggregation] = "sequence_mean"
    unit: ClassVar[int] = 2  # sequences that belong together

    def __post_init__(self) -> None:
        if not (0 < self.beta < math.inf and 0 <= self.label_smoothing < 0.5):
            raise ValueError(
                "beta must be above 0 and label_smoothing in [0, 0.5), both finite, got "
                f"{self.beta} and {self.label_smoothing}"
            )

    def __call__(
        self, logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor, sequences: Tensor | None = None
    ) -> Tensor:
        """Return the loss, a scalar. All tensors are [batch, seq], or packed [tokens] with `sequences`.

        Raises:
            ValueError: an odd number of sequences, or packed tokens without `sequences`.
        """
        chosen, rejected = self._implicit_rewards(logprobs, ref_logprobs, weights, sequences)

        # The losses of both labels, in the shares that smoothing assumes.
        margin = chosen - rejected
        loss = -(1.0 - self.label_smoothing) * F.logsigmoid(margin) - self.label_smoothing * F.logsigmoid(-margin)
        pair_weights = torch.stack(sum_pairs(weights, sequences)).sum(0)

        # The second term is 0: it connects the loss of a micro-batch without pairs with the graph.
        return weighted_sum(loss, pair_weights) + 0.0 * where_trained(logprobs, weights).sum()

    @torch.no_grad()
    def metrics(
        self, logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor, sequences: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return metrics by name, [pairs] each: the `margin` between the implicit rewards (beta * log(pi / ref)),
        `accuracy` (1 if the preferred answer has the higher one, 0.5 at a tie), `reward_chosen` and
        `reward_rejected`."""
        chosen, rejected = self._implicit_rewards(logprobs, ref_logprobs, weights, sequences)
        return {
            "margin": chosen - rejected,
            "accuracy": in_order(chosen, rejected),
            "reward_chosen": chosen,
            "reward_rejected": rejected,
        }

    def _implicit_rewards(
        self, logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor, sequences: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return sum_pairs(self.beta * where_trained(log_ratio(logprobs, ref_logprobs), weights), sequences)
