"""Group-relative advantages against numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.algorithms import ALGORITHMS, BradleyTerryLoss, Correction, DPOLoss, ValueLoss, load_algorithm
from forge.algorithms.advantages import against_batch, group_relative, leave_one_out
from forge.algorithms.gae import whiten
from forge.types import Sampling

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


EQUAL = [
    [1.0, 1.0],
    [0.0, 0.0, 0.0],
    [0.1] * 3,
    [0.1 + 0.2, 0.3, 0.3],
    [1 / 3] * 7,
    [sum([0.1] * 10), 1.0, 1.0, 1.0],
    [-1e-12] * 5,
    [1e9 + 0.1] * 6,
    [float(np.float32(0.7)), 0.7, 0.7],
]


@pytest.mark.parametrize("rewards", EQUAL, ids=str)
@pytest.mark.parametrize("epsilon", [0.0, 1e-8, 1e-4])
@pytest.mark.parametrize("std", ["sample", "population"])
def test_rewards_that_differ_by_rounding_have_no_deviation(rewards: list[float], epsilon: float, std: Any):
    assert group_relative(rewards, epsilon=epsilon, std=std) == [0.0] * len(rewards)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -2.7, 1e9 + 0.1, 5e-324])
def test_equal_rewards_have_no_advantage_without_a_deviation_either(reward: float):
    for samples in range(2, 12):
        rewards = [reward] * samples
        assert group_relative(rewards, normalize=False) == leave_one_out(rewards) == [0.0] * samples
        assert against_batch([rewards, rewards]) == [[0.0] * samples] * 2


@pytest.mark.parametrize("rewards", [[1e-9, 2e-9], [1e6, 1e6 + 1], [0.5, 0.5001, 0.5002], [-3.0, -3.00001]])
def test_small_differences_are_no_rounding(rewards: list[float]):
    exact = np.array(rewards)
    expected = (exact - exact.mean()) / exact.std(ddof=1)
    assert group_relative(rewards, epsilon=0.0) == pytest.approx(expected.tolist(), rel=1e-4)


@pytest.mark.parametrize("value", [0.1, 1000.1, -1 / 3, 1e6 + 0.1, 0.0])
@pytest.mark.parametrize("count", [1, 2, 3, 1001])
def test_equal_advantages_are_whitened_to_nothing(value: float, count: int):
    assert whiten(torch.full((count,), value)).tolist() == [0.0] * count
    jittered = torch.full((count,), value) * (1 + torch.linspace(-1, 1, count) * 6e-8)
    assert whiten(jittered).abs().max() == 0.0


def test_whitening_of_others_is_exact():
    values = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 3 + 1000
    exact = values.double().numpy()
    expected = (exact - exact.mean()) / np.sqrt(exact.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(whiten(values).numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_no_numbers_have_no_advantage(bad: float):
    for algorithm in ("grpo", "dr_grpo", "rloo", "reinforce"):
        with pytest.raises(ValueError, match="rewards must be finite"):
            load_algorithm(algorithm).advantages([[1.0, 0.0], [bad, 0.0]])


NUMBERS = [
    (name, field)
    for name, algorithm in ALGORITHMS.items()
    for field, default in vars(load_algorithm(name)).items()
    if field in algorithm.__dataclass_fields__
    and (field in ("dual_clip", "clip_ratio") or type(default) is float)
    and not (name == "distill" and field == "beta")
]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("name", "field"), NUMBERS)
def test_settings_that_are_no_numbers_are_rejected(name: str, field: str, bad: float):
    with pytest.raises(ValueError, match=field):
        load_algorithm(name, **{field: bad})


@pytest.mark.parametrize(
    "make",
    [
        lambda bad: DPOLoss(beta=bad),
        lambda bad: DPOLoss(label_smoothing=bad),
        lambda bad: BradleyTerryLoss(center=bad),
        lambda bad: ValueLoss(clip=bad),
        lambda bad: Correction(low=bad),
        lambda bad: Sampling(temperature=bad),
        lambda bad: Sampling(top_p=bad),
    ],
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_other_settings_that_are_no_numbers_are_rejected(make: Callable[[float], Any], bad: float):
    with pytest.raises(ValueError, match="must be"):
        make(bad)
    with pytest.raises(ValueError, match="must be"):
        Correction(high=math.nan)
    assert Correction(high=math.inf).high == math.inf  # no bound, as in the paper
