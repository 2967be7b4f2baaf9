"""Algorithms by name: the library's, a class or a function of one's own, and what is wrong with a name or a setting."""

import sys
import types

import pytest
import torch

from forge.algorithms.terms import weighted_sum
from forge.losses import GRPOLoss, GSPOLoss, load_algorithm


def own_loss(logprobs, advantages, weights, scale: float = 1.0):
    return -scale * weighted_sum(advantages * logprobs, weights)


def with_kl(logprobs, advantages, weights, ref_logprobs=None, beta: float = 0.0):
    return weighted_sum(beta * (logprobs - ref_logprobs) - advantages * logprobs, weights)


def needs_scale(logprobs, weights, scale):
    return -scale * weighted_sum(logprobs, weights)


def with_teacher(logprobs, ref_logprobs, weights):
    return weighted_sum(logprobs - ref_logprobs, weights)


class OwnAlgorithm(GRPOLoss):
    def __init__(self, power: float = 2.0, **more):
        super().__init__(**more)
        self.power = power


@pytest.fixture(autouse=True)
def module():
    sys.modules["my_losses"] = mine = types.ModuleType("my_losses")
    mine.own_loss, mine.OwnAlgorithm, mine.Plain, mine.three = own_loss, OwnAlgorithm, torch.nn.Linear, 3
    mine.with_kl, mine.with_teacher, mine.needs_scale = with_kl, with_teacher, needs_scale
    yield
    del sys.modules["my_losses"]


def test_algorithm_is_loaded_by_name_with_nested_settings():
    algorithm = load_algorithm("gspo", clip_high=0.1, dual_clip=3.0, beta=0.2, kl="k2")
    assert isinstance(algorithm, GSPOLoss)
    assert (algorithm.clip_high, algorithm.dual_clip, algorithm.beta, algorithm.kl) == (0.1, 3.0, 0.2, "k2")
    assert algorithm.needs_reference
    assert not load_algorithm("gspo").needs_reference
    assert load_algorithm("distill").needs_reference
    assert load_algorithm("ppo").needs_critic


def test_custom_loss_function_uses_grpo_advantages():
    algorithm = load_algorithm("my_losses:own_loss", scale=3.0)
    x = torch.tensor([-1.0, -2.0])
    assert algorithm(logprobs=x, advantages=torch.ones(2), weights=torch.ones(2)).item() == 9.0
    assert algorithm.advantages([[1.0, 0.0]]) == GRPOLoss().advantages([[1.0, 0.0]])
    assert algorithm.aggregation == "token_mean"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dpao", {}, "unknown algorithm 'dpao': did you mean 'dapo'"),
        ("no.such.module:Name", {}, "was not found .*write it as package.module:Name"),
        ("my_losses:nothing", {}, "was not found"),
        ("my_losses:three", {}, "must be a class or a function"),
        (
            "my_losses:Plain",
            {"in_features": 1, "out_features": 1},
            "needs 'input', which is neither set under grpo nor a tensor",
        ),
        ("grpo", {"clip_hihg": 0.3}, "algorithm grpo has no setting 'clip_hihg'; did you mean 'clip_high'"),
        ("rloo", {"tau_positive": 1.0}, "algorithm rloo has no setting 'tau_positive'"),
        ("sapo", {"clip_low": 0.1}, "algorithm sapo has no setting 'clip_low'"),
        ("ppo", {"normalize": False}, "algorithm ppo has no setting 'normalize'"),
        ("rloo", {"kl_in": "reward"}, "RLOO supports the KL in the loss only"),
        ("decoupled_ppo", {"correction": None}, "decoupled PPO needs a correction"),
        ("grpo", {"std": "mean"}, "grpo.std: Input should be 'sample' or 'population', got 'mean'"),
        ("distill", {"beta": 0.1}, "distill supports no KL term other"),
        ("my_losses:needs_scale", {}, "algorithm my_losses:needs_scale needs 'scale', which is neither set"),
        ("grpo", {"clip_low": "a"}, "grpo.clip_low: Input should be a valid number, got 'a'"),
        ("grpo", {"correction": "mask"}, "grpo.correction: Input should be an instance of Correction"),
        ("grpo", {"entropy_coef": -1.0}, "beta and entropy_coef must be at least 0"),
        ("my_losses:own_loss", {"factor": 1.0}, "has no setting 'factor': its settings are scale"),
        ("grpo", {"clip_low": 2.0}, "clip_low must be in"),
        ("grpo", {"dual_clip": 1.1}, "dual_clip must be above 1"),
        ("grpo", {"beta": -1.0}, "beta and entropy_coef must be at least 0"),
        ("grpo", {"kl": "k4"}, "grpo.kl: Input should be 'k1', 'k2' or 'k3'"),
        ("grpo", {"kl_in": "advantage"}, "grpo.kl_in: Input should be 'loss' or 'reward'"),
        ("dapo", {"dynamic_sampling": -1}, "dynamic_sampling must be at least 0"),
        ("cispo", {"clip_low": 1.5}, "clip_low must be in"),
        ("sapo", {"tau_negative": 0.0}, "tau_positive and tau_negative must be above 0"),
        ("reinforce", {"baseline": "group"}, "grpo.baseline: Input should be 'batch' or 'none'"),
        ("ppo", {"trace": 1.5}, "discount and trace must be in"),
        ("distill", {"clip_high": -1.0}, "clip_high must be at least 0"),
    ],
)
def test_unknown_algorithm_settings_raise(name: str, settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        load_algorithm(name, **settings)
