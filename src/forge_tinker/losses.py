"""The losses of `forward_backward` by their names in the protocol: sums over the tokens of all data.

p are the model's log-probabilities of the targets, q the sampler's (`logprobs` of a datum), A its `advantages`, and
r = exp(p - q). Formulas: https://tinker-docs.thinkingmachines.ai/tinker/losses. That of stable_reinforce is not
published; here it is -(stop_gradient(min(r, 1)) * A * p - kl_coeff / 2 * (p - q)^2) on sampled tokens.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from forge.algorithms import CISPO, DRO, GSPO, PPO, Reinforce
from forge.algorithms.terms import importance_ratio

# The settings of each loss, with their defaults. A datum may have its own clip thresholds, one for each token.
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": CLIP,
    "cispo": CLIP,
    "gspo": {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
    "dro": {"beta": 0.05},
    "stable_reinforce": {"kl_coeff": 0.0},
}


class Tokens:
    """The tensors of the tokens that a loss reads, [tokens] each, or [tokens, targets] where data have several.

    Args:
        logprobs: the model's log-probabilities of the targets.
        inputs: the data's tensors by name.
        config: the settings of the loss.
        sequences: [tokens], the number of each token's datum.
    """

    def __init__(
        self, logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float], sequences: Tensor
    ) -> None:
        self.logprobs, self.inputs, self.config, self.sequences = logprobs, inputs, config, sequences

    def read(self, name: str) -> Tensor:
        """Return an input by name; a threshold that the data do not have is the setting's.

        Raises:
            ValueError: the data lack it.
        """
        if name in self.inputs:
            return self.inputs[name]
        if name in self.config:
            return torch.tensor(self.config[name])
        raise ValueError(f"the loss needs loss_fn_inputs[{name!r}] of every datum; they have {sorted(self.inputs)}")

    @property
    def ratio(self) -> Tensor:
        """Return r = exp(p - q)."""
        return importance_ratio(self.logprobs, self.read("logprobs"))

    def clip_ratio(self, loss: Any) -> Any:
        """Return the algorithm `loss` with the thresholds of the ratio that the request has."""
        loss.clip_low = 1 - self.read("clip_low_threshold")
        loss.clip_high = self.read("clip_high_threshold") - 1
        if bool((loss.clip_low + loss.clip_high < 0).any()):
            raise ValueError("clip_low_threshold must be at most clip_high_threshold")
        return loss


def _clipped(loss: Any, tokens: Tokens) -> Tensor:
    return tokens.clip_ratio(loss()).token_loss(tokens.ratio, tokens.logprobs, tokens.read("advantages"))


def _gspo(tokens: Tokens) -> Tensor:
    # The ratio is the mean over a datum's tokens of mask 1.
    mask = tokens.inputs.get("sequence_ratio_mask", torch.ones_like(tokens.logprobs))
    loss = tokens.clip_ratio(GSPO())
    ratio = loss.ratio(tokens.logprobs, tokens.read("logprobs"), mask, tokens.sequences)
    return loss.token_loss(ratio, tokens.logprobs, tokens.read("advantages"))


def _stable_reinforce(tokens: Tokens) -> Tensor:
    gradient = Reinforce(clip_ratio=0.0).token_loss(tokens.ratio, tokens.logprobs, tokens.read("advantages"))
    no_advantages = torch.zeros_like(tokens.logprobs)
    penalty = DRO(penalty=tokens.config["kl_coeff"]).token_loss(tokens.ratio, tokens.logprobs, no_advantages)
    return (gradient + penalty) * tokens.read("sampled")


LOSSES: dict[str, Callable[[Tokens], Tensor]] = {
    "cross_entropy": lambda tokens: -tokens.logprobs * tokens.read("weights"),
    "importance_sampling": lambda tokens: -tokens.ratio * tokens.read("advantages"),
    "ppo": partial(_clipped, PPO),
    "cispo": partial(_clipped, CISPO),
    "gspo": _gspo,
    "dro": lambda tokens: DRO(penalty=tokens.config["beta"]).token_loss(
        tokens.ratio, tokens.logprobs, tokens.read("advantages")
    ),
    "stable_reinforce": _stable_reinforce,
}


def check_loss(name: str, config: Mapping[str, Any]) -> dict[str, float]:
    """Return the settings of a loss, with the defaults of those that `config` lacks.

    >>> check_loss("dro", {})
    {'beta': 0.05}

    Raises:
        ValueError: an unknown loss or setting, or a value that is not a number; the message says which there are.
    """
    if name not in SETTINGS:
        raise ValueError(f"loss_fn must be one of {', '.join(SETTINGS)}, got {name!r}")
    for key, value in config.items():
        if key not in SETTINGS[name]:
            raise ValueError(f"loss_fn_config of {name} has no {key!r}; it has {[*SETTINGS[name]] or 'no settings'}")
        if not isinstance(value, int | float):
            raise ValueError(f"loss_fn_config of {name}: {key} must be a number, got {value!r}")
    return {**SETTINGS[name], **config}
