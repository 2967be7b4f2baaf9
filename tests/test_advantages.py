"""Group-relative advantages against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.algorithms.advantages import group_relative

REWARDS = st.lists(st.floats(-100, 100), min_size=2, max_size=32)


@given(REWARDS)
def test_normalised_advantages(rewards: list[float]):
    exact = np.array(rewards)
    expected = (exact - exact.mean()) / (exact.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(group_relative(rewards), expected, rtol=1e-9, atol=1e-9)


@given(REWARDS)
def test_centred_advantages(rewards: list[float]):
    exact = np.array(rewards)
    np.testing.assert_allclose(group_relative(rewards, normalize=False), exact - exact.mean(), atol=1e-9)


@given(st.floats(-1e6, 1e6), st.integers(2, 16), st.booleans())
def test_equal_rewards_teach_nothing(reward: float, samples: int, normalize: bool):
    assert group_relative([reward] * samples, normalize=normalize) == pytest.approx([0.0] * samples, abs=1e-5)


def test_one_right_answer_among_four():
    assert group_relative([1.0, 0.0, 0.0, 0.0], epsilon=0.0) == pytest.approx([1.5, -0.5, -0.5, -0.5])


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_a_group_of_one_has_no_baseline(rewards: list[float]):
    with pytest.raises(ValueError, match=f"at least 2 samples of a prompt, got {len(rewards)}"):
        group_relative(rewards)
