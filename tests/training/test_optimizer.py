"""Schedules in closed form, clipping, weight decay."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from forge.losses import SFTLoss
from forge.training.settings import OptimizerSettings
from forge.training.trainer import build_optimizer
from tests.training.cases import example, largest_difference, make_trainer, weights_of


def test_constant_learning_rate_follows_linear_warmup():
    settings = OptimizerSettings(warmup_steps=4)
    assert [settings.scale(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert OptimizerSettings().scale(0) == 1.0


def test_cosine_learning_rate_schedule_matches_formula():
    settings = OptimizerSettings(schedule="cosine", steps=8, min_lr_ratio=0.0)
    for step in range(9):
        assert settings.scale(step) == pytest.approx(math.cos(math.pi * step / 16) ** 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "step"}, "must be one of constant, linear, cosine"),
        ({"schedule": "cosine"}, "needs steps > warmup_steps"),
        ({"schedule": "linear", "warmup_steps": 5, "steps": 5}, "needs steps > warmup_steps"),
        ({"learning_rate": -1.0}, "must be at least 0"),
        ({"max_grad_norm": -1.0}, "must be at least 0"),
        ({"optimizer": "adam"}, "unknown training.optimizer 'adam': write it as package.module:Name"),
        ({"optimizer_dtype": "float16"}, "must be one of float32, bfloat16"),
        ({"optimizer_dtype": "bfloat16", "beta2": 0.999}, "set it below 0.996, or optimizer_dtype to float32"),
    ],
)
def test_invalid_optimizer_settings_raise(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        OptimizerSettings(**settings)


def test_weight_decay_applies_to_matrices_only():
    layer = nn.Linear(3, 2)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    optimizer = build_optimizer(layer, OptimizerSettings(learning_rate=0.1, weight_decay=0.5))
    layer.weight.grad, layer.bias.grad = torch.zeros(2, 3), torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before["weight"] * (1 - 0.1 * 0.5))
    assert torch.equal(layer.bias.detach(), before["bias"])


def test_trainer_learning_rate_follows_schedule(model: Path):
    trainer = make_trainer(model, schedule="linear", warmup_steps=1, steps=3, min_lr_ratio=0.0)
    rates = [trainer.train_step(example(), SFTLoss())["learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([1e-3, 1e-3, 5e-4, 0.0])


def test_gradient_clipping_bounds_gradient_and_reports_norm(model: Path):
    """With a first moment of no memory and a large epsilon, AdamW's first step is the gradient times lr / epsilon."""
    moved = {}
    for bound in (0.0, 1e6, 0.01):
        trainer = make_trainer(model, learning_rate=1.0, epsilon=1e3, beta1=0.0, max_grad_norm=bound)
        before = weights_of(trainer)
        norm = trainer.train_step(example(), SFTLoss())["grad_norm"]
        after = weights_of(trainer)
        assert norm > 1.0
        moved[bound] = {name: (before[name] - after[name]).double() * 1e3 for name in before}
    total = {bound: float(sum(m.square().sum() for m in moves.values())) ** 0.5 for bound, moves in moved.items()}
    assert total[0.0] == pytest.approx(norm, rel=1e-2)
    assert total[0.01] == pytest.approx(0.01, rel=0.2)  # float32 weights resolve so small a step no better
    assert largest_difference(moved[0.0], moved[1e6]) == 0.0
