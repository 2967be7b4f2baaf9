"""Values and gradients of the losses against closed forms in float64 and finite differences."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from forge.algorithms.terms import importance_ratio, kl_k3
from forge.losses import GRPOLoss, ReinforceLoss, SFTLoss, SimpleGRPOLoss

MASK = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0], [1, 1, 1, 1]])
TRAINED = [(b, t) for b in range(3) for t in range(4) if MASK[b, t]]


def tensors(*, scale: float = 0.3) -> dict[str, Tensor]:
    """Random float64 inputs of every kind, [3, 4]."""
    random = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(3, 4, generator=random, dtype=torch.float64)

    logprobs = -2 + draw()
    return {
        "logprobs": logprobs.requires_grad_(),
        "behaviour_logprobs": logprobs.detach() + scale * draw(),
        "ref_logprobs": logprobs.detach() + scale * draw(),
        "advantages": draw(),
        "entropy": draw().abs().requires_grad_(),
        "weights": draw().abs() * MASK,
    }


def at(x: dict[str, Tensor], place: tuple[int, int]) -> tuple[float, float, float, float]:
    """Log-probability, reference, advantage and log-ratio to the sampler at one token."""
    logp, ref, advantage = (x[name][place].item() for name in ("logprobs", "ref_logprobs", "advantages"))
    return logp, ref, advantage, logp - x["behaviour_logprobs"][place].item()


def gradient(loss: Tensor, x: dict[str, Tensor]) -> Tensor:
    return torch.autograd.grad(loss, x["logprobs"])[0]


def test_simple_grpo_loss_matches_plain_loop():
    x, beta = tensors(), 0.1
    loss = SimpleGRPOLoss(beta)(x["logprobs"], x["ref_logprobs"], x["advantages"], MASK)
    value, expected = 0.0, torch.zeros(3, 4, dtype=torch.float64)
    for b, t in TRAINED:
        logp, ref, advantage, _ = at(x, (b, t))
        share = 1 / (3 * MASK[b].sum().item())
        value += share * (-advantage + beta * (math.exp(ref - logp) - (ref - logp) - 1))
        expected[b, t] = share * (-advantage + beta * (1 - math.exp(ref - logp)))
    assert loss.item() == pytest.approx(value, rel=1e-7)
    torch.testing.assert_close(gradient(loss, x), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("beta", "entropy_coef"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
def test_grpo_loss_matches_plain_loop(beta: float, entropy_coef: float):
    x = tensors()
    loss_fn = GRPOLoss(0.1, 0.3, beta=beta, entropy_coef=entropy_coef)
    names = ("logprobs", "behaviour_logprobs", "advantages", "weights", "ref_logprobs", "entropy")
    value = 0.0
    for place in TRAINED:
        logp, ref, advantage, log_ratio = at(x, place)
        ratio = math.exp(log_ratio)
        clipped = min(max(ratio, 0.9), 1.3)
        kl = math.exp(ref - logp) - (ref - logp) - 1
        term = -min(ratio * advantage, clipped * advantage) + beta * kl - entropy_coef * x["entropy"][place].item()
        value += x["weights"][place].item() * term
    assert loss_fn(*(x[name] for name in names)).item() == pytest.approx(value, rel=1e-9)
    assert gradcheck(loss_fn, tuple(x[name] for name in names))


@pytest.mark.parametrize("clip_ratio", [None, 0.0, 0.2])
def test_reinforce_loss_matches_plain_loop(clip_ratio: float | None):
    x = tensors()
    loss = ReinforceLoss(clip_ratio)(
        logprobs=x["logprobs"],
        ref_logprobs=x["behaviour_logprobs"],
        advantages=x["advantages"],
        padding_mask=MASK,
    )
    value, expected = 0.0, torch.zeros(3, 4, dtype=torch.float64)
    for place in TRAINED:
        logp, _, advantage, log_ratio = at(x, place)
        weight = 1.0 if clip_ratio is None else min(math.exp(log_ratio), 1 + clip_ratio)
        value += -weight * advantage * logp / len(TRAINED)
        expected[place] = -weight * advantage / len(TRAINED)
    assert loss.item() == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(gradient(loss, x), expected, rtol=1e-6, atol=1e-9)


def test_sft_loss_is_weighted_negative_logprob():
    x = tensors()
    loss = SFTLoss()(x["logprobs"], x["weights"])
    assert loss.item() == pytest.approx(-sum(x["weights"][p].item() * x["logprobs"][p].item() for p in TRAINED))
    assert torch.equal(gradient(loss, x), -x["weights"])
    assert gradcheck(SFTLoss(), (x["logprobs"], x["weights"]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [(1.5, 1.0, True), (1.5, -1.0, False), (0.5, 1.0, False), (0.5, -1.0, True), (1.1, 1.0, False), (0.9, -1.0, False)],
)
def test_clipped_ratio_has_zero_gradient(ratio: float, advantage: float, clipped: bool):
    behaviour = torch.tensor([-2.0])
    logprobs = (behaviour + math.log(ratio)).requires_grad_()
    advantages = torch.tensor([advantage])
    loss_fn = GRPOLoss(0.2, 0.3)
    loss_fn(logprobs, behaviour, advantages, torch.ones(1)).backward()
    expected = 0.0 if clipped else -ratio * advantage
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(expected, rel=1e-5)
    assert loss_fn.metrics(logprobs, behaviour, advantages, torch.ones(1))["clip_fraction"].tolist() == [float(clipped)]


@given(st.floats(-15, 0), st.floats(-4, 4).map(lambda x: math.copysign(10 ** -abs(x), x)))
def test_k3_kl_estimate_is_accurate_for_tiny_logprob_differences(logp: float, difference: float):
    """In float32 `exp(d) - d - 1` loses all digits (and its sign) below d = 1e-4, where on-policy training lives."""
    logprobs = torch.tensor(logp)
    ref = logprobs + difference
    d = ref.double().item() - logprobs.double().item()
    got = kl_k3(logprobs, ref).item()
    assert got == pytest.approx(math.expm1(d) - d, rel=1e-2, abs=3e-13 + 2.5e-7 * abs(d))
    assert got >= -1e-7 * abs(d)


def test_importance_ratio_is_capped_at_exp_of_20():
    ratio = importance_ratio(torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0]))
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


def test_bfloat16_logprobs_give_float32_loss():
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    loss = GRPOLoss()(logprobs, torch.tensor([-1.001, -2.001]), torch.ones(2), torch.ones(2) / 2)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-math.exp(0.001), rel=1e-6)
