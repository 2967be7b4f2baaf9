"""What an answer's length costs."""

import pytest

from forge.rewards.rules import overlong_penalty
from forge.types import Episode, Group


def scored(length: int, reward: float | None) -> Episode:
    return Episode(prompt_ids=[1] * 5, response_ids=[2] * length, reward=reward)


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (80, 0.0), (81, 0.05), (90, 0.5), (99, 0.95), (100, 1.0), (120, 1.0)]
)
def test_overlong_length_penalty_grows_from_buffer_start_to_limit(length: int, penalty: float):
    episodes = [scored(length, 1.0), scored(length, -0.5), scored(length, None)]
    overlong_penalty([Group(episodes)], limit=100, buffer=20)
    assert [e.reward for e in episodes] == [pytest.approx(1.0 - penalty), pytest.approx(-0.5 - penalty), None]
