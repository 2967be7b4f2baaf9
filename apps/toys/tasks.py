"""Procedural tasks: endless question and answer rows from a seed, split into train and test by the question itself.

Questions are bare payloads ("12+7", "hello"); wording is the prompt template's business. `difficulty` is the length
of a word, the digits of a number or the steps of a program: an int d means 1 to d, a pair (low, high) low to high.
A configuration names a task as `dataset.task: apps.toys.words:Reverse`; `forge.data.sources.Task` is the protocol.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import count
from random import Random
from typing import ClassVar, NamedTuple

from apps.toys.mistakes import mistake

SPLITS = ("train", "test")
_ATTEMPTS = 1000


class Row(NamedTuple):
    question: str
    answer: str


def split_of(question: str) -> str:
    """The split a question belongs to, under every seed and difficulty: "test" for about one in ten.

    Anagrams share a split, so that neither the sum with its terms exchanged, nor the answer of a reversal asked as a
    question, crosses over.
    """
    digest = hashlib.blake2b("".join(sorted(question)).encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % 10 == 0 else "train"


class ProceduralTask(ABC):
    """A subclass has a `name`, which seeds its rows, and draws one row at a time."""

    name: ClassVar[str]

    @abstractmethod
    def draw(self, rng: Random, low: int, high: int) -> Row:
        """A row of a difficulty from `low` to `high`."""

    @abstractmethod
    def size(self, low: int, high: int) -> int:
        """Upper bound on the number of questions."""

    def row(self, index: int, *, split: str = "train", seed: int = 0, difficulty: int | Sequence[int] = 5) -> Row:
        """Row `index` of the endless sequence that (task, split, seed, difficulty) names, in constant time.

        Raises:
            ValueError: unknown split, bad difficulty, or a split that holds no question at this difficulty.
        """
        low, high = _bounds(split, difficulty)
        rng = Random(f"{self.name}/{split}/{seed}/{index}")
        for _ in range(_ATTEMPTS):
            drawn = self.draw(rng, low, high)
            if split_of(drawn.question) == split:
                return drawn
        size = self.size(low, high)
        raise ValueError(
            f"no {split} question among the {size} of task {self.name!r} at difficulty {difficulty}: raise it"
        )

    def rows(
        self, *, split: str = "train", seed: int = 0, difficulty: int | Sequence[int] = 5, start: int = 0
    ) -> Iterator[Row]:
        """The rows from `start` on, without end; rows may repeat. Errors as `row`, raised by the call itself."""
        self.row(start, split=split, seed=seed, difficulty=difficulty)
        return (self.row(index, split=split, seed=seed, difficulty=difficulty) for index in count(start))

    def take(self, n: int, *, split: str = "test", seed: int = 0, difficulty: int | Sequence[int] = 5) -> list[Row]:
        """The first n rows with distinct questions. ValueError as `row`, and if the split has fewer questions."""
        size = self.size(*_bounds(split, difficulty))
        found: dict[str, Row] = {}
        if 0 <= n <= size:
            # Enough draws to meet nearly every question of a space that n exhausts; beyond that there are too few.
            for index in range(1000 + 50 * n):
                if len(found) == n:
                    return list(found.values())
                drawn = self.row(index, split=split, seed=seed, difficulty=difficulty)
                found.setdefault(drawn.question, drawn)
        raise ValueError(
            f"cannot take {n} distinct {split} questions of task {self.name!r} at difficulty {difficulty}: "
            f"it has {size} questions in all" + (f", {len(found)} of them found in that split" if found else "")
        )

    def wrong(self, answer: str, rng: Random) -> str:
        """A wrong answer that looks right, for preference pairs."""
        return mistake(answer, rng)


def _bounds(split: str, difficulty: int | Sequence[int]) -> tuple[int, int]:
    if split not in SPLITS:
        raise ValueError(f"a procedural task has the splits train and test, not {split!r}")
    bounds = tuple(difficulty) if isinstance(difficulty, Sequence) else (1, difficulty)
    if len(bounds) != 2 or {type(bound) for bound in bounds} != {int} or not 1 <= bounds[0] <= bounds[1] <= 1000:
        raise ValueError(f"difficulty must be an int or a pair low <= high, from 1 to 1000, got {difficulty!r}")
    return bounds[0], bounds[1]
