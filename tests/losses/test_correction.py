"""Truncated and masked importance weights: values, gradients, and what they report."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.losses import GRPOLoss
from forge.losses.correction import correction_weights, masked, truncated

RATIOS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20).map(lambda r: torch.tensor(r, dtype=torch.float64))


@given(ratio=RATIOS, high=st.floats(1, 10))
def test_truncation(ratio, high):
    assert truncated(ratio, high).tolist() == [min(r, high) for r in ratio.tolist()]


@given(ratio=RATIOS, low=st.floats(0, 0.9), high=st.floats(1, 10))
def test_masking(ratio, low, high):
    assert masked(ratio, low, high).tolist() == [r if low <= r <= high else 0.0 for r in ratio.tolist()]


def batch() -> dict[str, torch.Tensor]:
    """Log ratios of 0, 0.5, 2 (beyond the upper bound), -2 (below the lower one), and a token that does not train."""
    behaviour = torch.tensor([-1.0, -2.0, -3.0, -1.0, math.nan], dtype=torch.float64)
    moved = torch.tensor([0.0, 0.5, 2.0, -2.0, 0.0], dtype=torch.float64)
    return {
        "logprobs": torch.nan_to_num(behaviour + moved, nan=-1.0).requires_grad_(),
        "behaviour_logprobs": behaviour,
        "advantages": torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0], dtype=torch.float64),
        "weights": torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0], dtype=torch.float64),
    }


@pytest.mark.parametrize(
    ("correction", "expected"),
    [("truncate", [1.0, math.exp(0.5), 2.0, math.exp(-2)]), ("mask", [1.0, math.exp(0.5), 0.0, 0.0])],
)
def test_corrected_grpo_is_a_weighted_policy_gradient(correction, expected):
    x, loss = batch(), GRPOLoss(correction=correction)
    value = loss(**x)
    share = [w * a * c for w, a, c in zip(x["weights"].tolist(), x["advantages"].tolist(), expected, strict=False)]
    assert value.item() == pytest.approx(-sum(share))
    (gradient,) = torch.autograd.grad(value, x["logprobs"])
    assert gradient.tolist() == pytest.approx([-s for s in share] + [0.0])
    changed = loss.metrics(*(x[name][:4] for name in ("logprobs", "behaviour_logprobs", "advantages")))
    exact = [1.0, math.exp(0.5), math.exp(2), math.exp(-2)]
    assert changed["correction_fraction"].tolist() == [c != e for c, e in zip(expected, exact, strict=True)]


def test_on_policy_a_correction_changes_nothing():
    x = batch()
    x["behaviour_logprobs"] = x["logprobs"].detach()
    losses = [GRPOLoss(correction=correction)(**x) for correction in ("none", "truncate", "mask")]
    gradients = [torch.autograd.grad(loss, x["logprobs"])[0] for loss in losses]
    assert losses[0] == losses[1] == losses[2]
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="correction must be none, truncate or mask, got 'clip'"):
        GRPOLoss(correction="clip")
    with pytest.raises(ValueError, match="correction_low must be in"):
        GRPOLoss(correction="mask", correction_low=1.5)
    with pytest.raises(ValueError, match="correction must be"):
        correction_weights(torch.zeros(1), torch.zeros(1), "clip", 0.5, 2.0)
