"""Answers to held-out problems of a run, page by page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from forge.observability.lines import Lines, Row

PAGE = 50  # answers of a page
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
