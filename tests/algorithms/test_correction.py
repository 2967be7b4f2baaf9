"""Importance weights for what another policy sampled: bounds, levels, what they report, what they refuse."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from forge.losses import Correction, GRPOLoss

RATIOS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20).map(lambda r: torch.tensor(r, dtype=torch.float64))


@given(ratio=RATIOS, low=st.floats(0, 0.9), high=st.floats(1, 10))
def test_importance_correction_truncates_or_masks_ratios_at_bounds(ratio, low, high):
    assert Correction("truncate", high=high).bounded(ratio).tolist() == [min(r, high) for r in ratio.tolist()]
    kept = [r if low <= r <= high else 0.0 for r in ratio.tolist()]
    assert Correction("mask", low=low, high=high).bounded(ratio).tolist() == kept


def batch() -> dict[str, torch.Tensor]:
    """Log ratios of 0, 0.5, 2 (beyond the upper bound), -2 (below the lower one), and a token that does not train."""
    behaviour = torch.tensor([-1.0, -2.0, -3.0, -1.0, math.nan], dtype=torch.float64)
    moved = torch.tensor([0.0, 0.5, 2.0, -2.0, 0.0], dtype=torch.float64)
    return {
        "logprobs": torch.nan_to_num(behaviour + moved, nan=-1.0).requires_grad_(),
        "behaviour_logprobs": behaviour,
        "advantages": torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0], dtype=torch.float64),
        "weights": torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0], dtype=torch.float64),
        "sequences": torch.tensor([0, 0, 0, 1, 1]),
    }


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Correction("truncate"), [1.0, math.exp(0.5), 2.0, math.exp(-2)]),
        (Correction("mask"), [1.0, math.exp(0.5), 0.0, 0.0]),
        (Correction("truncate", "sequence", high=5.0), [5.0, 5.0, 5.0, math.exp(-2)]),
        (Correction("mask", "geometric", high=3.0), [math.exp(2.5 / 3)] * 3 + [0.0]),
    ],
)
def test_importance_corrected_grpo_equals_weighted_policy_gradient(correction, expected):
    x, loss = batch(), GRPOLoss(correction=correction)
    value = loss(**x)
    share = [w * a * c for w, a, c in zip(x["weights"].tolist(), x["advantages"].tolist(), expected, strict=False)]
    assert value.item() == pytest.approx(-sum(share))
    (gradient,) = torch.autograd.grad(value, x["logprobs"])
    assert gradient.tolist() == pytest.approx([-s for s in share] + [0.0])


def test_importance_correction_fraction_counts_bounded_weights():
    x = {name: values[:4] for name, values in batch().items()}
    for kind, changed in (("truncate", [0.0, 0.0, 1.0, 0.0]), ("mask", [0.0, 0.0, 1.0, 1.0])):
        assert GRPOLoss(correction=Correction(kind)).metrics(**x)["correction_fraction"].tolist() == changed


def test_importance_correction_has_no_effect_on_policy_samples():
    x = batch()
    x["behaviour_logprobs"] = x["logprobs"].detach()
    losses = [GRPOLoss(correction=c)(**x) for c in (None, Correction("truncate"), Correction("mask", "sequence"))]
    gradients = [torch.autograd.grad(loss, x["logprobs"])[0] for loss in losses]
    assert losses[0] == losses[1] == losses[2]
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_decoupled_ppo_clips_to_proximal_policy_and_weights_by_sampler():
    """Two updates after the step began (ratio 1.5), with samples of an older policy (weight 2)."""
    logprobs = torch.tensor([math.log(0.3)], requires_grad=True)
    proximal, behaviour = torch.tensor([math.log(0.2)]), torch.tensor([math.log(0.1)])
    for advantage, expected in ((1.0, -2.0 * 1.2), (-1.0, 2.0 * 1.5)):
        loss = GRPOLoss(correction=Correction("truncate", high=9.0))(
            logprobs, behaviour, torch.tensor([advantage]), torch.ones(1), proximal_logprobs=proximal
        )
        assert loss.item() == pytest.approx(expected)
        clipped = torch.autograd.grad(loss, logprobs)[0].item() == 0.0
        assert clipped == (advantage > 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "clip"}, "correction must be truncate or mask, got 'clip'"),
        ({"level": "word"}, "correction_level must be token, sequence or geometric, got 'word'"),
        ({"low": 1.5}, "correction_low must be in"),
        ({"high": 0.5}, "correction_high at least 1"),
    ],
)
def test_invalid_importance_correction_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        Correction(**settings)
