"""Functions as verifiers: what they give, what they fail by, and how long they may take."""

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given, strategies as st

from forge.rewards import Scores, Unscored
from forge.rewards.rules import CharacterMatch, ThinkingReward
from forge_verifiers import AnswerFrequency, MathVerifier, Rule


def score(verifier, responses, target=None):
    return asyncio.run(verifier.score("prompt", responses, target))


def by_text(prompt, response, target):
    if response == "raise":
        raise KeyError("lost")
    if response == "reason":
        raise Unscored("not today")
    if response == "exit":
        raise SystemExit(3)
    return {"none": None, "nan": float("nan"), "inf": float("inf"), "text": "0.7", "true": True}.get(response, 0.5)


async def by_text_later(prompt, response, target):
    await asyncio.sleep(0)
    return by_text(prompt, response, target)


@pytest.mark.parametrize("function", [by_text, by_text_later])
def test_rule_verifier_returning_non_number_is_unscored_with_reason(function):
    found = score(Rule(function), ["a", "raise", "reason", "none", "nan", "inf", "text", "true"])
    assert isinstance(found, Scores)
    assert (found.values.dtype, found.values[[0, 7], 0].tolist()) == (np.float64, [0.5, 1.0])
    assert np.isnan(found.values[1:7]).all()
    assert found.reasons == {
        (1, 0): "KeyError: 'lost'",
        (2, 0): "not today",
        (3, 0): "the verifier returned no score (None)",
        (4, 0): "it gave nan",
        (5, 0): "it gave inf",
        (6, 0): "the verifier returned '0.7', which is not a number",
    }


@pytest.mark.parametrize("function", [by_text, by_text_later])
def test_rule_verifier_calling_exit_leaves_one_response_unscored(function):
    assert score(Rule(function), ["exit", "a"]).reasons == {(0, 0): "RuntimeError: SystemExit(3)"}


def test_hanging_rule_verifier_is_unscored_without_blocking():
    release = threading.Event()

    def stuck(prompt, response, target):
        if response == "hang":
            release.wait(30)
        return 1.0

    async def stuck_later(prompt, response, target):
        if response == "hang":
            await asyncio.sleep(30)
        return 1.0

    for function in (stuck, stuck_later):
        found = score(Rule(function, "rule", time_limit=0.1), ["a", "hang", "b"])
        assert found.values[[0, 2], 0].tolist() == [1.0, 1.0]
        assert found.reasons == {(1, 0): "rule took more than 0.1 s"}
    release.set()


def test_rule_verifier_passes_names_and_targets_to_function():
    assert Rule(by_text).names == ("by_text",)
    assert Rule(CharacterMatch()).names == ("CharacterMatch",)
    assert Rule(by_text, "mine").names == ("mine",)
    assert score(Rule(ThinkingReward()), ["<think>a</think>b"]).values.item() == 1.0
    assert "NoneType" in score(Rule(CharacterMatch()), ["a"]).reasons[0, 0]
    assert score(Rule(CharacterMatch()), ["a"], "a").values.item() == 1.0


def test_math_verifier_scores_equal_answers():
    found = score(MathVerifier(), ["it is \\boxed{1/2}", "0.5", "3", ""], "\\frac{1}{2}")
    assert found.values[:, 0].tolist() == [1, 1, 0, 0]
    for target in (None, "", " "):
        assert score(MathVerifier(), ["3"], target).reasons == {(0, 0): "there is no target to compare with"}


@pytest.mark.processes
def test_slow_math_answer_scores_0_and_slow_target_is_unscored():
    found = score(MathVerifier(), [r"\boxed{(x+y+z)^{400}}", r"\boxed{2x}"], "x + x")
    assert found.values[:, 0].tolist() == [0, 1]
    slow = r"\int_0^{1} e^{\sin(x^{x^x})} \cos(x)^{17} dx"
    assert score(MathVerifier(), ["2x"], slow).reasons == {(0, 0): "the target takes too long to compare"}


@given(st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=2, max_size=8), st.data())
def test_answer_frequency_equals_share_of_agreeing_responses(answers, data):
    """By brute force over pairs; equal answers are written in different ways."""
    written = [
        "none here" if a is None else data.draw(st.sampled_from([f"#### {a}", f"\\boxed{{{a}.0}}"])) for a in answers
    ]
    found = score(AnswerFrequency(), written).values[:, 0]
    n = len(answers)
    expected = [
        sum(answers[i] is not None and answers[i] == answers[j] for j in range(n) if j != i) / (n - 1) for i in range(n)
    ]
    np.testing.assert_allclose(found, expected)
