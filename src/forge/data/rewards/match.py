"""Rewards that compare text with text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExactMatch:
    """`correct` if response and target are the same text apart from white space at the ends, else `incorrect`."""

    correct: float = 1.0
    incorrect: float = 0.0

    def __call__(self, prompt: str, response: str, target: str) -> float:
        return self.correct if response.strip() == target.strip() else self.incorrect


@dataclass(frozen=True, slots=True)
class CharacterMatch:
    """The share of positions that hold the right character, in [0, 1]; 1 means exact.

    White space at the ends does not count. Missing and surplus characters are wrong positions, so that writing on
    past the answer costs as much as stopping short. Two empty texts are exact.
    """

    def __call__(self, prompt: str, response: str, target: str) -> float:
        response, target = response.strip(), target.strip()
        positions = max(len(response), len(target))
        return sum(a == b for a, b in zip(response, target, strict=False)) / positions if positions else 1.0
