"""Pairs of numbers: their sum and their greatest common divisor."""

from __future__ import annotations

import math
from random import Random

from apps.toys.tasks import ProceduralTask, Row


class Add(ProceduralTask):
    name = "add"

    def draw(self, rng: Random, low: int, high: int) -> Row:
        a, b = _integer(rng, low, high), _integer(rng, low, high)
        return Row(f"{a}+{b}", str(a + b))

    def size(self, low: int, high: int) -> int:
        return (10**high - (10 ** (low - 1) if low > 1 else 0)) ** 2


class Gcd(Add):
    name = "gcd"

    def draw(self, rng: Random, low: int, high: int) -> Row:
        # Independent numbers are coprime in most cases, which would make 1 a good guess.
        least, most = 10 ** (low - 1), 10**high - 1
        factor = rng.randint(1, math.isqrt(most))
        a, b = (factor * rng.randint(-(-least // factor), most // factor) for _ in range(2))
        return Row(f"{a},{b}", str(math.gcd(a, b)))


def _integer(rng: Random, low: int, high: int) -> int:
    digits = rng.randint(low, high)
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
