"""The verifiable reward for mathematics: is the final answer of a response the target?"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .compare import equal

_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_PHRASE = re.compile(r"(?:\banswer\b[\s*_]*(?:is|was|:|=)|^\s*A:)[\s*_:]*([^\n]+)", re.IGNORECASE | re.MULTILINE)
_PHRASE_END = re.compile(r"[.!](?:\s|$)|[,;](?=\s)|\s\(|\s(?:because|since|as|so|which|when|if)\s", re.IGNORECASE)
_FIGURE = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBERS = re.compile(
    rf"(?<![\w.])-?\$?(?:\d+ \d+/\d+(?!\d)|(?:{_FIGURE})(?:e[-+]?\d+|/\d+(?:\.\d+)?)?)"
    r"(?:\\?%|\s(?:thousand|million|billion)\b)?"
    r"|-?\\[dt]?frac\{-?\d+\}\{\d+\}"
    rf"|(?<=[\w.])(?<!\d)(?<!\d[.,])(?:{_FIGURE})",
    re.IGNORECASE,
)
_LONGEST = 200_000


def boxed(text: str) -> str | None:
    """The content of the last closed `\\boxed{...}`, whose braces may nest; None if there is none."""
    for start in reversed([match.end() for match in re.finditer(r"\\f?boxed\s*\{", text)][-20:]):
        depth = 1
        for brace in re.finditer(r"(?<!\\)[{}]", text[start:]):
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                return text[start : start + brace.start()].strip()
    return None


def final_answer(response: str) -> str | None:
    """The final answer of a response, or None if it has none.

    By preference: the last `\\boxed{...}`, `<answer>...</answer>`, `#### ...`, "answer is ..." or "answer: ...", and
    otherwise the last number. Reasoning up to a `</think>` does not count.
    """
    response = response[-_LONGEST:].rpartition("</think>")[2]
    found = boxed(response)
    if found is not None:
        return found
    # Searched from the end: a regular expression would take quadratic time over tags that are never closed.
    before, closing, _ = response.rpartition("</answer>")
    tagged = before.rpartition("<answer>")
    if closing and tagged[1]:
        return tagged[2].strip()
    if hashes := _HASHES.findall(response):
        return hashes[-1].strip()
    if phrases := _PHRASE.findall(response):
        return _PHRASE_END.split(phrases[-1])[0].strip()
    numbers = _NUMBERS.findall(response)
    return numbers[-1] if numbers else None


@dataclass(frozen=True, slots=True)
class MathReward:
    """`correct` if the response's final answer equals the target, else `incorrect`.

    The target may be a bare answer, LaTeX, or a worked solution that ends in `#### answer` or `\\boxed{answer}`; text
    up to a `</think>` does not count. Answers compare as text, as numbers (see `compare.equal`), then symbolically with
    math-verify; an answer that is unreadable or takes too long to compare is incorrect, never an exception.

    Args:
        tolerance: how far two numbers may lie apart: relative to targets between -1 and 1, absolute beyond.
        correct: the reward of a right answer.
        incorrect: the reward of a wrong, missing or unreadable one.
    """

    tolerance: float = 1e-6
    correct: float = 1.0
    incorrect: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < float("inf"):
            raise ValueError(f"tolerance must be 0 or positive and finite, got {self.tolerance}")

    def __call__(self, prompt: str, response: str, target: str) -> float:
        return self.correct if self.is_right(response, target) else self.incorrect

    def is_right(self, response: str, target: str) -> bool | None:
        """Whether it is right; None where the target takes too long to compare."""
        target = target.rpartition("</think>")[2]
        wanted = boxed(target)
        if wanted is None:
            hashes = _HASHES.findall(target)
            wanted = (hashes[-1] if hashes else target).strip()
        answer = final_answer(response)
        # A response that is the target needs no extraction, which would read "x + 2" as 2.
        return response.strip() == wanted != "" or (answer is not None and equal(answer, wanted, self.tolerance))
