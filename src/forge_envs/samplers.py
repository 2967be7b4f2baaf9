"""Samplers that choose the rows of a dataset by how well the policy has solved them."""

from collections.abc import Sequence
from statistics import mean

from forge.data.files import Row
from forge.data.sampler import Sampler

SOLVED = 1.0  # the outcome of a right answer


class Curriculum(Sampler):
    """Sampler of rows of one level until most answers are right, then of the next level, up to the last.

    Args:
        level: the column with a row's level, a number; lower is easier.
        advance_at: the share of right answers in the last `window` groups of the level at which the next level starts.
        window: a number of groups.

    Raises:
        ValueError: a row has no level.
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
        self.stage = 0  # index of the current level in `levels`
        self.shares: list[float] = []  # of right answers in the last groups of the current level

    def draw(self) -> int:
        """Return the number of a random row of the current level."""
        level = self.levels[self.stage]
        return self.random().choice([number for number, row in enumerate(self.rows) if row[self.level] == level])

    def observe(self, row: int, outcomes: Sequence[float]) -> None:
        """Record the outcomes of a row's group, and start the next level if this one is mostly solved."""
        # Groups that were drawn from an earlier level may still arrive.
        if not outcomes or self.rows[row][self.level] != self.levels[self.stage]:
            return
        self.shares = [*self.shares, _solved_share(outcomes)][-self.window :]
        # Only with a full window: a few lucky groups at its beginning must not end a level.
        is_full = len(self.shares) == self.window
        if is_full and sum(self.shares) / self.window >= self.advance_at and self.stage + 1 < len(self.levels):
            self.stage += 1
            self.shares = []

    def metrics(self) -> dict[str, float]:
        """Return the current level, by its place from 1, and the share of right answers in its last groups."""
        return {"level": self.stage + 1} | ({"solved": mean(self.shares)} if self.shares else {})


class Frontier(Sampler):
    """Sampler that prefers rows solved in some samples, because only their groups have advantages other than 0.

    A row with success rate p is drawn in proportion to p (1 - p) + `floor`. Rows that were never drawn have p = 1/2.

    Args:
        floor: what rows with p = 0 or 1 still get, since they may change as the policy does.
        memory: the weight of the newest group in a row's success rate, a moving average.

    Raises:
        ValueError: `floor` is not above 0.
    """

    def __init__(self, rows: Sequence[Row], seed: int, floor: float = 0.05, memory: float = 0.5) -> None:
        super().__init__(rows, seed)
        if floor <= 0:
            raise ValueError(f"floor must be above 0, got {floor}")
        self.floor, self.memory = floor, memory
        self.rates: dict[str, float] = {}  # by the row's number as text, since checkpoints are JSON

    def draw(self) -> int:
        """Return the number of a row, drawn in proportion to its weight."""
        rates = (self.rates.get(str(row), 0.5) for row in range(len(self.rows)))
        # p (1 - p) is the variance of a reward of 0 or 1. Where it is 0, so are the advantages of a group.
        return self.random().choices(range(len(self.rows)), [rate * (1 - rate) + self.floor for rate in rates])[0]

    def observe(self, row: int, outcomes: Sequence[float]) -> None:
        """Update a row's success rate by the outcomes of its group."""
        if outcomes:
            old_rate = self.rates.get(str(row), 0.5)
            self.rates[str(row)] = old_rate + self.memory * (_solved_share(outcomes) - old_rate)

    def metrics(self) -> dict[str, float]:
        """Return the metric of the sampler: the mean success rate of the sampled rows."""
        return {"solved": mean(self.rates.values())} if self.rates else {}


class Retire(Sampler):
    """Sampler of all rows in turn, in a new order each time, except retired rows.

    A row is retired once every answer of `times` groups in succession was right. When all rows are retired, all return.

    Args:
        times: a number of groups.
    """

    def __init__(self, rows: Sequence[Row], seed: int, times: int = 1) -> None:
        super().__init__(rows, seed)
        self.times = times
        self.streaks: dict[str, int] = {}  # solved groups in succession, by the row's number as text
        self.queue: list[int] = []

    def draw(self) -> int:
        """Return the number of the next row that is not retired."""
        # A row may have been retired since the queue was filled.
        self.queue = [row for row in self.queue if not self._is_retired(row)]
        if not self.queue:
            if all(map(self._is_retired, range(len(self.rows)))):
                self.streaks = {}
            self.queue = [row for row in range(len(self.rows)) if not self._is_retired(row)]
            self.random().shuffle(self.queue)
        return self.queue.pop()

    def observe(self, row: int, outcomes: Sequence[float]) -> None:
        """Count a row's solved groups in succession; one wrong answer in the group starts the count again at 0."""
        if outcomes:
            all_right = min(outcomes) >= SOLVED
            self.streaks[str(row)] = self.streaks.get(str(row), 0) + 1 if all_right else 0

    def metrics(self) -> dict[str, float]:
        """Return the number of retired rows."""
        return {"retired": sum(map(self._is_retired, range(len(self.rows))))}

    def _is_retired(self, row: int) -> bool:
        return self.streaks.get(str(row), 0) >= self.times


def _solved_share(outcomes: Sequence[float]) -> float:
    """Return the share of right answers in a group that is not empty."""
    return sum(outcome >= SOLVED for outcome in outcomes) / len(outcomes)
