"""The base of datasets: a resumable stream of items made from rows, which are checked when it is opened."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar

from .config import RowsConfig
from .files import Row, Rows, open_rows, open_stream
from .sources import StoredRows, StreamedRows, TaskRows

T = TypeVar("T")
C = TypeVar("C", bound=RowsConfig)
_PROBE = 1000


class RowStream(ABC, Generic[T, C]):
    """An iterator of items made from rows; iteration ends after `epochs`, or never.

    The constructor checks all rows of a local file, and the columns and the first row of other sources. Subclasses
    set SECTION and define `begin`, `validate` and `make`; their constructors end with `check`.

    Args:
        path: a .json, .jsonl or .parquet file, a folder that `datasets` can load, a Hugging Face id, or rows.
        tokenizer: of the policy.
        seed: of the order, and of a task's rows.
        epochs: passes over the data; None is endless. A task takes None only.
        **settings: fields of SECTION.

    Raises:
        ValueError, FileNotFoundError, ImportError: one line; rows count from 1.
    """

    SECTION: type[C]
    NOUN, LIMIT = "row", "max_tokens"  # what an item and its limit are called in messages

    def __init__(
        self,
        path: str | Rows | None = None,
        *,
        tokenizer: Any,
        seed: int = 0,
        epochs: int | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(settings.get("difficulty"), tuple):
            settings["difficulty"] = list(settings["difficulty"])
        self.settings = how = self.SECTION(path=path, **settings)
        if how.sources is not None:
            raise ValueError("several sources are a Mixture: open them with load_data")
        if epochs is not None and (epochs < 1 or how.task is not None):
            raise ValueError(
                f"epochs must be at least 1, got {epochs}" if epochs < 1 else "a task is endless: unset epochs"
            )
        self.tokenizer, self.seed, self._epochs = tokenizer, seed, epochs
        self._limit: int | None = how[self.LIMIT]
        self._too_long: str = how["too_long"]
        self._name = how.task or (path if isinstance(path, str) else "dataset")
        self._source: StoredRows | StreamedRows | TaskRows
        self._identity: dict[str, Any] = {"task": how.task, "split": how.split, "seed": seed, "shuffle": how.shuffle}
        if how.task is not None:
            self._source = TaskRows(how.task, split=how.split, seed=seed, difficulty=how.difficulty)
            self._identity["difficulty"] = how.difficulty
        elif how.streaming and isinstance(path, str):
            self._source = StreamedRows(
                lambda: open_stream(path, split=how.split, subset=how.subset), shuffle=how.shuffle, seed=seed
            )
        else:
            assert path is not None
            rows = open_rows(path, split=how.split, subset=how.subset)
            self._source = StoredRows(rows, shuffle=how.shuffle, seed=seed)
            self._identity["rows"] = len(rows)
        self.served = 0
        self.skipped = 0
        self._reasons: list[str] = []

    def begin(self, row: Row) -> None:
        """Decide by the first stored row; called before `validate` and `make`."""

    @abstractmethod
    def validate(self, row: Row) -> None:
        """Raise ValueError for a malformed row; called for every row, so only cheap checks."""

    @abstractmethod
    def make(self, number: int, row: Row, index: int) -> T | None:
        """Item `index` (from 0) out of row `number`, or None if it is left out (see `leave_out`). ValueError: the row
        is malformed."""

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
        """A list for evaluation, the same at every call: the first n rows of the split in stored order, or n distinct
        questions of a task's test split. ValueError: there are fewer that fit."""
        source = self._source
        rows = source.held_out(n) if isinstance(source, TaskRows) else source.scan()
        found: list[T] = []
        while len(found) < n and (numbered := next(rows, None)) is not None:
            item = self._made(*numbered, index=len(found))
            if item is not None:
                found.append(item)
        if len(found) < n:
            raise ValueError(
                f"{self._name}: {n} samples asked for, but only {len(found)} {self.NOUN}s are there"
                + (f" that are not {' or '.join(self._reasons)}" if self._reasons else "")
            )
        return found

    def rows(self) -> Iterator[Row]:
        """All stored rows in order; of streams and tasks the first 1000."""
        rows = self._source.scan()
        return (row for _, row in (rows if isinstance(self._source, StoredRows) else islice(rows, _PROBE)))

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain JSON."""
        return {
            "identity": self._identity,
            "source": self._source.state(),
            "served": self.served,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state_dict` was called. ValueError: the data or the order differ."""
        for name in {**self._identity, **state["identity"]}:
            was, now = state["identity"].get(name), self._identity.get(name)
            if was != now:
                raise ValueError(f"{self._name}: the saved position does not fit: {name} was {was!r} and is {now!r}")
        self._source.load(state["source"])
        self.served, self.skipped = state["served"], state["skipped"]

    def fits(self, tokens: int) -> bool:
        """Whether an item of so many tokens is kept; ValueError if it is not and `too_long` is "error"."""
        if self._limit is None or tokens <= self._limit:
            return True
        if self._too_long == "error":
            raise ValueError(f"the {self.NOUN} has {tokens} tokens, {self.LIMIT} is {self._limit}")
        self.leave_out(f"longer than {self.LIMIT}={self._limit}")
        return False

    def leave_out(self, reason: str) -> None:
        """Remember why `make` returns None, for messages: items are `reason`, such as "of weight 0"."""
        if reason not in self._reasons:
            self._reasons.append(reason)

    def _made(self, number: int, row: Row, *, index: int) -> T | None:
        try:
            return self.make(number, row, index)
        except ValueError as error:
            raise ValueError(f"{self._name}, row {number}: {error}") from error

    def check(self) -> None:
        """Check the rows: all of a local file, otherwise until one fits, of streams and tasks within the first 1000."""
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
