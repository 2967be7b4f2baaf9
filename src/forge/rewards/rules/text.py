"""Text rewards: matches, a format, a length penalty, a JSON object; and rewards by name."""

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ...config.plugin import resolve
from ...data.thoughts import possible_answers, without_thoughts
from ...types import Group

RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ExactMatch:
    """`correct` if response and target are the same text apart from thoughts and white space at the ends, else
    `incorrect`."""

    correct: float = 1.0
    incorrect: float = 0.0

    def __call__(self, prompt: str, response: str, target: str) -> float:
        is_same = target.strip() in (response.strip(), without_thoughts(response, prompt))
        return self.correct if is_same else self.incorrect


@dataclass(frozen=True, slots=True)
class CharacterMatch:
    """The share of positions that hold the right character, in [0, 1]; 1 means exact.

    Thoughts and white space at the ends do not count. Missing and surplus characters are wrong positions, so that
    writing on past the answer costs as much as stopping short. Two empty texts are exact.
    """

    def __call__(self, prompt: str, response: str, target: str) -> float:
        target = target.strip()
        response = target if response.strip() == target else without_thoughts(response, prompt)
        positions = max(len(response), len(target))
        return sum(a == b for a, b in zip(response, target, strict=False)) / positions if positions else 1.0


@dataclass(frozen=True, slots=True)
class ThinkingReward:
    """Scores the shape of a response.

    - `full_reward`: one opening tag, one closing tag after it, text between them, and text after them.
    - `partial_reward`: at least one of the two tags, but not that shape (unclosed, repeated, empty, no answer).
    - 0: no tag at all.

    Some chat templates open the block themselves, at the end of the prompt; that tag counts as the response's own.

    Args:
        partial_reward: at most `full_reward`; ValueError otherwise.
        full_reward: the reward of the whole shape.
        tag: the name inside the angle brackets.
    """

    partial_reward: float = 0.2
    full_reward: float = 1.0
    tag: str = "think"

    def __post_init__(self) -> None:
        if self.partial_reward > self.full_reward:
            raise ValueError(f"partial_reward {self.partial_reward} is above full_reward {self.full_reward}")

    def __call__(self, prompt: str, response: str, target: str = "") -> float:
        opening, closing = f"<{self.tag}>", f"</{self.tag}>"
        if prompt.rstrip().endswith(opening):
            # The policy did not write this tag: by itself it earns nothing.
            if closing not in response and opening not in response:
                return 0.0
            response = opening + response

        if opening not in response and closing not in response:
            return 0.0
        head, _, following = response.partition(opening)
        thought, _, answer = following.partition(closing)
        complete = (
            response.count(opening) == 1
            and response.count(closing) == 1
            and not head.strip()
            and bool(thought.strip())
            and bool(answer.strip())
        )

        return self.full_reward if complete else self.partial_reward


def overlong_penalty(groups: Sequence[Group], limit: int, buffer: int) -> None:
    """Subtract a length penalty from the rewards of scored episodes, in place (Yu et al. 2025, DAPO, eq. 13).

    0 up to `limit - buffer` tokens, from there linearly down to -1 at `limit`. An answer that was cut off at the limit
    thus differs from a wrong one by degrees, and not by a sudden -1 or 0.

    Args:
        limit: maximum tokens of an answer.
        buffer: tokens before the limit at which the penalty starts; 0: no penalty.
    """
    for episode in (episode for group in groups for episode in group.episodes):
        if buffer and episode.reward is not None:
            episode.reward -= min(1.0, max(0.0, (sum(episode.mask) - (limit - buffer)) / buffer))


def load_reward(name: str, subject: str = "reward") -> RewardFunction:
    """Resolve `package.module:Name`, or a name from `forge.rewards.rules`; a class is instantiated without arguments.

    Args:
        what: the errors call it.

    Raises:
        ValueError: nothing of this name, or it is not callable.
    """
    target = resolve(name, subject, "forge.rewards.rules")
    try:
        function = target() if inspect.isclass(target) else target
    except TypeError as error:
        raise ValueError(f"{subject} {name!r} cannot be made without arguments ({error}); name a function") from error
    if not callable(function):
        raise ValueError(f"{subject} {name!r} is not callable")
    return function


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
        expected = _parse_object(target)
        objects = map(_parse_object, possible_answers(response, prompt))
        answer = next((candidate for candidate in objects if candidate is not None), None)
        if expected is None:
            raise ValueError(f"the target {target[:60]!r} is not JSON object")
        if answer is None:
            return 0.0
        keys = expected.keys() | answer.keys()
        right = sum(key in expected and key in answer and _are_same(expected[key], answer[key]) for key in keys)
        return 1.0 if right == len(keys) else self.form + (1 - self.form) * right / len(keys)


def _parse_object(text: str) -> dict[str, object] | None:
    """Return the JSON object that a text is, or None. A key that is given twice, NaN and infinities are no JSON."""

    def reject_repeated(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        if len(members) < len(pairs):
            raise ValueError("a key is given twice")
        return members

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        # Stricter than Python's reader, which keeps the last of two equal keys and reads NaN.
        value = json.loads(text, object_pairs_hook=reject_repeated, parse_constant=no_constant)
    except (ValueError, RecursionError):  # also for numbers of thousands of digits
        return None

    return value if isinstance(value, dict) else None


def _are_same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_are_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_are_same, a, b))
    return bool(a == b)
