"""Views of a run's folder for the page, read as its files grow. All contents are data: a damaged line or message is
skipped."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge.observability.folder import MARK
from forge.observability.lines import Lines, Row, finite_numbers
from forge.observability.rollouts import HELD_OUT, ROLLOUTS, TEXT, read_batches
from forge.observability.trace import TRACE
from forge_inspect.account import account_text, token_account
from forge_inspect.alerts import folder_alerts, list_alerts
from forge_inspect.runs import read_settings, summarise_run

if TYPE_CHECKING:
    import pyarrow

# Columns of the index that is kept in memory.
INDEX = ("step", "group", "sample", "branch", "reward", "advantage", "version", "length", "finish", "dropped", "policy")
NUMBERS = ("step", "group", "reward", "advantage", "version", "length")  # that can be filtered by a range
PAGE = 50  # rollouts of a page
BINS = 20  # of a histogram
PREVIEW = 160  # characters of a text in a list
MAX_BATCHES = 8  # batches that are kept

Fields = dict[str, Any]  # an object of JSON


class RunView:
    """One run. `version` changes when a resumed run has removed rows: clients must then discard what they have."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = 0
        self.refresh()

    def refresh(self) -> None:
        """Read the data that was added since the last call."""
        mark = self.folder / MARK
        version = mark.stat().st_ino if mark.is_file() else 0
        if version != self.version or not hasattr(self, "rows"):  # a resumed run replaces the file
            self.version = version
            self._metrics = Lines(mark)
            self._trace = Lines(self.folder / TRACE)
            self.rows: list[dict[str, float]] = []
            self.events: list[Fields] = []
            self.answers = Answers(self.folder / HELD_OUT)
            self._table: pyarrow.Table | None = None
            self._ends: list[int] = [0]  # of the batches in the file
            self._firsts: list[int] = [0]  # number of the first row of each batch
            self._read: dict[int, pyarrow.RecordBatch] = {}

        for row in map(finite_numbers, self._metrics.read()):
            if "step" in row:
                self.rows.append(row)
        self.events += self._trace.read()
        self.answers.refresh()
        self._index_batches()

    def _index_batches(self) -> None:
        import pyarrow as pa

        path = self.folder / ROLLOUTS
        parts = []
        for end, batch in read_batches(path, INDEX, self._ends[-1]):
            parts.append(pa.RecordBatch.from_arrays([check_array(batch[name]) for name in INDEX], list(INDEX)))
            self._ends.append(end)
            self._firsts.append(self._firsts[-1] + len(batch))
        # One table without chunks: a filter of 100,000 rows takes milliseconds.
        if parts:
            before = [] if self._table is None else [self._table]
            self._table = pa.concat_tables([*before, pa.Table.from_batches(parts)]).combine_chunks()

    def about(self) -> Fields:
        """Return settings, alerts, and the account of tokens of a run with agents."""
        try:
            own_settings = {key: to_json_value(value) for key, value in read_settings(self.folder).items()}
        except (ValueError, OSError):  # config.yaml is damaged
            own_settings = {}
        return {
            "settings": own_settings,
            "alerts": [
                alert._asdict() for alert in (*folder_alerts(self.folder), *list_alerts(self.rows, own_settings))
            ],
            "account": account_text(token_account(self.rows)),
            **summarise_run(self.folder),
        }

    def curves(self, after: int = 0, max_rows: int | None = None) -> Fields:
        """Return metrics by name, a value or null for each row from `after` on; above `max_rows` a part of the rows."""
        rows = self.rows[after:]
        rows = rows[:: max(1, math.ceil(len(rows) / max_rows))] if max_rows else rows
        names = sorted({name for row in rows for name in row})
        columns = {name: [round_number(row[name]) if name in row else None for row in rows] for name in names}
        return {"version": self.version, "rows": len(self.rows), "columns": columns}

    def lanes(self, after: int = 0, max_events: int = 200_000) -> Fields:
        """Return events of the trace from number `after` on, the last `max_events`; names of processes always."""
        events = self.events[after:]
        names = [e for e in self.events if e.get("ph") == "M"] if len(events) > max_events else []
        return {
            "version": self.version,
            "events": len(self.events),
            "found": to_json_value([*names, *events[-max_events:]]),
        }

    def rollouts(self, query: Mapping[str, str]) -> Fields:
        """Return a page of the selected rows, and the distribution of their rewards.

        Args:
            query: `<name>_min` and `<name>_max` of `NUMBERS`; `reason`: "trained", "dropped" or a reason; `text` that
                prompt, response or target contain; `sort` and `down`; `page` from 0.

        Raises:
            ValueError: a value is not a number, or an unknown column.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        table = self._table
        if table is None:
            return {"total": 0, "all": 0, "rows": [], "histogram": None, "reasons": []}

        # A mask of the rows that pass every filter.
        keep = np.ones(len(table), np.bool_)
        numbers = {name: table[name].to_numpy() for name in NUMBERS}
        for name, values in numbers.items():
            for bound, holds in (("min", np.greater_equal), ("max", np.less_equal)):
                limit = query.get(f"{name}_{bound}")
                if limit:
                    keep &= holds(values, float(limit))

        # Reasons are shown as choices, so all rows count, not only the selected ones.
        reasons = [to_json_value(cell) for cell in pc.unique(table["dropped"].combine_chunks()).to_pylist()]
        reason = query.get("reason", "")
        if reason == "trained":
            keep &= pc.is_null(table["dropped"]).to_numpy()
        elif reason == "dropped":
            keep &= pc.is_valid(table["dropped"]).to_numpy()
        elif reason:
            keep &= pc.fill_null(pc.equal(table["dropped"], reason.encode()), False).to_numpy()

        text = query.get("text")
        if text:
            keep &= self._search_text(text)
        selected = np.flatnonzero(keep)
        sort = query.get("sort") or "step"
        if sort not in NUMBERS:
            raise ValueError(f"sort must be one of {', '.join(NUMBERS)}, got {sort!r}")
        down = query.get("down") == "1"

        # Unknown values come last in both directions.
        values = numbers[sort][selected].astype(float)
        order = np.argsort(np.where(np.isnan(values), -np.inf, -values if down else values), kind="stable")
        page = selected[order][PAGE * int(query.get("page") or 0) :][:PAGE]
        rewards = numbers["reward"][selected]
        rewards = rewards[np.isfinite(rewards)]
        histogram = None
        if len(rewards):
            counts, edges = np.histogram(rewards, BINS)
            histogram = {"counts": counts.tolist(), "edges": edges.tolist()}

        # Only a page of texts is read from the file: the table has the numbers only.
        index = table.take(pa.array(page)).to_pylist() if len(page) else []
        rows = [{"row": int(number), **to_json_value(line)} for number, line in zip(page, index, strict=True)]
        for row in rows:
            batch, offset = self._locate_row(row["row"])
            row |= {name: (convert_cell(batch[name], offset) or "")[:PREVIEW] for name in TEXT}
            # The text of the policy's own tokens, special ones included; empty where a letter is spread over tokens.
            pieces = zip(convert_cell(batch["texts"], offset), convert_cell(batch["mask"], offset), strict=False)
            written = "".join(piece for piece, own in pieces if own)
            row["written"] = "" if "\ufffd" in written else written[:PREVIEW]

        return {
            **{"total": len(selected), "all": len(table), "rows": rows, "histogram": histogram},
            "reasons": sorted(reason for reason in reasons if reason),
        }

    def rollout(self, row: int) -> Fields:
        """Return all fields of a rollout. IndexError: there is no such row."""
        if not 0 <= row < self._firsts[-1]:
            raise IndexError(f"there are {self._firsts[-1]} rollouts, and this is number {row}")
        batch, offset = self._locate_row(row)
        return {"row": row, **{name: convert_cell(batch[name], offset) for name in batch.schema.names}}

    def group(self, row: int) -> list[Fields]:
        """Return the rollouts of the same prompt and step, this one among them."""
        rollout = self.rollout(row)
        assert self._table is not None
        same_step = self._table["step"].to_numpy() == rollout["step"]
        same_prompt = self._table["group"].to_numpy() == rollout["group"]
        return [self.rollout(int(number)) for number in np.flatnonzero(same_step & same_prompt)]

    def _locate_row(self, row: int) -> tuple[pyarrow.RecordBatch, int]:
        """Return the batch of a row, and the row's offset in it."""
        number = int(np.searchsorted(self._firsts, row, side="right")) - 1
        if number not in self._read:
            if len(self._read) >= MAX_BATCHES:
                self._read.clear()
            entry = next(read_batches(self.folder / ROLLOUTS, after=self._ends[number]), None)
            if entry is None:
                raise ValueError(f"{self.folder / ROLLOUTS} was changed or is damaged")
            self._read[number] = entry[1]
        return self._read[number], row - self._firsts[number]

    def _search_text(self, text: str) -> np.ndarray:
        """Return which rows contain a text, ignoring case."""
        import pyarrow.compute as pc

        assert self._table is not None
        parts = []
        for _, batch in read_batches(self.folder / ROLLOUTS, TEXT):
            columns = [check_array(batch[name]) for name in TEXT]
            hits = [pc.match_substring(column, text.encode(), ignore_case=True) for column in columns]
            found = [pc.fill_null(hit, False).to_numpy(zero_copy_only=False) for hit in hits]
            parts.append(np.logical_or.reduce(found))
        return np.concatenate(parts)[: len(self._table)]


def check_array(array: pyarrow.Array) -> pyarrow.Array:
    """Check that the offsets of an array are valid; return it with text as bytes, which may not be valid UTF-8.

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


def convert_cell(array: pyarrow.Array, index: int) -> Any:
    """Convert a cell to JSON."""
    return to_json_value(check_array(array.slice(index, 1))[0].as_py())


def to_json_value(value: Any) -> Any:
    """Convert a value to JSON: NaN to null, and other types to text.

    >>> to_json_value(float("nan")) is None
    True
    """
    if isinstance(value, float):
        return round_number(value) if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, dict):
        return {to_json_value(str(key)): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return value if isinstance(value, int | str | None) else str(value)


def round_number(number: float) -> float:
    """Round to seven significant digits, as the page needs no more.

    >>> round_number(0.123456789)
    0.1234568
    """
    return float(f"{number:.7g}")


MAX_TEXT = 4000  # characters of a text on a page
VERDICTS = {"right": True, "wrong": False, "unknown": None}


class Answers:
    """The answers of a growing file, by set and step. Damaged lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)
        self._rows: dict[str, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))

    def refresh(self) -> None:
        """Read the answers that were appended since the last call."""
        for row in self._lines.read():
            if all(isinstance(row.get(key), int) for key in ("step", "problem")):
                clipped = {key: cell[:MAX_TEXT] if isinstance(cell, str) else cell for key, cell in row.items()}
                self._rows[str(row.get("set", ""))][row["step"]].append(clipped)

    def page(self, query: Mapping[str, str]) -> Row:
        """Return a page of the answers of one evaluation.

        Args:
            query: `set`, by default the first one; `step`, by default the last of the set; `verdict`: "right", "wrong"
                or "unknown"; `page` from 0.

        Returns:
            `sets`, `set`, `steps`, `step`, `total` of the selected answers, `all`, and `rows`, each with `before`:
            whether the answer to this problem was right in the first evaluation.
        """
        if not self._rows:
            return {"sets": [], "set": "", "steps": [], "step": None, "total": 0, "all": 0, "rows": []}

        # What does not exist is ignored: an old address of the page still shows something.
        sets = sorted(self._rows)
        name = query["set"] if query.get("set") in sets else sets[0]
        steps = sorted(self._rows[name])
        step = int(query.get("step") or steps[-1])
        rows = self._rows[name][step] if step in steps else []
        selected = rows
        if query.get("verdict") in VERDICTS:
            selected = [row for row in rows if row.get("correct") is VERDICTS[query["verdict"]]]

        # The first evaluation shows what training has changed.
        before = {row["problem"]: row.get("correct") for row in self._rows[name][steps[0]]}
        page = selected[PAGE * int(query.get("page") or 0) :][:PAGE]
        found = [{**row, "before": before.get(row["problem"])} for row in page]
        numbers = {"total": len(selected), "all": len(rows)}

        return {"sets": sets, "set": name, "steps": steps, "step": step, **numbers, "rows": found}
