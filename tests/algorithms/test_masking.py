"""Tokens that are not trained have no part in a loss, whatever stands there."""

import math

import pytest
import torch
from torch import Tensor

from forge.losses import GRPOLoss, ReinforceLoss, SFTLoss, SimpleGRPOLoss

MASK = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
WEIGHTS = MASK / 3
NAMES = ("logprobs", "behaviour_logprobs", "ref_logprobs", "advantages", "entropy")
LOSSES = {
    "simple_grpo": lambda x: SimpleGRPOLoss(0.1)(x["logprobs"], x["ref_logprobs"], x["advantages"], MASK),
    "simple_grpo weighted": lambda x: SimpleGRPOLoss(0.1)(
        x["logprobs"], x["ref_logprobs"], x["advantages"], MASK, WEIGHTS
    ),
    "grpo": lambda x: GRPOLoss(0.2, 0.2, beta=0.1, entropy_coef=0.01)(
        x["logprobs"], x["behaviour_logprobs"], x["advantages"], WEIGHTS, x["ref_logprobs"], x["entropy"]
    ),
    "reinforce": lambda x: ReinforceLoss(0.2)(x["logprobs"], x["ref_logprobs"], x["advantages"], MASK),
    "reinforce on policy": lambda x: ReinforceLoss()(x["logprobs"], x["ref_logprobs"], x["advantages"], MASK),
    "sft": lambda x: SFTLoss()(x["logprobs"], WEIGHTS),
}


def inputs(fill: float, where: str = "all") -> dict[str, Tensor]:
    """The same trained tokens each time, with `fill` everywhere else in one tensor or in all."""
    random = torch.Generator().manual_seed(0)
    known = {name: torch.randn(2, 4, generator=random) for name in NAMES}
    filled = {
        name: torch.where(MASK > 0, values, fill if where in ("all", name) else 0.0) for name, values in known.items()
    }
    filled["logprobs"].requires_grad_()
    filled["entropy"].requires_grad_()
    return filled


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("where", ["all", *NAMES])
@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf, 1e30])
def test_values_at_padding_do_not_change_loss(name: str, where: str, fill: float):
    plain, poisoned = inputs(0.0), inputs(fill, where)
    expected, got = LOSSES[name](plain), LOSSES[name](poisoned)
    assert got.item() == expected.item()
    expected.backward()
    got.backward()
    for which in ("logprobs", "entropy"):
        wanted, gradient = plain[which].grad, poisoned[which].grad
        if wanted is None:
            assert gradient is None
            continue
        assert gradient is not None
        assert torch.equal(gradient, wanted)
        assert not gradient[MASK == 0].any()


@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradients_of_trained_tokens_are_finite_and_nonzero(name: str):
    x = inputs(0.0)
    LOSSES[name](x).backward()
    assert x["logprobs"].grad is not None
    gradient = x["logprobs"].grad[MASK > 0]
    assert gradient.isfinite().all()
    # The clip may rightly silence a token of GRPO.
    assert (gradient != 0).sum() >= (1 if name == "grpo" else 3)


def test_batch_without_trained_tokens_has_zero_loss():
    nothing = torch.zeros(2, 3)
    logprobs = torch.randn(2, 3, requires_grad=True)
    for loss_fn in (SimpleGRPOLoss(), ReinforceLoss(), ReinforceLoss(0.1)):
        loss = loss_fn(logprobs=logprobs, ref_logprobs=nothing, advantages=torch.ones(2, 3), padding_mask=nothing)
        assert loss.item() == 0.0
        assert torch.equal(torch.autograd.grad(loss, logprobs)[0], nothing)
