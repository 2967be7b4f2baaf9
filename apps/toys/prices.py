"""Prices, as the bidders of an auction see them."""

from __future__ import annotations

from random import Random

from apps.toys.tasks import ProceduralTask, Row


class Price(ProceduralTask):
    """A price of `low` to `high` digits, which is also the best bid."""

    name = "price"

    def draw(self, rng: Random, low: int, high: int) -> Row:
        digits = rng.randint(low, high)
        price = str(rng.randrange(10 ** (digits - 1), 10**digits))
        return Row(price, price)

    def size(self, low: int, high: int) -> int:
        return 10**high - 10 ** (low - 1)
