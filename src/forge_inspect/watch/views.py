"""Views of a run's folder for the page, read as its files grow.

The contents of the files are not trusted: a damaged line or batch is skipped.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forge.observability.folder import MARK
from forge.observability.lines import Lines, Row, finite_numbers
from forge.observability.rollouts import HELD_OUT, ROLLOUTS, TEXT, read_batches
from forge.observability.trace import TRACE
from forge_inspect.account import account_text, token_account
from forge_inspect.alerts import folder_alerts, list_alerts
from forge_inspect.reference import find_reference
from forge_inspect.runs import read_settings, summarise_run

# Columns of the index that is kept in memory.
INDEX = ("step", "group", "sample", "branch", "reward", "advantage", "version", "length", "finish", "dropped", "policy")
NUMBERS = ("step", "group", "reward", "advantage", "version", "length")  # columns that can be filtered by a range
PAGE = 50  # rollouts of a page
BINS = 20  # of a histogram
PREVIEW = 160  # characters of a text in a list
MAX_BATCHES = 8  # batches of rollouts that are kept in memory

Fields = dict[str, Any]  # an object of JSON


class RunView:
    """View of one run's data for the page of `forge watch`.

    Attributes:
        version: changes when a resumed run has removed rows: clients must then discard the rows that they have.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.version = folder, 0
        self.refresh()

    def refresh(self) -> None:
        """Read the data that was added since the last call."""
        mark = self.folder / MARK
        version = mark.stat().st_ino if mark.is_file() else 0
        if version != self.version or not hasattr(self, "rows"):  # a resumed run replaces the file
            self.version = version
            self._metrics, self._trace = Lines(mark), Lines(self.folder / TRACE)
            self.rows: list[dict[str, float]] = []
            self.events: list[Fields] = []
            self.answers = Answers(self.folder / HELD_OUT)
            self._table: Any = None  # a pyarrow.Table, once there are rollouts
            self._ends: list[int] = [0]  # of the batches in the file
            self._firsts: list[int] = [0]  # number of the first row of each batch
            self._read: dict[int, pa.RecordBatch] = {}

        self.rows += [row for row in map(finite_numbers, self._metrics.read()) if "step" in row]
        self.events += self._trace.read()
        self.answers.refresh()
        self._index_batches()

    def _index_batches(self) -> None:
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
        """Return the run's summary, settings, alerts, the bands of its reference or None, and the account of tokens (""
        without agents)."""
        try:
            settings = {key: to_json_value(value) for key, value in read_settings(self.folder).items()}
        except (ValueError, OSError):  # config.yaml is damaged
            settings = {}
        alerts = [*folder_alerts(self.folder), *list_alerts(self.rows, settings)]
        reference = find_reference(settings)
        return {
            "settings": settings,
            "reference": reference and {"name": reference.name, "seeds": reference.seeds, "bands": reference.bands()},
            "alerts": [alert._asdict() for alert in alerts],
            "account": account_text(token_account(self.rows)),
            **summarise_run(self.folder),
        }

    def curves(self, after: int = 0, max_rows: int | None = None) -> Fields:
        """Return the metrics: `columns`, by name a value or null for each row, and the number of all rows.

        Args:
            after: index of the first row to return.
            max_rows: if there are more rows, return every n-th one.
        """
        rows = self.rows[after:]
        rows = rows[:: max(1, math.ceil(len(rows) / max_rows))] if max_rows else rows
        names = sorted({name for row in rows for name in row})
        columns = {name: [round_number(row[name]) if name in row else None for row in rows] for name in names}
        return {"version": self.version, "rows": len(self.rows), "columns": columns}

    def lanes(self, after: int = 0, max_events: int = 200_000) -> Fields:
        """Return the events of the trace from index `after` on, and the number of all events.

        If there are more than `max_events`, the last ones are returned, after all events that name processes.
        """
        events = self.events[after:]
        is_cut = len(events) > max_events
        names = [event for event in self.events if is_cut and event.get("ph") == "M"]  # metadata, in Chrome's format
        found = to_json_value([*names, *events[-max_events:]])
        return {"version": self.version, "events": len(self.events), "found": found}

    def rollouts(self, query: Mapping[str, str]) -> Fields:
        """Return a page of the rollouts that a query selects, and a histogram of the rewards of all that it selects.

        Args:
            query: `<name>_min` and `<name>_max` for the columns `NUMBERS`; `reason`: "trained", "dropped" or a reason
                why rollouts were dropped; `text` that prompt, response or target must contain; `sort`, one of
                `NUMBERS`, and `down` = "1" for descending order; `page` from 0.

        Returns:
            `total` of the selected rollouts, `all`, `rows` of the page, `histogram` (None without rewards), and all
            `reasons` for which rollouts were dropped.

        Raises:
            ValueError: a value is not a number, or an unknown column.
        """
        table = self._table
        if table is None:
            return {"total": 0, "all": 0, "rows": [], "histogram": None, "reasons": []}

        # A mask of the rows that pass every filter.
        keep = np.ones(len(table), np.bool_)
        numbers = {name: table[name].to_numpy() for name in NUMBERS}
        for name, values in numbers.items():
            for bound, holds in (("min", np.greater_equal), ("max", np.less_equal)):
                if limit := query.get(f"{name}_{bound}"):
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

        if text := query.get("text"):
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

        # Texts are read from the file, for this page only: the table has none.
        index = table.take(pa.array(page)).to_pylist() if len(page) else []
        rows = [{"row": int(number), **to_json_value(line)} for number, line in zip(page, index, strict=True)]
        for row in rows:
            batch, offset = self._locate_row(row["row"])
            row |= {name: (convert_cell(batch[name], offset) or "")[:PREVIEW] for name in TEXT}
            # The text of the sampled tokens, with special ones; empty if one has a part of a character only.
            pieces = zip(convert_cell(batch["texts"], offset), convert_cell(batch["mask"], offset), strict=False)
            sampled = "".join(piece for piece, is_sampled in pieces if is_sampled)
            row["written"] = "" if "\ufffd" in sampled else sampled[:PREVIEW]

        return {
            **{"total": len(selected), "all": len(table), "rows": rows, "histogram": histogram},
            "reasons": sorted(reason for reason in reasons if reason),
        }

    def rollout(self, row: int) -> Fields:
        """Return all fields of the rollout with this index. IndexError: there is no such row."""
        if not 0 <= row < self._firsts[-1]:
            raise IndexError(f"there are {self._firsts[-1]} rollouts, and this is number {row}")
        batch, offset = self._locate_row(row)
        return {"row": row, **{name: convert_cell(batch[name], offset) for name in batch.schema.names}}

    def group(self, row: int) -> list[Fields]:
        """Return the rollouts with the same prompt and step as the one with this index, this one included."""
        rollout = self.rollout(row)
        same_step = self._table["step"].to_numpy() == rollout["step"]
        same_prompt = self._table["group"].to_numpy() == rollout["group"]
        return [self.rollout(int(number)) for number in np.flatnonzero(same_step & same_prompt)]

    def _locate_row(self, row: int) -> tuple[pa.RecordBatch, int]:
        """Return the batch that contains the row with this index, and the row's offset in it."""
        number = int(np.searchsorted(self._firsts, row, side="right")) - 1
        if number not in self._read:
            if len(self._read) >= MAX_BATCHES:
                self._read.clear()
            entry = next(read_batches(self.folder / ROLLOUTS, after=self._ends[number]), None)
            if entry is None:
                raise ValueError(f"{self.folder / ROLLOUTS} was changed or damaged while it was read: reload the page")
            self._read[number] = entry[1]
        return self._read[number], row - self._firsts[number]

    def _search_text(self, text: str) -> np.ndarray:
        """Return whether each row contains a text, ignoring case, [rows] bool."""
        parts = []
        for _, batch in read_batches(self.folder / ROLLOUTS, TEXT):
            columns = [check_array(batch[name]) for name in TEXT]
            hits = [pc.match_substring(column, text.encode(), ignore_case=True) for column in columns]
            found = [pc.fill_null(hit, False).to_numpy(zero_copy_only=False) for hit in hits]
            parts.append(np.logical_or.reduce(found))
        return np.concatenate(parts)[: len(self._table)]


def check_array(array: pa.Array) -> pa.Array:
    """Return an array whose offsets are valid, with texts as bytes, as they may not be valid UTF-8.

    Raises:
        ValueError: the array is damaged.
    """
    if pa.types.is_string(array.type):
        array = array.view(pa.binary())
    elif pa.types.is_list(array.type) and pa.types.is_string(array.type.value_type):
        array = array.view(pa.list_(pa.binary()))
    array.validate(full=True)
    return array


def convert_cell(array: pa.Array, index: int) -> Any:
    """Return the cell with this index as a value for JSON. ValueError: the array is damaged."""
    return to_json_value(check_array(array.slice(index, 1))[0].as_py())


def to_json_value(value: Any) -> Any:
    """Return a value that JSON can hold: None for NaN and infinity, and the text of types that JSON does not know.

    >>> to_json_value({"reward": float("nan"), "path": Path("runs")})
    {'reward': None, 'path': 'runs'}
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
    """Return a number rounded to seven significant digits: the page needs no more.

    >>> round_number(0.123456789)
    0.1234568
    """
    return float(f"{number:.7g}")


MAX_TEXT = 4000  # characters of a text on a page
VERDICTS = {"right": True, "wrong": False, "unknown": None}


class Answers:
    """The answers of evaluations in a growing file, by set and step. Damaged lines are skipped."""

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

        # An unknown set or verdict is ignored, so that an old address of the page still shows something.
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
