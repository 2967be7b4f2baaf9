"""Sources of rows with a resumable order.

`read()` returns (row number from 1, row), or None once at the end of every epoch. `state()` returns plain JSON;
`load(state)` on a source with the same settings continues with the same rows. `scan()` iterates over the rows in
stored order, independently of `read()`.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from ..config.plugin import construct, resolve
from ..observability import record_metric
from .files import FileStream, Row, from_columns
from .sampler import make_sampler

if TYPE_CHECKING:
    from datasets import IterableDataset

Numbered = tuple[int, Row]
Position = dict[str, Any]  # plain JSON, for a checkpoint
MAX_DRAWS = 10_000  # draws of a sampler until one of them is a row that can be used


class StoredRows:
    """Rows with random access; (seed, epoch) determines the order of an epoch."""

    def __init__(self, rows: Sequence[Row], *, shuffle: bool, seed: int) -> None:
        self.rows, self._shuffle, self._seed = rows, shuffle, seed
        self.load({"epoch": 0, "position": 0})

    def read(self) -> Numbered | None:
        """Return (number from 1, row) of the next row; None once at the end of each epoch."""
        if self._position == len(self._order):
            self.load({"epoch": self.epoch + 1, "position": 0})
            return None
        # Numbers count from 1, as lines of a file.
        index = self._order[self._position]
        self._position += 1
        return index + 1, self.rows[index]

    def scan(self) -> Iterator[Numbered]:
        """Return an iterator of (number from 1, row) over all rows in stored order."""
        return enumerate(self.rows, 1)

    def state(self) -> Position:
        """Return the epoch and the number of rows read in it, for a checkpoint."""
        return {"epoch": self.epoch, "position": self._position}

    def load(self, state: Position) -> None:
        """Continue at a saved position, in the order that follows from the seed and the epoch."""
        self.epoch = state["epoch"]
        self._position = state["position"]
        self._order: Sequence[int] = range(len(self.rows))
        if self._shuffle:
            self._order = list(self._order)
            Random(f"{self._seed}/{self.epoch}").shuffle(self._order)


class SampledRows(StoredRows):
    """Stored rows in the order that a sampler chooses: one endless epoch."""

    epoch = 0

    def __init__(self, rows: Sequence[Row], sampler: Any, *, seed: int) -> None:
        self.rows = rows
        self.sampler = make_sampler(sampler, rows, seed)
        self._last = 0
        self._drawn: dict[int, int] = {}  # {index of a sample: position of its row}, until its outcome is known
        self._excluded: set[int] = set()

    def read(self) -> Numbered:
        """Return (number from 1, row) of the next row that the sampler draws.

        Raises:
            ValueError: the sampler draws a row that does not exist, or for 10,000 draws only rows that are excluded.
        """
        for _ in range(MAX_DRAWS):
            row = self.sampler.draw()
            if not (isinstance(row, int) and 0 <= row < len(self.rows)):
                raise ValueError(
                    f"dataset.sampler returned row {row!r}, but rows are numbered from 0 to {len(self.rows) - 1}"
                )
            if row not in self._excluded:
                self._last = row
                return row + 1, self.rows[row]
        raise ValueError(
            f"dataset.sampler returned {MAX_DRAWS} excluded rows (such as too long ones) in succession: let it return "
            "other rows"
        )

    def exclude(self) -> None:
        """Exclude the row that was read last from all later draws, since no sample can be made of it."""
        self._excluded.add(self._last)

    def issue(self, index: int) -> None:
        """Record that the row that was read last became the sample with this index, for `observe`."""
        self._drawn[index] = self._last

    def observe(self, outcomes: Mapping[int, Sequence[float]]) -> None:
        """Pass the outcomes of each sample's group of answers on to the sampler, and record its metrics.

        Args:
            outcomes: {index of a sample: outcomes}; a sample that was not issued, or is known already, is ignored.
        """
        # In the order of the draws, whatever order the groups arrived in, so that a run can be repeated.
        for index in sorted(outcomes):
            if (row := self._drawn.pop(index, None)) is not None:
                self.sampler.observe(row, outcomes[index])
        for name, value in getattr(self.sampler, "metrics", dict)().items():
            record_metric(f"sampler/{name}", value)

    def state(self) -> Position:
        """Return the state of the sampler, and the row of each sample whose outcome it does not know yet."""
        drawn = {str(index): row for index, row in self._drawn.items()}
        # A copy by JSON: the sampler continues to draw while a checkpoint is written, and what is not JSON fails here
        # instead of at resume.
        return {"sampler": json.loads(json.dumps(self.sampler.state_dict())), "drawn": drawn}

    def load(self, state: Position) -> None:
        """Continue from a state that `state` returned."""
        self.sampler.load_state_dict(state["sampler"])
        self._drawn = {int(index): row for index, row in state["drawn"].items()}


class StreamedRows:
    """Rows of an iterable dataset, shuffled within blocks of `block` rows.

    Blocks rather than the usual shuffle buffer: its content is not part of the dataset's state, while a block can be
    read again from the state at its start.
    """

    def __init__(
        self, open_dataset: "Callable[[], IterableDataset | FileStream]", *, shuffle: bool, seed: int, block: int = 1000
    ) -> None:
        self._open_dataset, self._size = open_dataset, block
        self._shuffle, self._seed = shuffle, seed
        self._open_epoch(0, 0, None)

    def _open_epoch(self, epoch: int, number: int, start: Position | None) -> None:
        """Open the stream at block `number` of an epoch; `start` is the state of the dataset there, None at its
        beginning."""
        self.epoch = epoch
        self._number = number

        # With the state at the block's start, the rows before it are not read again.
        self._stream = self._open_dataset()
        if start is not None:
            self._stream.load_state_dict(start)
        self._rows = _iterate_rows(self._stream)
        self._start = start
        self._block = self._fill_window()
        self._offset = 0

    def _fill_window(self) -> list[Numbered]:
        first_number = self._number * self._size + 1
        block = list(enumerate(itertools.islice(self._rows, self._size), first_number))
        # The order follows only from the seed, the epoch and the block.
        if self._shuffle:
            Random(f"{self._seed}/{self.epoch}/{self._number}").shuffle(block)
        return block

    def read(self) -> Numbered | None:
        """Return (number from 1, row) of the next row; None once at the end of each epoch."""
        if self._offset == len(self._block):
            self._start = self._stream.state_dict()
            self._number += 1
            self._block = self._fill_window()
            self._offset = 0
            if not self._block:
                self._open_epoch(self.epoch + 1, 0, None)
                return None
        self._offset += 1
        return self._block[self._offset - 1]

    def scan(self) -> Iterator[Numbered]:
        """Return an iterator of (number from 1, row) over all rows in stored order."""
        return enumerate(_iterate_rows(self._open_dataset()), 1)

    def state(self) -> Position:
        """Return the position, for a checkpoint: the epoch, the block with the dataset's state at its start, and the
        number of rows read in the block."""
        return {"epoch": self.epoch, "block": self._number, "start": self._start, "offset": self._offset}

    def load(self, state: Position) -> None:
        """Continue at a saved position, without reading the rows before its block."""
        self._open_epoch(state["epoch"], state["block"], state["start"])
        self._offset = state["offset"]


def _iterate_rows(stream: "IterableDataset | FileStream") -> Iterator[Row]:
    if isinstance(stream, FileStream):
        return iter(stream)
    return (from_columns(row, getattr(stream, "features", None)) for row in stream)


class Task(Protocol):
    """A procedural task: an endless, seeded source of rows. A configuration names its class as `package.module:Name`.

    Rows are mappings or named tuples with `question` and `answer`. `row` is a pure function of its arguments; the
    questions of the splits "train" and "test" are disjoint under every seed.
    """

    name: str  # part of a saved position

    def row(self, index: int, *, split: str, seed: int, difficulty: int | Sequence[int]) -> Any:
        """Return row `index`, counted from 0. ValueError: the split is unknown, or the difficulty invalid."""

    def take(self, n: int, *, split: str = "test", seed: int, difficulty: int | Sequence[int]) -> list[Any]:
        """Return `n` rows with distinct questions, for evaluation. ValueError: the split has fewer."""

    def wrong(self, answer: str, rng: Random) -> str:
        """Return a plausible wrong answer, for preference pairs."""


def load_task(name: str) -> Task:
    """Return the task that `name` (`package.module:Name`) names, constructed if it is a class. ValueError: it does not
    exist, or lacks a method of `Task`."""
    plugin = resolve(name, "task")
    if missing := [method for method in ("name", "row", "take") if not hasattr(plugin, method)]:
        raise ValueError(f"task {name!r} has no {', '.join(missing)}: implement forge.data.sources.Task")
    return construct(plugin, {}, f"task {name}") if isinstance(plugin, type) else plugin


class TaskRows:
    """The rows of a procedural task, as dicts with `question` and `answer`: one endless epoch."""

    epoch = 0

    def __init__(self, task: str, *, split: str, seed: int, difficulty: int | Sequence[int]) -> None:
        self.task = load_task(task)
        self.seed, self.difficulty, self._split = seed, difficulty, split
        self._index = 0
        self._make_row(0)  # an invalid split or difficulty is an error here

    def _make_row(self, index: int) -> Numbered:
        row = self.task.row(index, split=self._split, seed=self.seed, difficulty=self.difficulty)
        return index + 1, _as_dict(row)

    def read(self) -> Numbered | None:
        """Return (number from 1, row) of the next row."""
        self._index += 1
        return self._make_row(self._index - 1)

    def scan(self) -> Iterator[Numbered]:
        """Return an endless iterator of all rows in order, with their numbers from 1."""
        return map(self._make_row, itertools.count())

    def held_out(self, n: int) -> Iterator[Numbered]:
        """Return an iterator of `n` rows of the test split with distinct questions, numbered from 1."""
        return enumerate(map(_as_dict, self.task.take(n, seed=self.seed, difficulty=self.difficulty)), 1)

    def state(self) -> Position:
        """Return the index of the next row, for a checkpoint."""
        return {"index": self._index}

    def load(self, state: Position) -> None:
        """Continue at a saved row index."""
        self._index = state["index"]


def _as_dict(row: Any) -> Row:
    return dict(row) if isinstance(row, Mapping) else row._asdict()
