"""Losses over named tensors. Needs torch alone.

A loss is a callable that takes what it needs by name, each a tensor of one shape, [batch, seq] or packed [tokens]:

    logprobs             log-probabilities of the taken tokens under the policy that is trained
    entropy              of that policy's distribution at each token, in nats
    behaviour_logprobs   log-probabilities under the policy that sampled them
    proximal_logprobs    the same under the policy that the step starts from
    ref_logprobs         the same under another model (a frozen reference, a teacher); a loss without a KL term (beta)
                         is given the sampler's
    advantages           per token
    values               what a critic or a reward model now says, one number a token
    old_values, returns  what the critic said before the step, and what it should have said
    weights              each token's share of the loss (0 on padding); the loss is the weighted sum
    padding_mask         1 on trained tokens, 0 elsewhere
    sequences            of packed tokens, the number of each one's sequence, from 0

and returns a scalar. With `weights` a loss is exact under any split into micro-batches and ranks.

An `Algorithm` is a loss that also says how its batch is made: which advantages, which aggregation, whether it needs a
critic or a reference. `load_algorithm` finds one by name.
"""

from .algorithm import Algorithm
from .bradley_terry import BradleyTerryLoss
from .cispo import CISPOLoss
from .correction import Correction
from .dapo import DAPOLoss
from .decoupled import DecoupledPPOLoss
from .distill import DistillLoss
from .dpo import DPOLoss
from .dr_grpo import DrGRPOLoss
from .gae import gae
from .grpo import GRPOLoss, SimpleGRPOLoss
from .gspo import GSPOLoss
from .names import ALGORITHMS, load_algorithm
from .policy import PolicyLoss
from .ppo import PPOLoss, ValueLoss
from .reinforce_loss import ReinforceLoss
from .reinforce_pp import ReinforcePlusPlusLoss
from .rloo import RLOOLoss
from .sapo import SAPOLoss
from .sft import SFTLoss

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "BradleyTerryLoss",
    "CISPOLoss",
    "Correction",
    "DAPOLoss",
    "DPOLoss",
    "DecoupledPPOLoss",
    "DistillLoss",
    "DrGRPOLoss",
    "GRPOLoss",
    "GSPOLoss",
    "PPOLoss",
    "PolicyLoss",
    "RLOOLoss",
    "ReinforceLoss",
    "ReinforcePlusPlusLoss",
    "SAPOLoss",
    "SFTLoss",
    "SimpleGRPOLoss",
    "ValueLoss",
    "gae",
    "load_algorithm",
]
