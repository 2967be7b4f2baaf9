"""A reward for structured output: the response as a JSON object, compared with that of the target."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn

from ...data.thoughts import possible_answers


@dataclass(frozen=True, slots=True)
class JsonMatch:
    """The agreement of a response with the JSON object of the target.

    0 unless the response is one JSON object and nothing else but thoughts and white space. Otherwise `form` plus
    (1 - form) times the share of keys, of both objects together, whose values are equal; 1 means that the objects are
    equal. Values of different JSON types differ: 1, 1.0, true and "1" are four values.

    Args:
        form: the reward of an object none of whose values is right, in [0, 1). ValueError: outside.
    """

    form: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.form < 1:
            raise ValueError(f"form must be in [0, 1), got {self.form}")

    def __call__(self, prompt: str, response: str, target: str) -> float:
        expected = _object(target)
        objects = map(_object, possible_answers(response, prompt))
        answer = next((candidate for candidate in objects if candidate is not None), None)
        if expected is None:
            raise ValueError(f"the target {target[:60]!r} is not JSON object")
        if answer is None:
            return 0.0
        keys = expected.keys() | answer.keys()
        right = sum(key in expected and key in answer and _same(expected[key], answer[key]) for key in keys)
        return 1.0 if right == len(keys) else self.form + (1 - self.form) * right / len(keys)


def _object(text: str) -> dict[str, object] | None:
    """The JSON object that a text is, or None. A key that is given twice, NaN and infinities are no JSON."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        if len(members) < len(pairs):
            raise ValueError("a key is given twice")
        return members

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        # Stricter than Python's reader, which keeps the last of two equal keys and reads NaN.
        value = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError):  # also for numbers of thousands of digits
        return None
    return value if isinstance(value, dict) else None


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)
