"""Rewards for texts: matches, a format, a length penalty and a JSON object; and how rewards are found by their name."""

import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ...config.plugin import resolve
from ...data.thoughts import possible_answers, without_thoughts
from ...types import Group

RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ExactMatch:
    """The reward `correct` if response and target are the same text, else `incorrect`; thoughts and white space at the
    ends do not count."""

    correct: float = 1.0
    incorrect: float = 0.0

    def __call__(self, prompt: str, response: str, target: str) -> float:
        is_same = target.strip() in (response.strip(), without_thoughts(response, prompt))
        return self.correct if is_same else self.incorrect


@dataclass(frozen=True, slots=True)
class CharacterMatch:
    """The share of positions at which response and target have the same character, in [0, 1]; 1 if they are equal.

    Thoughts and white space at the ends do not count. Missing and surplus characters are wrong positions, so that a
    response that is too long loses as much as one that is too short. Two empty texts are equal.
    """

    def __call__(self, prompt: str, response: str, target: str) -> float:
        target = target.strip()
        response = target if response.strip() == target else without_thoughts(response, prompt)
        positions = max(len(response), len(target))
        same = sum(a == b for a, b in zip(response, target, strict=False))
        return same / positions if positions else 1.0


@dataclass(frozen=True, slots=True)
class ThinkingReward:
    """A reward for the form of a response: one thought in tags, followed by an answer.

    - `full_reward`: one opening tag at the start, one closing tag, text between them, and text after them.
    - `partial_reward`: at least one of the two tags, but not that form (unclosed, repeated, empty, no answer).
    - 0: no tag at all.

    Some chat templates write the opening tag at the end of the prompt; it then counts as the response's, unless the
    response has no tag at all.

    Args:
        partial_reward: at most `full_reward`.
        full_reward: the reward of the complete form.
        tag: the name inside the angle brackets.

    Raises:
        ValueError: `partial_reward` is above `full_reward`.
    """

    partial_reward: float = 0.2
    full_reward: float = 1.0
    tag: str = "think"

    def __post_init__(self) -> None:
        if self.partial_reward > self.full_reward:
            raise ValueError(f"partial_reward {self.partial_reward} must be at most full_reward {self.full_reward}")

    def __call__(self, prompt: str, response: str, target: str = "") -> float:
        opening, closing = f"<{self.tag}>", f"</{self.tag}>"

        if prompt.rstrip().endswith(opening):
            # The policy did not write this tag, so it earns nothing by itself.
            if closing not in response and opening not in response:
                return 0.0
            response = opening + response

        if opening not in response and closing not in response:
            return 0.0

        text_before, _, tagged = response.partition(opening)
        thought, _, answer = tagged.partition(closing)
        is_complete = (
            response.count(opening) == 1
            and response.count(closing) == 1
            and not text_before.strip()
            and bool(thought.strip())
            and bool(answer.strip())
        )
        return self.full_reward if is_complete else self.partial_reward


def overlong_penalty(groups: Sequence[Group], limit: int, buffer: int) -> None:
    """Subtract a length penalty from the rewards of scored episodes, in place (Yu et al. 2025, DAPO, eq. 13).

    The penalty is 0 up to `limit - buffer` tokens, and rises linearly to 1 at `limit`. So the reward falls gradually
    before answers are cut off.

    Args:
        limit: maximum tokens of an answer.
        buffer: number of tokens before the limit from which on it applies; 0: no penalty.
    """
    for episode in (episode for group in groups for episode in group.episodes):
        if buffer and episode.reward is not None:
            tokens_in_buffer = sum(episode.mask) - (limit - buffer)
            episode.reward -= min(1.0, max(0.0, tokens_in_buffer / buffer))


def load_reward(name: str, subject: str = "reward") -> RewardFunction:
    """Return the reward function that a name stands for; a class is constructed without arguments.

    Args:
        name: `package.module:Name`, or a name in `forge.rewards.rules`.
        subject: what errors call it.

    Raises:
        ValueError: there is nothing of this name, or it is not callable.
    """
    target = resolve(name, subject, "forge.rewards.rules")
    try:
        function = target() if inspect.isclass(target) else target
    except TypeError as error:
        raise ValueError(
            f"{subject} {name!r} cannot be called without arguments ({error}): name a function, or a class without "
            "required arguments"
        ) from error
    if not callable(function):
        raise ValueError(f"{subject} {name!r} is not callable")
    return function


@dataclass(frozen=True, slots=True)
class JsonMatch:
    """Reward for the agreement of a response, as a JSON object, with the target's JSON object, in [0, 1].

    The reward is 0 if the response is anything else than one JSON object with thoughts and white space around it.
    Otherwise it is `form` + (1 - `form`) * the share of equal values among the keys of both objects, and so 1 if the
    objects are equal. Values of different JSON types differ: 1, 1.0, true and "1" are four values.

    Args:
        form: the reward of an object without any right value, in [0, 1).

    Raises:
        ValueError: `form` is outside [0, 1), or a target is not a JSON object.
    """

    form: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.form < 1:
            raise ValueError(f"form must be in [0, 1), got {self.form}")

    def warning(self, targets: Iterable[str | None]) -> None:
        """Check the targets of a data set before a run. ValueError: one is not a JSON object."""
        for target in targets:
            if _parse_object(target or "") is None:
                raise ValueError(f"the target {target or ''!r:.60} is not a JSON object, as JsonMatch needs")

    def __call__(self, prompt: str, response: str, target: str) -> float:
        expected = _parse_object(target)
        objects = map(_parse_object, possible_answers(response, prompt))
        answer = next((candidate for candidate in objects if candidate is not None), None)
        if expected is None:
            raise ValueError(f"the target {target[:60]!r} is not a JSON object")
        if answer is None:
            return 0.0

        keys = expected.keys() | answer.keys()
        right = sum(key in expected and key in answer and _are_same(expected[key], answer[key]) for key in keys)
        return 1.0 if right == len(keys) else self.form + (1 - self.form) * right / len(keys)


def _parse_object(text: str) -> dict[str, object] | None:
    """Return the JSON object that a text consists of; None for any other text, also if it has repeated keys, NaN or
    infinities."""

    def reject_repeated(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        if len(members) < len(pairs):
            raise ValueError("a JSON object has a key twice")
        return members

    def reject_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        # By itself json.loads keeps the last of two equal keys, and reads NaN.
        value = json.loads(text, object_pairs_hook=reject_repeated, parse_constant=reject_constant)
    except (ValueError, RecursionError):  # ValueError also of numbers with thousands of digits
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
