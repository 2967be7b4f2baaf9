"""The loss of reward models that are trained on preferences."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Aggregation
from .terms import in_order, sequence_sums, sum_pairs, weighted_sum, where_trained


@dataclass(eq=False)
class BradleyTerryLoss:
    """The loss by which the preferred answer scores higher (Bradley & Terry 1952; Ouyang et al. 2022, eq. 1).

        per pair:  -log sigmoid(s_chosen - s_rejected) + center * (s_chosen + s_rejected)^2

    Only differences of scores are determined; `center` keeps their mean near 0 (Eisenstein et al. 2023, section 2).
    Sequences come in pairs, the preferred one first, with one trained token each, at which the score is read.

    Args:
        center: weight of the last term, at least 0.

    Raises:
        ValueError: `center` below 0.
    """

    center: float = 0.0

    aggregation: ClassVar[Aggregation] = "sequence_mean"
    unit: ClassVar[int] = 2  # sequences that belong together

    def __post_init__(self) -> None:
        if not 0 <= self.center < math.inf:
            raise ValueError(f"center must be at least 0 and finite, got {self.center}")

    def __call__(self, values: Tensor, weights: Tensor, sequences: Tensor | None = None) -> Tensor:
        """Return the loss, a scalar. Both tensors are [batch, seq], or packed [tokens] with `sequences`.

        Raises:
            ValueError: an odd number of sequences, packed tokens without `sequences`, or several trained tokens in a
                sequence.
        """
        scores = where_trained(values, weights)

        # Sums over a sequence would add up several scores.
        if (sequence_sums((weights != 0).float(), sequences) > 1).any():
            raise ValueError(
                "each sequence must have one trained token, its last, at which the score is read: load the pairs "
                "with as_scores"
            )

        chosen, rejected = sum_pairs(scores, sequences)
        loss = -F.logsigmoid(chosen - rejected) + self.center * (chosen + rejected) ** 2
        pair_weights = torch.stack(sum_pairs(weights, sequences)).sum(0)

        # The second term is 0: it connects the loss of a micro-batch without pairs with the graph.
        return weighted_sum(loss, pair_weights) + 0.0 * scores.sum()

    @torch.no_grad()
    def metrics(self, values: Tensor, weights: Tensor, sequences: Tensor | None = None) -> dict[str, Tensor]:
        """Return metrics by name, [pairs] each: the `margin` between the scores, and `accuracy` (0.5 at a tie)."""
        chosen, rejected = sum_pairs(where_trained(values, weights), sequences)
        return {"margin": chosen - rejected, "accuracy": in_order(chosen, rejected)}
