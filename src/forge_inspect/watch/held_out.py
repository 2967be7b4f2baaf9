"""Answers to held-out problems of a run, page by page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from forge.observability.lines import Row, appended_lines, parse_line

PAGE = 50  # answers of a page
MAX_TEXT = 4000  # characters of a text on a page


class Entry(NamedTuple):
    """The position of an answer in the file, and the fields that lists are filtered by."""

    start: int
    end: int
    problem: int
    correct: bool | None
    set: str


class Answers:
    """The answers of a growing file. Damaged lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0
        self._entries: dict[int, list[Entry]] = {}  # by step

    def refresh(self) -> None:
        """Index the answers that were appended since the last call."""
        for end, line in appended_lines(self._path, self._end):
            start = self._end
            self._end = end
            row = _row(line)
            if row is not None:
                entry = Entry(start, end, row["problem"], row.get("correct"), str(row.get("set", "")))
                self._entries.setdefault(row["step"], []).append(entry)

    def page(self, query: Mapping[str, str]) -> Row:
        """Return a page of the answers of one evaluation.

        Args:
            query: `set`, by default the first one; `step`, by default the last of the set; `verdict`: "right", "wrong"
                or "unknown"; `page` from 0.

        Returns:
            `sets`, `set`, `steps`, `step`, `total` of the selected answers, `all`, and `rows`, each with `before`:
            whether the answer to this problem was right in the first evaluation.
        """
        if not self._entries:
            return {"sets": [], "set": "", "steps": [], "step": None, "total": 0, "all": 0, "rows": []}
        # What does not exist is ignored: an old address of the page still shows something.
        sets = sorted({entry.set for entries in self._entries.values() for entry in entries})
        name = query["set"] if query.get("set") in sets else sets[0]
        by_step = {
            step: of_set
            for step, entries in sorted(self._entries.items())
            if (of_set := [entry for entry in entries if entry.set == name])
        }
        steps = [*by_step]
        step = int(query["step"]) if query.get("step") else steps[-1]
        entries = by_step.get(step, [])
        verdicts = {"right": True, "wrong": False, "unknown": None}
        selected = entries
        if query.get("verdict") in verdicts:
            selected = [entry for entry in entries if entry.correct is verdicts[query["verdict"]]]
        # The first evaluation shows what training has changed.
        before = {entry.problem: entry.correct for entry in by_step[steps[0]]}
        page = selected[PAGE * int(query.get("page") or 0) :][:PAGE]
        rows = [{**row, "before": before.get(row["problem"])} for row in self._read(page)]
        numbers = {"total": len(selected), "all": len(entries)}
        return {"sets": sets, "set": name, "steps": steps, "step": step, **numbers, "rows": rows}

    def _read(self, entries: Sequence[Entry]) -> list[Row]:
        rows: list[Row] = []
        if not entries:
            return rows
        with self._path.open("rb") as file:
            for entry in entries:
                file.seek(entry.start)
                row = _row(file.read(entry.end - entry.start))
                if row is not None:
                    rows.append({key: cell[:MAX_TEXT] if isinstance(cell, str) else cell for key, cell in row.items()})
        return rows


def _row(line: bytes) -> Row | None:
    """Parse an answer; None if the line is not one."""
    row = parse_line(line)
    if row is None or not all(isinstance(row.get(key), int) for key in ("step", "problem")):
        return None
    return row
