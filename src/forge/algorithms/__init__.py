"""Algorithms: one file each, with its formula. Needs torch only.

A loss is a callable that takes what it needs by name, each a tensor of one shape, [batch, seq] or packed [tokens]:

    logprobs             log-probabilities of the taken tokens under the policy that is trained
    entropy              of that policy's distribution at each token, in nats
    behaviour_logprobs   log-probabilities under the policy that sampled them
    proximal_logprobs    the same under the policy that the step starts from
    ref_logprobs         the same under another model (a frozen reference, a teacher); a loss whose `beta` is 0
                         receives the sampler's
    advantages           per token
    values               output of a critic or a reward model, one number per token
    old_values, returns  the critic's values before the step, and their targets
    weights              each token's share of the loss (0 on padding); the loss is the weighted sum
    padding_mask         1 on trained tokens, 0 elsewhere
    sequences            of packed tokens, the number of each one's sequence, from 0
    tokens               the taken tokens' ids
    positions            the number of a token in its answer, from 0
    groups               the number of the prompt whose group a token's sequence belongs to
    branch_shares        where episodes have branches, each a sequence: the share of its episode's trained tokens that
                         a token's branch has

and returns a scalar. With `weights` a loss is exact under any split into micro-batches and ranks.

An `Algorithm` is a loss that also says how its batch is made: its advantages, its aggregation, whether it needs a
critic or a reference. `load_algorithm` finds one by name.
"""

from .base import Algorithm
from .bradley_terry import BradleyTerryLoss
from .cispo import CISPO
from .correction import Correction
from .dapo import DAPO
from .decoupled_ppo import DecoupledPPO
from .distill import Distill
from .dpo import DPOLoss
from .dr_grpo import DrGRPO
from .dro import DRO
from .gae import gae
from .grpo import GRPO, SimpleGRPOLoss
from .gspo import GSPO
from .load import ALGORITHMS, load_algorithm, setting_names
from .ppo import PPO, ValueLoss
from .reinforce import Reinforce
from .reinforce_plus_plus import ReinforcePlusPlus
from .rloo import RLOO
from .sapo import SAPO
from .sft import SFTLoss

__all__ = [
    "ALGORITHMS",
    "CISPO",
    "DAPO",
    "DRO",
    "GRPO",
    "GSPO",
    "PPO",
    "RLOO",
    "SAPO",
    "Algorithm",
    "BradleyTerryLoss",
    "Correction",
    "DPOLoss",
    "DecoupledPPO",
    "Distill",
    "DrGRPO",
    "Reinforce",
    "ReinforcePlusPlus",
    "SFTLoss",
    "SimpleGRPOLoss",
    "ValueLoss",
    "gae",
    "load_algorithm",
    "setting_names",
]
