"""The answers to held-out problems, evaluation by evaluation: what a run writes, and what the page reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..system.files import open_plain
from ..types import Episode, Sample
from .lines import TURN, appended_lines, parsed

HELD_OUT = "held_out.jsonl"
PAGE, LONGEST = 50, 4000  # answers of a page, and characters of a text on it


def lines(step: int, samples: Sequence[Sample], episodes: Sequence[Episode]) -> bytes:
    """One line of JSON for each answer: step, problem (its number among the held-out ones), prompt, target, response,
    reward, correct, tokens (sampled) and finish. `reward` and `correct` are null where they are not known."""
    rows = (
        {
            "step": step,
            "problem": number,
            "prompt": str(sample.prompt),
            "target": sample.target,
            "response": episode.text,
            "reward": episode.outcome,
            "correct": episode.info["correct"],
            "tokens": sum(episode.mask),
            "finish": episode.turns[-1].finish if episode.turns else episode.info.get("finish", ""),
        }
        for number, (sample, episode) in enumerate(zip(samples, episodes, strict=True))
    )
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


class Place(NamedTuple):
    """Where an answer is in the file, and what lists are filtered by."""

    start: int
    end: int
    problem: int
    correct: bool | None


class Answers:
    """The answers of a growing file. Damaged lines are left out."""

    def __init__(self, path: Path) -> None:
        self._path, self._end = path, 0
        self.behind = False  # there was more than one call reads
        self._places: dict[int, list[Place]] = {}  # by step

    def refresh(self) -> None:
        """Find the answers that were added since the last call."""
        before = self._end
        for end, line in appended_lines(self._path, self._end, TURN):
            start, self._end = self._end, end
            row = _row(line)
            if row is not None:
                place = Place(start, end, row["problem"], row.get("correct"))
                self._places.setdefault(row["step"], []).append(place)
        self.behind = self._end - before >= TURN

    def page(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of the answers of one evaluation.

        Args:
            query: `step`, by default the last; `verdict`: "right", "wrong" or "unknown"; `page` from 0.

        Returns:
            `steps`, `step`, `total` of the answers that fit, `all`, and `rows`, each with `before`, whether the answer
            of the first evaluation was right.
        """
        if not self._places:
            return {"steps": [], "step": None, "total": 0, "all": 0, "rows": []}
        steps = sorted(self._places)
        step = int(query["step"]) if query.get("step") else steps[-1]
        places = self._places.get(step, [])
        wanted = {"right": True, "wrong": False, "unknown": None}
        fitting = places
        if query.get("verdict") in wanted:
            fitting = [place for place in places if place.correct is wanted[query["verdict"]]]
        before = {place.problem: place.correct for place in self._places[steps[0]]}
        shown = fitting[PAGE * int(query.get("page") or 0) :][:PAGE]
        rows = [{**row, "before": before.get(row["problem"])} for row in self._read(shown)]
        return {"steps": steps, "step": step, "total": len(fitting), "all": len(places), "rows": rows}

    def _read(self, places: Sequence[Place]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        if not places:
            return rows
        with open_plain(self._path) as file:
            for place in places:
                file.seek(place.start)
                row = _row(file.read(place.end - place.start))
                if row is not None:
                    rows.append({key: cell[:LONGEST] if isinstance(cell, str) else cell for key, cell in row.items()})
        return rows


def _row(line: bytes) -> dict[str, Any] | None:
    """An answer; None if the line is not one."""
    row = parsed(line)
    if row is None or not all(isinstance(row.get(key), int) for key in ("step", "problem")):
        return None
    return row
