"""Problems with their responses as a file of JSON lines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from ..files import written_aside
from .scoring import Problem

FIELDS = tuple(field.name for field in dataclasses.fields(Problem))


def write_problems(path: str | Path, problems: Sequence[Problem]) -> None:
    """One line a problem, with what is known of it; written aside and renamed."""
    with written_aside(Path(path)) as aside, aside.open("w", encoding="utf-8") as file:
        for problem in problems:
            known = {name: value for name in FIELDS if (value := getattr(problem, name)) is not None}
            file.write(json.dumps(known, default=list) + "\n")


def read_problems(path: str | Path) -> list[Problem]:
    """`prompt` and `responses` of each line that is not blank; `target`, `labels` and `answers` where they are known.

    Raises:
        FileNotFoundError: no such file. ValueError: a line that is no such problem, by its number; or no line at all.
    """
    problems = []
    with Path(path).open("rb") as lines:  # bytes: texts may hold characters that end a line elsewhere
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
                if not isinstance(row, dict) or not {"prompt", "responses"} <= row.keys():
                    raise ValueError("it must be an object with prompt and responses")
                if unknown := row.keys() - set(FIELDS):
                    raise ValueError(f"unknown field {min(unknown)!r}; known: {', '.join(FIELDS)}")
                problems.append(Problem(**row))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not problems:
        raise ValueError(f"{path} holds no problems")
    return problems
