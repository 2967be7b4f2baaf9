"""What answers to held-out problems say: pass@k, the majority, and how certain it is."""

import asyncio
import itertools

import pytest

from forge.envs.group import NothingScored, SingleTurnEnv, pass_at, summarise_answers
from forge.types import Completion, Episode


def answer(text, correct, finish="stop"):
    completion = Completion(prompt_ids=[1], token_ids=[2], logprobs=[0.0], versions=[0], text=text, finish=finish)
    return Episode(completion, None if correct is None else float(correct), info={"correct": correct})


@pytest.mark.parametrize("total", range(1, 8))
def test_pass_at_k_equals_brute_force_computation(total):
    for right, k in itertools.product(range(total + 1), range(1, total + 1)):
        draws = list(itertools.combinations([True] * right + [False] * (total - right), k))
        assert pass_at(k, total, right) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_evaluation_metrics_match_hand_computation():
    groups = [
        [answer("so 4", True), answer("it is 4", True), answer("5", False), answer("5!", False)],  # a tie
        [answer("1", False), answer("1", False), answer("2", True), answer("3", False)],
        [answer("7", True, "length")] * 4,
    ]
    metrics = summarise_answers(groups, 4)
    assert metrics["accuracy"] == pytest.approx((0.5 + 0.25 + 1) / 3)
    assert metrics["pass@2"] == pytest.approx((1 - 1 / 6 + 0.5 + 1) / 3)
    assert (metrics["pass@4"], metrics["maj@4"]) == (1.0, pytest.approx((0.5 + 0 + 1) / 3))
    assert (metrics["unscored"], metrics["truncated"]) == (0.0, pytest.approx(1 / 3))
    assert metrics["turns"] == 1.0


def test_unscored_answers_are_excluded_from_accuracy():
    groups = [[answer("1", True), answer("2", None)], [answer("3", None), answer("4", None)]]
    metrics = summarise_answers(groups, 2)
    assert metrics["accuracy"] == 1.0
    assert not {"pass@2", "maj@2"} & metrics.keys()  # no problem has two that are known
    assert metrics["unscored"] == 0.75
    with pytest.raises(NothingScored, match="no episode of the evaluation could be scored"):
        summarise_answers(groups[1:], 2)


@pytest.mark.parametrize(
    ("right", "wrong", "share"),
    [
        (["1/2", r"\frac{1}{2}", "0.5"], ["3", "3"], 1.0),
        (["1/2", "0.5"], ["3", "3.0", r"\frac{6}{2}"], 0.0),
        (["a ball", "the other ball"], ["a cube", "a cube"], 0.5),  # right in two forms, and a tie
        ([], ["3", "3"], 0.0),
    ],
)
def test_majority_vote_counts_equivalent_answers_together(right, wrong, share):
    group = [answer(rf"\boxed{{{text}}}", text in right) for text in right + wrong]
    assert summarise_answers([group], len(group))[f"maj@{len(group)}"] == share


def test_evaluation_problem_seeds_count_up_from_given_seed():
    seeds = []

    class Env(SingleTurnEnv):
        async def play(self, policy, sample, n, seed, **settings):
            seeds.append(seed)
            return [answer("1", True)]

    for seed in (None, 0, 5):
        asyncio.run(Env(None).evaluate(None, ["a", "b"], seed=seed))
    assert seeds == [0, 1, 0, 1, 5, 6]
