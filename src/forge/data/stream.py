"""Rows as a stream of items: opened and checked at once, read in an order that can be taken up at every position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

from forge.data.files import Row, Rows, open_rows, open_stream
from forge.data.sources import Source, StoredRows, StreamedRows, TaskRows

T = TypeVar("T")
_PROBE = 1000


class RowStream(ABC, Generic[T]):
    """An iterator of items made from rows; iteration ends after `epochs`, or never.

    Every problem that can be known is raised by the constructor, as a ValueError, FileNotFoundError or ImportError
    of one line: all rows of a local file are checked, the columns and the first row of everything else. Rows count
    from 1. What makes an item of a row is said by `begin`, `validate` and `make`.

    Args:
        path: a .json, .jsonl or .parquet file, a folder that `datasets` can load, or a Hugging Face id.
        limit: most tokens of an item.
        too_long: "skip" leaves longer items out; "error" raises. All that is left out is counted in `skipped`.
        task: a procedural task as `package.module:Name` (see `forge.data.sources.Task`) instead of a path.
        difficulty: of the procedural task: an int, or a pair (low, high).
        split: of a folder, hub id or task; a single file is one split whatever this says.
        subset: the configuration of a hub dataset that has several.
        streaming: read rows as they are needed; shuffling then happens within blocks of 1000 rows.
        shuffle: a new order every epoch, by (seed, epoch). Procedural tasks are random in any case.
        epochs: passes over the data; None is endless. A task takes None only.
    """

    NOUN, LIMIT = "row", "max_tokens"  # what an item and its limit are called in messages
    TOO_LONG: tuple[str, ...] = ("skip", "error")

    def __init__(
        self,
        path: str | Rows | None = None,
        *,
        limit: int | None,
        too_long: str,
        task: str | None = None,
        difficulty: int | Sequence[int] = 5,
        split: str = "train",
        subset: str | None = None,
        streaming: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
    ) -> None:
        if (path is None) == (task is None):
            raise ValueError("a dataset needs either a path or a task")
        if epochs is not None and (epochs < 1 or task is not None):
            raise ValueError(
                f"epochs must be at least 1, got {epochs}" if epochs < 1 else "a task is endless: unset epochs"
            )
        if limit is not None and limit < 1:
            raise ValueError(f"{self.LIMIT} must be at least 1, got {limit}")
        if too_long not in self.TOO_LONG:
            *most, last = map(repr, self.TOO_LONG)
            raise ValueError(f"too_long must be {', '.join(most)} or {last}, not {too_long!r}")
        self._limit, self._too_long, self._epochs = limit, too_long, epochs
        self._name = task or (path if isinstance(path, str) else "dataset")
        self._source: Source
        if task is not None:
            self._source = TaskRows(task, split=split, seed=seed, difficulty=difficulty)
        elif streaming and isinstance(path, str):
            self._source = StreamedRows(
                lambda: open_stream(path, split=split, subset=subset), shuffle=shuffle, seed=seed
            )
        else:
            assert path is not None
            self._source = StoredRows(open_rows(path, split=split, subset=subset), shuffle=shuffle, seed=seed)
        self._identity: dict[str, Any] = {"task": task, "split": split, "seed": seed, "shuffle": shuffle}
        if task is not None:
            self._identity["difficulty"] = difficulty if isinstance(difficulty, int) else list(difficulty)
        if isinstance(self._source, StoredRows):
            self._identity["rows"] = len(self._source.rows)
        self.served = 0
        self.skipped = 0
        self._reasons: list[str] = []
        self._check()

    def begin(self, row: Row) -> None:
        """Look at the first stored row, before anything else is asked."""

    @abstractmethod
    def validate(self, row: Row) -> None:
        """Check what is cheap to check of every row. ValueError says what is wrong with it."""

    @abstractmethod
    def make(self, number: int, row: Row, index: int) -> T | None:
        """The item of row `number`, or None if it is left out (see `leave_out`); ValueError as `validate`.

        Args:
            index: how many items came before it.
        """

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._source.epoch

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while self._epochs is None or self.epoch < self._epochs:
            numbered = self._source.read()
            if numbered is None:
                continue
            item = self._made(*numbered, index=self.served)
            if item is not None:
                self.served += 1
                return item
            self.skipped += 1
        raise StopIteration

    def held_out(self, n: int) -> list[T]:
        """A fixed list for evaluation, whatever has been drawn: the same at every call.

        The first n rows of the split in stored order; of a procedural task n distinct questions of its test split.
        ValueError if there are no n that fit.
        """
        if isinstance(self._source, TaskRows):
            rows: Iterator[tuple[int, Row]] = self._source.held_out(n)
        else:
            rows = self._source.scan()
        found: list[T] = []
        for number, row in rows:
            if len(found) == n:
                break
            item = self._made(number, row, index=len(found))
            if item is not None:
                found.append(item)
        if len(found) < n:
            raise ValueError(
                f"{self._name}: {n} samples asked for, but only {len(found)} {self.NOUN}s are there"
                + (f" that are not {' or '.join(self._reasons)}" if self._reasons else "")
            )
        return found

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain JSON."""
        return {
            "identity": self._identity,
            "source": self._source.state(),
            "served": self.served,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was called. ValueError if that was over other data or another order."""
        for name in {**self._identity, **state["identity"]}:
            was, now = state["identity"].get(name), self._identity.get(name)
            if was != now:
                raise ValueError(f"{self._name}: the saved position does not fit: {name} was {was!r} and is {now!r}")
        self._source.load(state["source"])
        self.served, self.skipped = state["served"], state["skipped"]

    def fits(self, tokens: int) -> bool:
        """Whether an item of so many tokens is handed out; ValueError if it is not and that is an error."""
        if self._limit is None or tokens <= self._limit:
            return True
        if self._too_long == "error":
            raise ValueError(f"the {self.NOUN} has {tokens} tokens, {self.LIMIT} is {self._limit}")
        self.leave_out(f"longer than {self.LIMIT}={self._limit}")
        return False

    def leave_out(self, reason: str) -> None:
        """Remember why `make` gives None, for messages: items are `reason`, as in "of weight 0"."""
        if reason not in self._reasons:
            self._reasons.append(reason)

    def _made(self, number: int, row: Row, *, index: int) -> T | None:
        try:
            return self.make(number, row, index)
        except ValueError as error:
            raise ValueError(f"{self._name}, row {number}: {error}") from error

    def _check(self) -> None:
        for _, row in islice(self._source.scan(), 1):
            self.begin(row)
        stored = self._source.rows if isinstance(self._source, StoredRows) else None
        if isinstance(stored, list):
            for number, row in enumerate(stored, 1):
                try:
                    self.validate(row)
                except ValueError as error:
                    raise ValueError(f"{self._name}, row {number}: {error}") from error
        rows = self._source.scan() if stored is not None else islice(self._source.scan(), _PROBE)
        checked, fits = 0, False
        for number, row in rows:
            checked += 1
            fits |= self._made(number, row, index=0) is not None
            if fits and (stored is None or self._limit is None or self._too_long != "error"):
                break
        if not checked:
            raise ValueError(f"{self._name} is empty: it has no rows")
        if not fits:
            raise ValueError(f"{self._name}: all of {checked} {self.NOUN}s are {' or '.join(self._reasons)}")
