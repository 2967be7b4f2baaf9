"""Take-away games: players take 1 to `most` from a heap in turn, and who takes the last one wins."""

from __future__ import annotations

from random import Random

from apps.toys.tasks import ProceduralTask, Row

MOSTS = (2, 3, 4, 5, 6)


class Nim(ProceduralTask):
    """A heap and the most that a move takes, such as "17/3"; and the size of the heap that its first move should leave,
    where it can win at all."""

    name = "nim"

    def draw(self, rng: Random, low: int, high: int) -> Row:
        most = rng.choice(MOSTS)
        heap = rng.randint(max(low, most + 1), max(high, most + 1))
        return Row(f"{heap}/{most}", str(heap - heap % (most + 1)))

    def size(self, low: int, high: int) -> int:
        return len(MOSTS) * (high - low + 1)


def best(heap: int, most: int) -> int:
    """The move that wins, where there is one: it leaves a multiple of `most + 1`. Otherwise 1."""
    return heap % (most + 1) or 1
