"""Rule rewards: the final answer of a response, the simple comparison, formats and exact text."""

import pytest
from hypothesis import given, strategies as st

from forge.rewards.rules import CharacterMatch, ExactMatch, MathReward, ThinkingReward, comparison, final_answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"first \boxed{1}, then \boxed{\frac{1}{2}} and 7", r"\frac{1}{2}"),
        (r"\boxed{3} but \boxed{4", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("#### 3 <answer>4</answer> #### 5", "4"),
        ("work 12\n#### 3\nmore 9", "3"),
        ("The answer is 42 since 6*7=42.", "42"),
        ("**Answer:** 42", "42"),
        ("Answer:\n\n42", "42"),
        ("Q: what?\nA: 18 eggs", "18 eggs"),
        ("I get 3 then 4/5", "4/5"),
        ("about 1,234.50.", "1,234.50"),
        ("5-3", "3"),
        ("-3", "-3"),
        ("no idea", None),
        ("<think>\\boxed{3}</think> The answer is 5", "5"),
    ],
)
def test_final_answer_extraction_prefers_the_most_explicit_form(response, answer):
    assert final_answer(response) == answer


@pytest.mark.processes
def test_math_reward_uses_math_verify_without_forge_math(monkeypatch):
    monkeypatch.setattr("forge.rewards.rules.math.load_comparison", lambda: comparison)
    reward = MathReward()
    right = [
        (r"\boxed{\dfrac{3}{4}}", "0.75"), ("#### $1,234.50", "1234.5"), ("50%", "0.5"), ("the answer is (B).", "B"),
        (r"\boxed{2+x}", "x+2"), (r"\boxed{5\text{ cm}}", "5"), ("so 18 eggs", "18"),
        (r"\boxed{\{1,2\}}", r"\{2,1\}"), ("x = 5", "5"),
    ]  # fmt: skip
    wrong = [
        ("", "5"), ("I do not know", "5"), ("10000001", "10000000"), (r"\boxed{42 or 43}", "42"), (r"\boxed{5x}", "5"),
        (r"\boxed{1/0}", "0"), (r"\boxed{9^{9^9}}", "x"), ("(A)", "B"), (r"\boxed{" * 50_000, "5"),
        ("1e999999999", "5"), ("18 eggs or 5", "18"),
    ]  # fmt: skip
    assert [case for case in right if reward("", *case) != 1.0] == []
    assert [case for case in wrong if reward("", *case) != 0.0] == []


@pytest.mark.parametrize(
    ("prompt", "response", "score"),
    [
        ("", "<think>so</think> 5", 1.0),
        ("", " <think>so</think>\n5", 1.0),
        ("", "<think>so</think>", 0.2),
        ("", "<think> </think> 5", 0.2),
        ("", "well <think>so</think> 5", 0.2),
        ("", "<think>so 5", 0.2),
        ("", "so</think> 5", 0.2),
        ("", "</think>so<think> 5", 0.2),
        ("", "<think>a</think><think>b</think> 5", 0.2),
        ("", "5", 0.0),
        ("", "", 0.0),
        ("...<think>\n", "so</think> 5", 1.0),
        ("...<think>\n", "so 5", 0.0),
    ],
)
def test_thinking_reward_scores_think_tag_format(prompt, response, score):
    assert ThinkingReward()(prompt, response, "7") == score


def test_thinking_reward_settings_are_applied_and_validated():
    assert ThinkingReward(partial_reward=0.5, full_reward=3.0, tag="plan")("", "<plan>a</plan> b", "") == 3.0
    with pytest.raises(ValueError, match="partial_reward"):
        ThinkingReward(partial_reward=2.0)


def test_exact_and_character_match_rewards_give_expected_scores():
    assert ExactMatch()("", " abc\n", "abc") == 1.0
    assert ExactMatch(correct=2.0, incorrect=-1.0)("", "abd", "abc") == -1.0
    assert CharacterMatch()("", "abd", "abc") == pytest.approx(2 / 3)
    assert (CharacterMatch()("", "abcabc", "abc"), CharacterMatch()("", "", "")) == (0.5, 1.0)


@given(st.text(), st.text())
def test_character_match_reward_is_1_only_for_exact_text(response, target):
    score = CharacterMatch()("", response, target)
    assert 0.0 <= score <= 1.0
    assert (score == 1.0) == (ExactMatch()("", response, target) == 1.0)
