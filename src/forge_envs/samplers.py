"""Samplers of rows: a curriculum, the frontier of what is sometimes solved, and others."""

from collections.abc import Sequence

from forge.data.files import Row
from forge.data.sampler import Sampler

SOLVED = 1.0  # the reward of a right answer


class Curriculum(Sampler):
    """Rows of one level until they are mostly solved, then of the next; the last level stays.

    Args:
        level: the column of the level, a number; lower is easier.
        advance_at: share of right answers, over the last `window` groups of the level, at which the next starts.
        window: groups.
    """

    def __init__(
        self, rows: Sequence[Row], seed: int, level: str = "level", advance_at: float = 0.8, window: int = 32
    ) -> None:
        super().__init__(rows, seed)
        for number, row in enumerate(rows, 1):
            if row.get(level) is None:
                raise ValueError(f"row {number} has no {level}: it has {', '.join(map(str, row))}")
        self.level, self.advance_at, self.window = level, advance_at, window
        self.levels = sorted({row[level] for row in rows})
        self.stage = 0  # position in `levels`
        self.shares: list[float] = []  # of right answers, of the last groups of this stage

    def draw(self) -> int:
        """Return a row of the current level."""
        level = self.levels[self.stage]
        return self.random().choice([number for number, row in enumerate(self.rows) if row[self.level] == level])

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        """Start the next level where this one is mostly solved."""
        # Groups of the stage before may still come in.
        if not rewards or self.rows[row][self.level] != self.levels[self.stage]:
            return
        self.shares = [*self.shares, _solved_share(rewards)][-self.window :]
        # A few lucky groups at its beginning must not end a level.
        is_full = len(self.shares) == self.window
        if is_full and sum(self.shares) / self.window >= self.advance_at and self.stage + 1 < len(self.levels):
            self.stage += 1
            self.shares = []


class Frontier(Sampler):
    """Rows that are sometimes solved, the only ones with a signal: a row of success rate p is drawn in proportion to
    p (1 - p) + `floor`. Rows that were never drawn count as p = 1/2.

    Args:
        floor: what solved and hopeless rows still get; they may change as the policy does.
        memory: weight of the newest group in a row's success rate.
    """

    def __init__(self, rows: Sequence[Row], seed: int, floor: float = 0.05, memory: float = 0.5) -> None:
        super().__init__(rows, seed)
        if floor <= 0:
            raise ValueError(f"floor must be above 0, got {floor}")
        self.floor, self.memory = floor, memory
        self.rates: dict[str, float] = {}  # by the position as text, as JSON has it

    def draw(self) -> int:
        """Return a row in proportion to its weight."""
        rates = (self.rates.get(str(row), 0.5) for row in range(len(self.rows)))
        # The variance of a reward of 0 or 1: without it the advantages of a group are 0.
        weights = [rate * (1 - rate) + self.floor for rate in rates]
        return self.random().choices(range(len(self.rows)), weights)[0]

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        """Move a row's success rate."""
        if rewards:
            before = self.rates.get(str(row), 0.5)
            self.rates[str(row)] = before + self.memory * (_solved_share(rewards) - before)


class Retire(Sampler):
    """All rows in turn, in a new order each time, without those that were solved by every answer `times` in
    succession. When all are retired they come back.

    Args:
        times: groups.
    """

    def __init__(self, rows: Sequence[Row], seed: int, times: int = 1) -> None:
        super().__init__(rows, seed)
        self.times = times
        self.streaks: dict[str, int] = {}  # groups that were solved in succession, by the position as text
        self.queue: list[int] = []

    def draw(self) -> int:
        """Return the next row that is not retired."""
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


def _solved_share(rewards: Sequence[float]) -> float:
    """Return the share of right answers."""
    return sum(reward >= SOLVED for reward in rewards) / len(rewards)
