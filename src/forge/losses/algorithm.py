"""What a training loop has to know of an algorithm besides its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from ..advantages import group_relative

# What a loss may ask for by name, see `forge.losses`.
TENSORS = (
    *("logprobs", "entropy", "behaviour_logprobs", "proximal_logprobs", "ref_logprobs", "advantages", "values"),
    *("old_values", "returns", "weights", "padding_mask", "sequences"),
)


class Algorithm(nn.Module):
    """A loss that says how its batch is made. The defaults are GRPO's.

    Attributes:
        aggregation: how tokens share the loss, see `forge.data.packing.pack`.
        fixed_aggregation: the loss means something under that one alone.
        uses_rewards: advantages depend on rewards.
        advantages_alone: where a token's advantage, beta and entropy_coef are 0 it has no gradient.
        within_group: advantages compare a prompt's samples with one another alone, so that samples with equal rewards
            teach nothing.
        whiten: token advantages are brought to mean 0 and deviation 1 over the batch.
        needs_critic: advantages come from a critic's values by `forge.losses.gae`, with `discount` and `trace`.
        needs_reference: the loss takes `ref_logprobs` of another model.
        needs_teacher: that model has to be another than the start.
        beta, kl, kl_in: weight, estimator and place ("loss" or "reward") of the KL to the reference.
        entropy_coef: weight of the entropy bonus.
        on_policy: every sample is taken for the policy's own.
        dynamic_sampling: prompts whose samples teach nothing are replaced by others before training, at most so many
            for each prompt of a batch; 0 is off.
    """

    aggregation: Literal["token_mean", "sequence_mean", "fixed_horizon"] = "token_mean"
    fixed_aggregation: bool = False
    uses_rewards: bool = True
    advantages_alone: bool = True
    within_group: bool = True
    whiten: bool = False
    needs_critic: bool = False
    needs_teacher: bool = False
    discount: float = 1.0
    trace: float = 1.0
    beta: float = 0.0
    kl: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: float = 0.0
    on_policy: bool = False
    dynamic_sampling: int = 0

    @property
    def needs_reference(self) -> bool:
        return self.needs_teacher or self.beta > 0

    def advantages(self, groups: Sequence[Sequence[float]]) -> list[list[float]]:
        """One advantage an episode from the rewards of a batch, both [groups][samples]."""
        return [group_relative(rewards) for rewards in groups]


class OwnLoss(Algorithm):
    """A plain function over named tensors, with GRPO's advantages.

    Args:
        function: one with a parameter `beta` above 0, or that must be given `ref_logprobs`, has a reference model.
        **settings: further arguments of it, all that are no tensors (`TENSORS`).
    """

    advantages_alone = False  # nobody knows

    def __init__(self, function: Callable[..., Tensor], **settings: Any) -> None:
        super().__init__()
        parameters = inspect.signature(function).parameters
        default = parameters["beta"].default if "beta" in parameters else 0.0
        beta = settings.get("beta", default)
        self.beta = beta if isinstance(beta, int | float) else 0.0
        ref = parameters.get("ref_logprobs")
        self._must_have_reference = ref is not None and ref.default is inspect.Parameter.empty
        # An attribute of the instance: whoever asks which tensors it takes sees the function's own parameters.
        self.forward = partial(function, **settings) if settings else function

    @property
    def needs_reference(self) -> bool:
        return self._must_have_reference or self.beta > 0
