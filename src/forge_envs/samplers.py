"""Samplers of rows: a curriculum, the frontier of what is sometimes solved, and others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from forge.data.files import Row
from forge.data.sampler import Sampler

SOLVED = 1.0  # the reward of a right answer


class Curriculum(Sampler):
    """Rows of one level until they are mostly solved, then those of the next; the last level stays.

    Args:
        level: the column of the level, a number; lower is easier.
        advance_at: share of right answers, over the last `window` groups of the level, at which the next begins.
        window: groups.
    """

    def __init__(
        self, rows: Sequence[Row], seed: int, level: str = "level", advance_at: float = 0.8, window: int = 32
    ) -> None:
        super().__init__(rows, seed)
        if not 0 < advance_at <= 1 or window < 1:
            raise ValueError(f"advance_at must be in (0, 1] and window at least 1, got {advance_at} and {window}")
        _check_column(rows, level)
        self.level, self.advance_at, self.window = level, advance_at, window
        self.levels = sorted({row[level] for row in rows})
        self._rows_of = _by_value(rows, level)
        self.stage = 0  # position in `levels`
        self.shares: list[float] = []  # of right answers, of the last groups of this stage

    def draw(self) -> int:
        """A row of the current level."""
        return self.random().choice(self._rows_of[str(self.levels[self.stage])])

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        """Begin the next level where this one is mostly solved."""
        # Groups of the stage before may still come in.
        if not rewards or self.rows[row][self.level] != self.levels[self.stage]:
            return
        self.shares = [*self.shares, _solved(rewards)][-self.window :]
        # A few lucky groups at its beginning must not end a level.
        is_full = len(self.shares) == self.window
        if is_full and sum(self.shares) / self.window >= self.advance_at and self.stage + 1 < len(self.levels):
            self.stage += 1
            self.shares = []


class Frontier(Sampler):
    """Rows that are sometimes solved, which alone have a signal: a row of success rate p is drawn in proportion to
    p (1 - p) + `floor`. Rows that were never drawn count as p = 1/2.

    Args:
        floor: what solved and hopeless rows still get; they may change as the policy does.
        memory: weight of the newest group in a row's success rate.
    """

    def __init__(self, rows: Sequence[Row], seed: int, floor: float = 0.05, memory: float = 0.5) -> None:
        super().__init__(rows, seed)
        if floor <= 0 or not 0 < memory <= 1:
            raise ValueError(f"floor must be above 0 and memory in (0, 1], got {floor} and {memory}")
        self.floor, self.memory = floor, memory
        self.rates: dict[str, float] = {}  # by the position as text, as JSON has it
        self._weights: list[float] = []

    def draw(self) -> int:
        """A row in proportion to its weight."""
        if not self._weights:
            self._weights = [self._weight(self.rates.get(str(row), 0.5)) for row in range(len(self.rows))]
        return self.random().choices(range(len(self.rows)), cum_weights=[*accumulate(self._weights)])[0]

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        """Move a row's success rate."""
        if rewards:
            before = self.rates.get(str(row), 0.5)
            rate = self.rates[str(row)] = before + self.memory * (_solved(rewards) - before)
            if self._weights:
                self._weights[row] = self._weight(rate)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        super().load_state_dict(state)
        self._weights = []

    def _weight(self, rate: float) -> float:
        # The variance of a reward of 0 or 1: without it the advantages of a group are 0.
        return rate * (1 - rate) + self.floor


class Retire(Sampler):
    """All rows in turn, in a new order each time, without those that were solved by every answer `times` in
    succession. When all are retired they come back.

    Args:
        times: groups.
    """

    def __init__(self, rows: Sequence[Row], seed: int, times: int = 1) -> None:
        super().__init__(rows, seed)
        if times < 1:
            raise ValueError(f"times must be at least 1, got {times}")
        self.times = times
        self.streaks: dict[str, int] = {}  # groups that were solved in succession, by the position as text
        self.queue: list[int] = []

    def draw(self) -> int:
        """The next row that is not retired."""
        # What is retired while it waits is passed over.
        self.queue = [row for row in self.queue if not self._is_retired(row)]
        if not self.queue:
            if all(map(self._is_retired, range(len(self.rows)))):
                self.streaks = {}
            self.queue = [row for row in range(len(self.rows)) if not self._is_retired(row)]
            self.random().shuffle(self.queue)
        return self.queue.pop()

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        """Count how often in succession a row was solved."""
        # One wrong answer, and the row is still worth a group.
        if rewards:
            solved = min(rewards) >= SOLVED
            self.streaks[str(row)] = self.streaks.get(str(row), 0) + 1 if solved else 0

    def _is_retired(self, row: int) -> bool:
        return self.streaks.get(str(row), 0) >= self.times


class Mix(Sampler):
    """Rows of several kinds, whose shares move from `start` to `end` over the first `draws_to_end` draws.

    Args:
        kind: the column of the kind.
        start, end: the weight of each kind; a kind that is missing has weight 0.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        seed: int,
        start: dict[str, float],
        end: dict[str, float],
        draws_to_end: int,
        kind: str = "kind",
    ) -> None:
        super().__init__(rows, seed)
        _check_column(rows, kind)
        kinds = {str(row[kind]) for row in rows}
        for name, weights in (("start", start), ("end", end)):
            if unknown := sorted(weights.keys() - kinds):
                raise ValueError(f"{name} has {unknown[0]!r}, and no row has that {kind}: {', '.join(sorted(kinds))}")
            if min(weights.values(), default=-1.0) < 0 or not 0 < sum(weights.values()) < math.inf:
                raise ValueError(f"{name} must have weights of at least 0, not all of them 0, got {weights}")
        if draws_to_end < 1:
            raise ValueError(f"draws_to_end must be at least 1, got {draws_to_end}")
        self.kind, self.start, self.end, self.draws_to_end = kind, start, end, draws_to_end
        self._rows_of = _by_value(rows, kind)

    def draw(self) -> int:
        """A row of a kind, which is drawn by the shares of now."""
        # By draws, not by steps: what is dropped moves the shares as well.
        progress = min(1.0, self.draws / self.draws_to_end)
        random = self.random()
        kinds = sorted({*self.start, *self.end})
        weights = [(1 - progress) * share + progress * end for share, end in map(self._shares, kinds)]
        kind = random.choices(kinds, weights)[0]
        return random.choice(self._rows_of[kind])

    def _shares(self, kind: str) -> tuple[float, float]:
        start, end = (weights.get(kind, 0.0) / sum(weights.values()) for weights in (self.start, self.end))
        return start, end


def _solved(rewards: Sequence[float]) -> float:
    """The share of right answers."""
    return sum(reward >= SOLVED for reward in rewards) / len(rewards)


def _by_value(rows: Sequence[Row], column: str) -> dict[str, list[int]]:
    """The positions of rows by the text of a column's value."""
    positions: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        positions.setdefault(str(row[column]), []).append(number)
    return positions


def _check_column(rows: Sequence[Row], column: str) -> None:
    for number, row in enumerate(rows, 1):
        if row.get(column) is None:
            raise ValueError(f"row {number} has no {column}: it has {', '.join(map(str, row))}")
