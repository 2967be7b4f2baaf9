"""JsonMatch: what is the object that was asked for, and what is only near it."""

import json

import pytest
from hypothesis import given, strategies as st

from forge.rewards.rules import ExactMatch, JsonMatch

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)
TARGET = json.dumps({"name": "Ann", "age": 30})


@pytest.mark.parametrize("marker", ["<think>", "</think>", "[/THINK]", "<|channel|>final<|message|>", "</s>"])
@pytest.mark.parametrize("thought", ["", "<think>so</think>", "[THINK]{}[/THINK] "])
def test_think_tag_inside_json_answer_is_kept(marker, thought):
    """A key or a text of the answer may look like the beginning or the end of one."""
    value = {marker: None, "name": f"a {marker} b"}
    assert JsonMatch()("", thought + json.dumps(value) + "<|im_end|>", json.dumps(value)) == 1.0
    assert JsonMatch()("<think>\n", json.dumps({"name": 1}), json.dumps({"name": 1})) == 0.0


@given(OBJECTS, OBJECTS, st.floats(0, 0.99))
def test_json_match_reward_is_1_only_for_equal_objects(a, b, form):
    found = JsonMatch(form)("", json.dumps(a), json.dumps(b))
    assert 0 <= form <= found <= 1
    assert (found == 1) == (typed(a) == typed(b))


def typed(value):
    """A value that compares as JSON does: with its type, and without the order of keys."""
    if isinstance(value, dict):
        return {key: typed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [typed(inner) for inner in value]
    return type(value), value


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('{"age": 30, "name": "Ann"}', 1.0),
        ('{"age": 31, "name": "Ann"}', 0.6),
        ('{"age": "30", "name": "Ann"}', 0.6),
        ('{"age": 30.0, "name": "Ann"}', 0.6),
        ('{"name": "Ann"}', 0.6),
        ('{"name": "Ann", "age": 30, "job": "nurse"}', 0.2 + 0.8 * 2 / 3),
        ("{}", 0.2),
        ('{"name": "Ann", "age": 30} is the answer', 0.0),
        ('```json\n{"name": "Ann", "age": 30}\n```', 0.0),
        ('[{"name": "Ann", "age": 30}]', 0.0),
        ('{"name": "Bob", "name": "Ann", "age": 30}', 0.0),
        ('{"name": "Ann", "age": NaN}', 0.0),
        ('{"name": "Ann", "age": 3' + "0" * 5000 + "}", 0.0),
        ("[" * 200_000, 0.0),
        ('{"name":' * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_match_reward_gives_partial_credit_per_key(response: str, expected: float):
    assert JsonMatch()("", response, TARGET) == pytest.approx(expected)


def test_invalid_json_match_settings_and_targets_raise():
    with pytest.raises(ValueError, match=r"form must be in \[0, 1\)"):
        JsonMatch(form=1.0)
    with pytest.raises(ValueError, match="is not a JSON object"):
        JsonMatch()("", "{}", "thirty")
    JsonMatch().warning(["{}", TARGET])
    with pytest.raises(ValueError, match="the target 'thirty' is not a JSON object, as JsonMatch needs"):
        JsonMatch().warning([TARGET, "thirty"])


def test_exact_match_reward_compares_code_points():
    assert ExactMatch()("", "e\u0301", "\u00e9") == 0.0
    assert JsonMatch()("", '{"a": "e\u0301"}', '{"a": "\u00e9"}') == 0.2
