"""Group-relative advantages against numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from forge.algorithms import load_algorithm
from forge.algorithms.advantages import group_relative
from forge.algorithms.gae import whiten_values

REWARDS = st.lists(st.floats(-100, 100), min_size=2, max_size=32)


@given(REWARDS)
def test_normalised_group_advantages_match_numpy(rewards: list[float]):
    exact = np.array(rewards)
    expected = (exact - exact.mean()) / (exact.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(group_relative(rewards), expected, rtol=1e-9, atol=1e-9)


@given(REWARDS)
def test_centred_group_advantages_match_numpy(rewards: list[float]):
    exact = np.array(rewards)
    np.testing.assert_allclose(group_relative(rewards, normalize=False), exact - exact.mean(), atol=1e-9)


@given(st.floats(-1e6, 1e6), st.integers(2, 16), st.booleans())
def test_equal_rewards_give_zero_advantages(reward: float, samples: int, normalize: bool):
    assert group_relative([reward] * samples, normalize=normalize) == pytest.approx([0.0] * samples, abs=1e-5)


def test_one_right_answer_among_four_has_normalised_advantage_1_5():
    assert group_relative([1.0, 0.0, 0.0, 0.0], epsilon=0.0) == pytest.approx([1.5, -0.5, -0.5, -0.5])


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_advantages_of_groups_below_two_samples_raise(rewards: list[float]):
    with pytest.raises(ValueError, match=f"at least 2 samples of a prompt, got {len(rewards)}"):
        group_relative(rewards)


@pytest.mark.parametrize("value", [0.1, 1000.1, -1 / 3, 1e6 + 0.1, 0.0])
@pytest.mark.parametrize("count", [1, 2, 3, 1001])
def test_whitened_equal_advantages_are_zero(value: float, count: int):
    assert whiten_values(torch.full((count,), value)).tolist() == [0.0] * count
    jittered = torch.full((count,), value) * (1 + torch.linspace(-1, 1, count) * 6e-8)
    assert whiten_values(jittered).abs().max() == 0.0


def test_whitened_advantages_match_float64():
    values = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 3 + 1000
    exact = values.double().numpy()
    expected = (exact - exact.mean()) / np.sqrt(exact.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(whiten_values(values).numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_rewards_raise_in_advantages(bad: float):
    for algorithm in ("grpo", "dr_grpo", "rloo", "reinforce"):
        with pytest.raises(ValueError, match="rewards must be finite"):
            load_algorithm(algorithm).advantages([[1.0, 0.0], [bad, 0.0]])
