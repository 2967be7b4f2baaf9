"""Losses over pairs: closed forms, finite differences, padding, empty micro-batches."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from forge.losses import BradleyTerryLoss, DPOLoss
from tests.algorithms import oracle

LENGTHS = [3, 1, 2, 4]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def dpo(sequences: list[list[oracle.Token]], beta: float, smooth: float) -> float:
    total = 0.0
    for chosen, rejected in zip(sequences[0::2], sequences[1::2], strict=True):
        margin = beta * (sum(t.logp - t.ref for t in chosen) - sum(t.logp - t.ref for t in rejected))
        weight = sum(t.weight for t in chosen) + sum(t.weight for t in rejected)
        total -= weight * ((1 - smooth) * log_sigmoid(margin) + smooth * log_sigmoid(-margin))
    return total


@pytest.mark.parametrize(("beta", "smooth"), [(0.1, 0.0), (0.7, 0.2)])
def test_dpo_loss_matches_oracle(beta: float, smooth: float):
    sequences, x = oracle.batch(LENGTHS)
    loss = DPOLoss(beta, smooth)
    args = (x["logprobs"], x["ref_logprobs"], x["weights"], x["sequences"])
    assert loss(*args).item() == pytest.approx(dpo(sequences, beta, smooth), rel=1e-9)
    assert gradcheck(loss, args)


def test_preference_loss_gradient_widens_the_reward_margin():
    x = torch.zeros(2, requires_grad=True)
    for loss in (
        DPOLoss(0.5)(x, torch.zeros(2), torch.full((2,), 0.5), torch.tensor([0, 1])),
        BradleyTerryLoss()(x, torch.full((2,), 0.5), torch.tensor([0, 1])),
    ):
        chosen, rejected = torch.autograd.grad(loss, x)[0].tolist()
        assert chosen < 0 < rejected


@pytest.mark.parametrize("center", [0.0, 0.3])
def test_bradley_terry_loss_and_metrics_match_formula(center: float):
    scores = torch.tensor([1.5, -0.5, 0.2, 0.9], dtype=torch.float64, requires_grad=True)
    weights = torch.full((4,), 0.25, dtype=torch.float64)
    order = torch.arange(4)
    expected = 0.0
    for chosen, rejected in ((1.5, -0.5), (0.2, 0.9)):
        expected += 0.5 * (-log_sigmoid(chosen - rejected) + center * (chosen + rejected) ** 2)
    loss = BradleyTerryLoss(center)
    assert loss(scores, weights, order).item() == pytest.approx(expected)
    assert gradcheck(loss, (scores, weights, order))
    reported = loss.metrics(scores, weights, order)
    assert reported["accuracy"].tolist() == [1.0, 0.0]
    assert reported["margin"].tolist() == pytest.approx([2.0, -0.7])


def pairs_of(loss_fn: torch.nn.Module, x: dict[str, Tensor]) -> Tensor:
    if isinstance(loss_fn, DPOLoss):
        return loss_fn(x["logprobs"], x["ref_logprobs"], x["weights"], x.get("sequences"))
    return loss_fn(x["logprobs"], x["weights"], x.get("sequences"))


@pytest.mark.parametrize("loss_fn", [DPOLoss(0.3), BradleyTerryLoss(0.1)])
@given(pairs=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4), cut=st.integers(0, 4))
def test_packed_preference_loss_is_independent_of_micro_batch_split(loss_fn, pairs: list[tuple[int, int]], cut: int):
    # A score is read at one token of a sequence.
    lengths = [n if isinstance(loss_fn, DPOLoss) else 1 for pair in pairs for n in pair]
    _, x = oracle.batch(lengths)
    rows = oracle.padded(x, lengths)
    whole, wide = pairs_of(loss_fn, x), pairs_of(loss_fn, rows)
    assert whole.item() == pytest.approx(wide.item(), rel=1e-12)
    (flat,), (padded,) = torch.autograd.grad(whole, x["logprobs"]), torch.autograd.grad(wide, rows["logprobs"])
    torch.testing.assert_close(padded[rows["weights"] != 0], flat, rtol=1e-10, atol=1e-14)
    assert not padded[rows["weights"] == 0].any()
    parts = [{k: v[part] for k, v in x.items()} for part in (x["sequences"] < 2 * cut, x["sequences"] >= 2 * cut)]
    parts[1]["sequences"] = parts[1]["sequences"] - 2 * cut
    assert sum(pairs_of(loss_fn, part).item() for part in parts) == pytest.approx(whole.item(), rel=1e-12)


@pytest.mark.parametrize("loss_fn", [DPOLoss(), BradleyTerryLoss()])
def test_empty_micro_batch_has_zero_preference_loss_with_gradient(loss_fn):
    _, x = oracle.batch([0, 0])
    value = pairs_of(loss_fn, x)
    assert value.item() == 0.0
    assert torch.autograd.grad(value, x["logprobs"])[0].shape == (0,)
    _, x = oracle.batch([1, 1])
    names = ("logprobs", "ref_logprobs", "weights", "sequences")
    assert loss_fn.metrics(*(x[n] for n in names if isinstance(loss_fn, DPOLoss) or n != "ref_logprobs")).keys()


@pytest.mark.parametrize("settings", [{"beta": 0.0}, {"label_smoothing": 0.5}, {"label_smoothing": -0.1}])
def test_invalid_preference_settings_raise(settings: dict[str, float]):
    with pytest.raises(ValueError, match="beta must be above 0 and label_smoothing"):
        DPOLoss(**settings)
    with pytest.raises(ValueError, match="center must be at least 0"):
        BradleyTerryLoss(-1.0)
