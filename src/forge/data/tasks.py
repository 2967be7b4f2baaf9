"""Procedural tasks: endless question and answer rows from a seed, split into train and test by the question itself.

Questions are bare payloads ("12+7", "hello"); wording is the prompt template's business. `difficulty` is the length
of a word, the digits of a number or the steps of a program: an int d means 1 to d, a pair (low, high) low to high.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import string
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from random import Random
from typing import NamedTuple

from forge.data import expressions, programs

SPLITS = ("train", "test")
_ATTEMPTS = 1000


class Row(NamedTuple):
    question: str
    answer: str


class _Task(NamedTuple):
    draw: Callable[[Random, int, int], Row]
    size: Callable[[int, int], int]  # how many questions there are at most


def _word(rng: Random, alphabet: str, low: int, high: int) -> str:
    return "".join(rng.choices(alphabet, k=rng.randint(low, high)))


def _words(letters: int) -> Callable[[int, int], int]:
    return lambda low, high: sum(letters**length for length in range(low, high + 1))


def _integer(rng: Random, low: int, high: int) -> int:
    digits = rng.randint(low, high)
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _reverse(rng: Random, low: int, high: int) -> Row:
    word = _word(rng, string.ascii_lowercase, low, high)
    return Row(word, word[::-1])


def _sort(alphabet: str) -> Callable[[Random, int, int], Row]:
    def draw(rng: Random, low: int, high: int) -> Row:
        word = _word(rng, alphabet, low, high)
        return Row(word, "".join(sorted(word)))

    return draw


def _add(rng: Random, low: int, high: int) -> Row:
    a, b = _integer(rng, low, high), _integer(rng, low, high)
    return Row(f"{a}+{b}", str(a + b))


def _gcd(rng: Random, low: int, high: int) -> Row:
    # Independent numbers are coprime in most cases, which would make 1 a good guess.
    least, most = 10 ** (low - 1), 10**high - 1
    factor = rng.randint(1, math.isqrt(most))
    a, b = (factor * rng.randint(-(-least // factor), most // factor) for _ in range(2))
    return Row(f"{a},{b}", str(math.gcd(a, b)))


def _pairs(low: int, high: int) -> int:
    return (10**high - (10 ** (low - 1) if low > 1 else 0)) ** 2


TASKS: dict[str, _Task] = {
    "reverse": _Task(_reverse, _words(26)),
    "sort": _Task(_sort(string.ascii_lowercase), _words(26)),
    "sort_digits": _Task(_sort(string.digits), _words(10)),
    "add": _Task(_add, _pairs),
    "gcd": _Task(_gcd, _pairs),
    "expression": _Task(lambda *how: Row(*expressions.draw(*how)), expressions.size),
    "program": _Task(lambda *how: Row(*programs.draw(*how)), programs.size),
}


def split_of(question: str) -> str:
    """The split a question belongs to, under every seed and difficulty: "test" for about one in ten.

    Anagrams share a split, so that neither the sum with its terms exchanged, nor the answer of a reversal asked as a
    question, crosses over.
    """
    digest = hashlib.blake2b("".join(sorted(question)).encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % 10 == 0 else "train"


def _checked(task: str, split: str, difficulty: int | Sequence[int]) -> tuple[_Task, int, int]:
    if task not in TASKS:
        near = difflib.get_close_matches(task, TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown task {task!r}{hint} Known: {', '.join(TASKS)}")
    if split not in SPLITS:
        raise ValueError(f"a procedural task has the splits train and test, not {split!r}")
    bounds = tuple(difficulty) if isinstance(difficulty, Sequence) else (1, difficulty)
    if len(bounds) != 2 or {type(bound) for bound in bounds} != {int} or not 1 <= bounds[0] <= bounds[1] <= 1000:
        raise ValueError(f"difficulty must be an int or a pair low <= high, from 1 to 1000, got {difficulty!r}")
    return TASKS[task], bounds[0], bounds[1]


def row(task: str, index: int, *, split: str = "train", seed: int = 0, difficulty: int | Sequence[int] = 5) -> Row:
    """Row `index` of the endless sequence that (task, split, seed, difficulty) names, in constant time.

    ValueError for an unknown task or split, a bad difficulty, or a split that holds no question at this difficulty.
    """
    chosen, low, high = _checked(task, split, difficulty)
    rng = Random(f"{task}/{split}/{seed}/{index}")
    for _ in range(_ATTEMPTS):
        drawn = chosen.draw(rng, low, high)
        if split_of(drawn.question) == split:
            return drawn
    size = chosen.size(low, high)
    raise ValueError(f"no {split} question among the {size} of task {task!r} at difficulty {difficulty}: raise it")


def generate(
    task: str, *, split: str = "train", seed: int = 0, difficulty: int | Sequence[int] = 5, start: int = 0
) -> Iterator[Row]:
    """The rows from `start` on, without end; rows may repeat. Errors as `row`, raised by the call itself."""
    row(task, start, split=split, seed=seed, difficulty=difficulty)
    return (row(task, index, split=split, seed=seed, difficulty=difficulty) for index in count(start))


def take(n: int, task: str, *, split: str = "test", seed: int = 0, difficulty: int | Sequence[int] = 5) -> list[Row]:
    """The first n rows with distinct questions. ValueError as `row`, and where the split holds no n questions."""
    chosen, low, high = _checked(task, split, difficulty)
    size = chosen.size(low, high)
    found: dict[str, Row] = {}
    if 0 <= n <= size:
        # Enough draws to meet nearly every question of a space that n exhausts; beyond that there are too few.
        for index in range(1000 + 50 * n):
            if len(found) == n:
                return list(found.values())
            drawn = row(task, index, split=split, seed=seed, difficulty=difficulty)
            found.setdefault(drawn.question, drawn)
    raise ValueError(
        f"cannot take {n} distinct {split} questions of task {task!r} at difficulty {difficulty}: "
        f"it has {size} questions in all" + (f", {len(found)} of them found in that split" if found else "")
    )
