"""Words to reverse or to sort."""

from __future__ import annotations

import string
from random import Random

from apps.toys.tasks import ProceduralTask, Row


class _Words(ProceduralTask):
    alphabet = string.ascii_lowercase

    def size(self, low: int, high: int) -> int:
        return sum(len(self.alphabet) ** length for length in range(low, high + 1))

    def word(self, rng: Random, low: int, high: int) -> str:
        return "".join(rng.choices(self.alphabet, k=rng.randint(low, high)))


class Reverse(_Words):
    name = "reverse"

    def draw(self, rng: Random, low: int, high: int) -> Row:
        word = self.word(rng, low, high)
        return Row(word, word[::-1])


class Sort(_Words):
    name = "sort"

    def draw(self, rng: Random, low: int, high: int) -> Row:
        word = self.word(rng, low, high)
        return Row(word, "".join(sorted(word)))


class SortDigits(Sort):
    name = "sort_digits"
    alphabet = string.digits
