"""Losses over named tensors. Needs torch alone.

A loss is a callable that takes what it needs by name, each a tensor of one shape, [batch, seq] or packed [tokens]:

    logprobs             log-probabilities of the taken tokens under the policy that is trained
    behaviour_logprobs   the same under the policy that sampled them
    ref_logprobs         the same under a frozen reference; a loss without a KL term (beta) is given the sampler's
    advantages           per token
    entropy              of the policy's distribution at each token, in nats
    padding_mask         1 on trained tokens, 0 elsewhere
    weights              each token's share of the loss (0 on padding); the loss is the weighted sum

and returns a scalar. With `weights` a loss is exact under any split into micro-batches and ranks.
"""

from .grpo import GRPOLoss, SimpleGRPOLoss
from .reinforce_loss import ReinforceLoss
from .sft import SFTLoss

__all__ = ["GRPOLoss", "ReinforceLoss", "SFTLoss", "SimpleGRPOLoss"]
