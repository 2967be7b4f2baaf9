"""Generalised advantage estimation against its definition as a sum, and the critic's loss."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch.autograd import gradcheck

from forge.algorithms.gae import pack_sequences, pad_sequences, whiten_values
from forge.losses import ValueLoss, gae

MASKS = st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4)


def by_definition(rewards: list[float], values: list[float], discount: float, trace: float) -> list[float]:
    """A_t = sum over l of (discount * trace)^l * delta_{t+l}, over the tokens of one sequence that the policy wrote."""
    following = [*values, 0.0][1:]
    deltas = [r + discount * n - v for r, v, n in zip(rewards, values, following, strict=True)]
    return [sum((discount * trace) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


@given(MASKS, st.floats(0, 1), st.floats(0, 1), st.integers(0, 100))
def test_gae_skips_masked_tokens(masks, discount, trace, seed):
    torch.manual_seed(seed)
    mask = torch.tensor(masks)
    rewards, values = torch.randn(2, *mask.shape, dtype=torch.float64)
    poison = torch.full_like(values, torch.nan)
    advantages, returns = gae(
        torch.where(mask, rewards, poison), torch.where(mask, values, poison), mask, discount=discount, trace=trace
    )
    for row, own in enumerate(mask):
        wanted = by_definition(rewards[row][own].tolist(), values[row][own].tolist(), discount, trace)
        assert advantages[row][own].tolist() == pytest.approx(wanted, abs=1e-12)
        assert returns[row][own].tolist() == pytest.approx((torch.tensor(wanted) + values[row][own]).tolist(), abs=1e-6)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def test_gae_lambda_1_gives_returns_and_lambda_0_one_step_errors():
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.2, 0.5, 0.9]])
    mask = torch.ones(1, 3)
    full, returns = gae(rewards, values, mask)
    torch.testing.assert_close(returns, torch.ones(1, 3))
    torch.testing.assert_close(full, 1 - values)
    one_step, _ = gae(rewards, values, mask, trace=0.0)
    torch.testing.assert_close(one_step, torch.tensor([[0.3, 0.4, 0.1]]))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_pad_then_pack_restores_sequences(counts):
    values = torch.arange(1.0, sum(counts) + 1)
    rows = pad_sequences(values, counts)
    assert rows.shape == (len(counts), max(counts))
    assert torch.equal(pack_sequences(rows, counts), values)


def test_whiten_values_returns_mean_0_and_std_1():
    values = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    white = whiten_values(values)
    assert white.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert white.std().item() == pytest.approx(1.0, rel=1e-6)
    assert whiten_values(torch.tensor([3.0])).tolist() == [0.0]
    assert whiten_values(torch.full((5,), 2.0)).tolist() == [0.0] * 5


def test_critic_value_loss_matches_clipped_squared_error():
    torch.manual_seed(0)
    values, old, returns = torch.randn(3, 2, 5, dtype=torch.float64)
    weights = torch.tensor([[0.1, 0.2, 0.0, 0.3, 0.0], [0.1, 0.1, 0.1, 0.1, 0.0]], dtype=torch.float64)
    expected = 0.0
    for v, o, r, w in zip(*(x.flatten().tolist() for x in (values, old, returns, weights)), strict=True):
        clipped = o + min(max(v - o, -0.2), 0.2)
        expected += w * max((v - r) ** 2, (clipped - r) ** 2) / 2
    poisoned = torch.where(weights == 0, torch.nan, values).requires_grad_()
    loss = ValueLoss(0.2)(poisoned, old, returns, weights)
    assert loss.item() == pytest.approx(expected)
    gradient = torch.autograd.grad(loss, poisoned)[0]
    assert not gradient[weights == 0].any()
    assert gradcheck(ValueLoss(0.2), (values.requires_grad_(), old, returns, weights))
    plain = ValueLoss(None)(values, old, returns, weights)
    assert plain.item() == pytest.approx(0.5 * (weights * (values - returns) ** 2).sum().item())


def test_clipped_critic_values_have_no_gradient():
    values = torch.tensor([1.0, 1.0], requires_grad=True)
    old, returns = torch.tensor([0.0, 0.95]), torch.tensor([5.0, 5.0])
    loss_fn = ValueLoss(0.2)
    loss_fn(values, old, returns, torch.ones(2)).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, -4.0]
    assert loss_fn.metrics(values, old, returns)["clip_fraction"].tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="clip must be None or above 0"):
        ValueLoss(0.0)
