"""What a training loop has to know of an algorithm besides its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn

from ..advantages import group_relative


class Algorithm(nn.Module):
    """A loss that says how its batch is made. The defaults are GRPO's.

    Attributes:
        aggregation: how tokens share the loss, see `forge.data.packing.pack`.
        within_group: advantages compare a prompt's samples with one another alone, so that samples with equal rewards
            teach nothing.
        whiten: token advantages are brought to mean 0 and deviation 1 over the batch.
        needs_critic: advantages come from a critic's values by `forge.losses.gae`, with `discount` and `trace`.
        needs_reference: the loss takes `ref_logprobs` of another model.
        beta, kl, kl_in: weight, estimator and place ("loss" or "reward") of the KL to the reference.
        normalize: divide advantages by the group's standard deviation.
        dynamic_sampling: prompts whose samples teach nothing are replaced by others before training, at most so many
            for each prompt of a batch; 0 is off.
    """

    aggregation: Literal["token_mean", "sequence_mean", "fixed_horizon"] = "token_mean"
    within_group: bool = True
    whiten: bool = False
    needs_critic: bool = False
    discount: float = 1.0
    trace: float = 1.0
    beta: float = 0.0
    kl: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    normalize: bool = True
    dynamic_sampling: int = 0

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0

    def advantages(self, groups: Sequence[Sequence[float]]) -> list[list[float]]:
        """One advantage an episode from the rewards of a batch, both [groups][samples]."""
        return [group_relative(rewards, normalize=self.normalize) for rewards in groups]


class OwnLoss(Algorithm):
    """A plain function over named tensors, with GRPO's advantages."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        # An attribute of the instance: whoever asks which tensors it takes sees the function's own parameters.
        self.forward = function
