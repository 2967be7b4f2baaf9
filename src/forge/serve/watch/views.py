"""What the page shows of a run's folder, read as the files grow. Whatever the files contain is data: a damaged line or
message is left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...observability.alerts import alerts
from ...observability.folder import MARK
from ...observability.held_out import HELD_OUT, Answers
from ...observability.lines import Lines, numbers
from ...observability.rollouts import ROLLOUTS, TEXT, batches
from ...observability.runs import settings
from ...observability.summaries import summary
from ...observability.trace import TRACE
from ...system.files import is_plain

if TYPE_CHECKING:
    import pyarrow

# Of the index that is held in memory.
INDEX = ("step", "group", "sample", "branch", "reward", "advantage", "version", "length", "finish", "dropped")
NUMBERS = ("step", "group", "reward", "advantage", "version", "length")  # that can be filtered by a range
PAGE, BINS, PREVIEW = 50, 20, 160
MOST_NAMES, MOST_CELLS = 5000, 20_000_000  # metrics of a run, and values that are sent at once
MOST_ROWS, WIDEST, MOST_REASONS = 1 << 24, 1 << 10, 100  # rollouts, bytes of one in the index, reasons in a list
SEARCHES, CACHED = 8, 8  # results of searches, and batches, that are kept


class RunView:
    """One run. `version` changes when a resumed run has removed rows: what was sent before is then out of date."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.version = folder, 0
        self.refresh()

    def refresh(self) -> None:
        """Read what was added since the last call."""
        mark = self.folder / MARK
        found = mark.lstat().st_ino if is_plain(mark) else 0
        if found != self.version or not hasattr(self, "rows"):  # a resumed run replaces the file
            self.version = found
            self._metrics, self._trace = Lines(mark), Lines(self.folder / TRACE)
            self.rows: list[dict[str, float]] = []
            self._names: set[str] = set()
            self.events: list[dict[str, Any]] = []
            self._answers = Answers(self.folder / HELD_OUT)
            self._table: pyarrow.Table | None = None
            self._ends: list[int] = [0]  # of the batches in the file
            self._firsts: list[int] = [0]  # number of the first row of each batch
            self._searched: dict[tuple[str, int], np.ndarray] = {}
            self._read: dict[int, pyarrow.RecordBatch] = {}
        for row in map(numbers, self._metrics.read()):
            if "step" in row:
                self._names |= row.keys()
                if len(self._names) > MOST_NAMES:
                    raise ValueError(f"{mark} has more than {MOST_NAMES} metrics")
                self.rows.append(row)
        self.events += self._trace.read()
        self._answers.refresh()
        self._index()
        self.behind = self._metrics.behind or self._trace.behind or self._answers.behind

    def _index(self) -> None:
        import pyarrow as pa

        path = self.folder / ROLLOUTS
        found = []
        for end, batch in batches(path, INDEX, self._ends[-1]):
            if self._firsts[-1] + len(batch) > MOST_ROWS:
                raise ValueError(f"{path} has more than {MOST_ROWS} rows")
            columns = [checked(batch[name]) for name in INDEX]
            if sum(array.nbytes for array in columns) > WIDEST * (len(batch) + 1):
                raise ValueError(f"{path} is damaged: finish or dropped are long texts")
            found.append(pa.RecordBatch.from_arrays(columns, list(INDEX)))
            self._ends.append(end)
            self._firsts.append(self._firsts[-1] + len(batch))
        if found:
            before = [] if self._table is None else [self._table]
            self._table = pa.concat_tables([*before, pa.Table.from_batches(found)]).combine_chunks()

    def summary(self) -> dict[str, Any]:
        """Of the list of runs."""
        return summary(self.folder)

    def settings(self) -> dict[str, Any]:
        """Plain values by dotted key; empty if config.yaml is damaged."""
        try:
            return {key: plain(value) for key, value in settings(self.folder).items()}
        except (ValueError, OSError):
            return {}

    def read_all(self) -> None:
        """Read what one call of `refresh` leaves for the next."""
        while self.behind:
            self.refresh()

    def about(self) -> dict[str, Any]:
        """Settings and alerts."""
        known = self.settings()
        found = alerts(self.rows, known)
        return {"settings": known, "alerts": [alert._asdict() for alert in found], **self.summary()}

    def curves(self, after: int = 0, most: int | None = None) -> dict[str, Any]:
        """Metrics by name, a value or null for each row from `after` on; of more than `most` rows every so many."""
        rows = self.rows[after:]
        rows = rows[:: max(1, math.ceil(len(rows) / most))] if most else rows
        names = sorted({name for row in rows for name in row})
        if len(names) * len(rows) > MOST_CELLS:
            raise ValueError(f"{len(rows)} rows of {len(names)} metrics are more than a page can show")
        columns = {name: [short(row[name]) if name in row else None for row in rows] for name in names}
        return {"version": self.version, "rows": len(self.rows), "columns": columns}

    def lanes(self, after: int = 0, most: int = 200_000) -> dict[str, Any]:
        """Events of the trace from number `after` on, the last `most` of them; names of processes always."""
        events = self.events[after:]
        names = [e for e in self.events if e.get("ph") == "M"] if len(events) > most else []
        return {"version": self.version, "events": len(self.events), "found": plain([*names, *events[-most:]])}

    def rollouts(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of the rows that fit, and the distribution of their rewards.

        Args:
            query: `<name>_min` and `<name>_max` of `NUMBERS`; `reason`: "trained", "dropped" or a reason; `text`, which
                prompt, response or target contain; `sort` and `down`; `page` from 0.

        Raises:
            ValueError: a value is not a number, or an unknown column.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        table = self._table
        if table is None:
            return {"total": 0, "all": 0, "rows": [], "histogram": None, "reasons": []}
        keep = np.ones(len(table), np.bool_)
        numbers = {name: table[name].to_numpy() for name in NUMBERS}
        for name, values in numbers.items():
            for bound, holds in (("min", np.greater_equal), ("max", np.less_equal)):
                if given := query.get(f"{name}_{bound}"):
                    keep &= holds(values, float(given))
        reasons = [plain(cell) for cell in pc.unique(table["dropped"].combine_chunks()).to_pylist()]
        reason = query.get("reason", "")
        if reason == "trained":
            keep &= pc.is_null(table["dropped"]).to_numpy()
        elif reason == "dropped":
            keep &= pc.is_valid(table["dropped"]).to_numpy()
        elif reason:
            keep &= pc.fill_null(pc.equal(table["dropped"], reason.encode()), False).to_numpy()
        if text := query.get("text"):
            keep &= self._search(text)
        at = np.flatnonzero(keep)
        sort = query.get("sort") or "step"
        if sort not in NUMBERS:
            raise ValueError(f"sort must be one of {', '.join(NUMBERS)}, got {sort!r}")
        down = query.get("down") == "1"
        values = numbers[sort][at].astype(float)
        order = np.argsort(np.where(np.isnan(values), -np.inf, -values if down else values), kind="stable")
        page = at[order][PAGE * int(query.get("page") or 0) :][:PAGE]
        rewards = numbers["reward"][at]
        histogram = None
        if len(rewards := rewards[np.isfinite(rewards)]):
            counts, edges = np.histogram(rewards, BINS)
            histogram = {"counts": counts.tolist(), "edges": edges.tolist()}
        index = table.take(pa.array(page)).to_pylist() if len(page) else []
        rows = [{"row": int(number), **plain(line)} for number, line in zip(page, index, strict=True)]
        for row in rows:
            batch, inside = self._at(row["row"])
            row |= {name: clip(value(batch[name], inside)) for name in TEXT}
        return {
            **{"total": len(at), "all": len(table), "rows": rows, "histogram": histogram},
            "reasons": sorted(reason for reason in reasons if reason)[:MOST_REASONS],
        }

    def held_out(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of answers to held-out problems, see `Answers.page`."""
        return plain(self._answers.page(query))

    def rollout(self, row: int) -> dict[str, Any]:
        """All fields. IndexError: there is no such row."""
        if not 0 <= row < self._firsts[-1]:
            raise IndexError(f"there are {self._firsts[-1]} rollouts, and this is number {row}")
        batch, inside = self._at(row)
        return {"row": row, **{name: value(batch[name], inside) for name in batch.schema.names}}

    def group(self, row: int) -> list[dict[str, Any]]:
        """The rollouts of the same prompt and step, this one among them."""
        this = self.rollout(row)
        assert self._table is not None
        same = (self._table["step"].to_numpy() == this["step"]) & (self._table["group"].to_numpy() == this["group"])
        return [self.rollout(int(number)) for number in np.flatnonzero(same)]

    def _at(self, row: int) -> tuple[pyarrow.RecordBatch, int]:
        """The batch that has a row, and its place there."""
        number = int(np.searchsorted(self._firsts, row, side="right")) - 1
        if number not in self._read:
            while len(self._read) >= CACHED:
                self._read.pop(next(iter(self._read)))
            found = next(batches(self.folder / ROLLOUTS, after=self._ends[number]), None)
            if found is None:
                raise ValueError(f"{self.folder / ROLLOUTS} was changed or is damaged")
            self._read[number] = found[1]
        return self._read[number], row - self._firsts[number]

    def _search(self, text: str) -> np.ndarray:
        """Which rows contain a text, without regard to case."""
        import pyarrow.compute as pc

        key = text.lower(), len(self._ends)
        if key not in self._searched:
            parts = []
            for _, batch in batches(self.folder / ROLLOUTS, TEXT):
                hits = [
                    pc.fill_null(pc.match_substring(checked(batch[name]), key[0].encode(), ignore_case=True), False)
                    for name in TEXT
                ]
                parts.append(np.logical_or.reduce([hit.to_numpy(zero_copy_only=False) for hit in hits]))
            while len(self._searched) >= SEARCHES:
                self._searched.pop(next(iter(self._searched)))
            assert self._table is not None
            self._searched[key] = np.concatenate(parts)[: len(self._table)]
        return self._searched[key]


def checked(array: pyarrow.Array) -> pyarrow.Array:
    """An array whose offsets are valid, with text as bytes: a file of others may hold anything.

    Raises:
        ValueError: it is damaged.
    """
    import pyarrow as pa

    if pa.types.is_string(array.type):
        array = array.view(pa.binary())
    elif pa.types.is_list(array.type) and pa.types.is_string(array.type.value_type):
        array = array.view(pa.list_(pa.binary()))
    array.validate(full=True)
    return array


def value(array: pyarrow.Array, at: int) -> Any:
    """A cell as JSON has it."""
    return plain(checked(array.slice(at, 1))[0].as_py())


def plain(value: Any) -> Any:
    """As JSON has it: no NaN, and text for what JSON lacks."""
    if isinstance(value, float):
        return short(value) if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, dict):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, int) and value.bit_length() > 64:  # digits of longer ones would take long
        return f"{value:#x}"[:PREVIEW]
    return value if isinstance(value, int | str | None) else str(value)


def short(number: float) -> float:
    """Seven significant digits, as the page needs no more."""
    return float(f"{number:.7g}")


def clip(text: str | None) -> str:
    """The beginning of a text."""
    return (text or "")[:PREVIEW]
