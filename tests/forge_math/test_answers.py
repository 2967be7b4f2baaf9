"""MathReward on a table of answers, decided one by one; docs/rewards.md has the reasons."""

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from forge.rewards.rules import MathReward
from forge_math.compare import parse_number

from .answers import RIGHT, WRONG

reward = MathReward()


def test_math_answer_table_has_no_contradictions():
    assert len(RIGHT) + len(WRONG) >= 400
    assert not set(RIGHT) & set(WRONG)


@pytest.mark.processes
def test_right_answers_in_math_answer_table_score_1():
    assert [case for case in RIGHT if reward("", *case) != 1.0] == []


@pytest.mark.processes
def test_wrong_answers_in_math_answer_table_score_0():
    assert [case for case in WRONG if reward("", *case) != 0.0] == []


@pytest.mark.processes
@pytest.mark.full
def test_response_equals_at_most_one_numeric_target():
    targets = {target: value[0] for _, target in [*RIGHT, *WRONG] if (value := parse_number(target)) is not None}
    for response, _ in [*RIGHT, *WRONG]:
        right = {targets[target] for target in targets if reward("", response, target) == 1.0}
        # A percentage agrees with its figure and with its value.
        assert len({value for value in right if value * 100 not in right}) <= 1, (response, right)


WHOLE = st.integers(-(10**6), 10**6)


@pytest.mark.processes
@given(WHOLE, WHOLE)
def test_response_with_two_final_numbers_scores_0(one, other):
    for form in (
        "#### {} {}",
        "#### {}, {}",
        "#### {} or {}",
        "The answer is {} or {}",
        r"\boxed{{{} \text{{ or }} {}}}",
    ):
        response = form.format(one, other)
        for target in {one, other, int(f"{one}{abs(other)}")}:
            if one != other:
                assert reward("", response, str(target)) == 0.0, (response, target)


@given(st.integers(0, 999), st.integers(0, 99), st.integers(1, 999))
def test_repeating_decimals_of_math_answers_are_parsed_exactly(whole, fixed, period):
    text = rf"{whole}.{fixed}\overline{{{period}}}"
    digits, repeated = len(str(fixed)), len(str(period))
    value = whole + Fraction(fixed, 10**digits) + Fraction(period, 10**digits * (10**repeated - 1))
    assert parse_number(text) == (value, False)


@given(st.integers(0, 10**9), st.sampled_from(["{}", "{:,}", "${:,}", "{} apples", "{}​", "{} cm²", r"\text{{{}}}"]))
def test_parsed_number_is_independent_of_formatting(value, form):
    assert parse_number(form.format(value)) == (value, False)
