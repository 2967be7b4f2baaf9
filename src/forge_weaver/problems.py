"""Problems with their responses: as a file of JSON lines, and as the table of scores that ensembles are fitted on."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from forge.verifiers.verifier import Scores, Verifier

from .table import ScoreTable, families_by_name

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt with its responses. labels: 1, 0 or NaN (also given as None) for each response; answers: the final
    answer of each, for votes, "" where it has none.

    ValueError: no responses, labels or answers of another number, or what is none of these; says which.
    """

    prompt: str
    responses: Sequence[str]
    target: str | None = None
    labels: Sequence[float] | None = None
    answers: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            raise ValueError(f"the prompt must be text, got {self.prompt!r:.60}")
        of = f"to {self.prompt[:60]!r}"
        if not len(_texts(self.responses, "responses", of)):
            raise ValueError(f"there are no responses {of}")
        if not isinstance(self.target, str | None):
            raise ValueError(f"the target must be text or left out {of}, got {self.target!r:.60}")
        if self.answers is not None:
            _texts(self.answers, 'answers ("" for none)', of)
        if self.labels is not None:
            if isinstance(self.labels, str) or not hasattr(self.labels, "__iter__"):
                raise ValueError(f"labels must be a list of 1, 0 and null {of}, got {self.labels!r:.60}")
            labels = [math.nan if label is None else label for label in self.labels]
            if wrong := [label for label in labels if label not in (0, 1) and label == label]:
                raise ValueError(f"labels must be 1, 0 or null {of}, got {wrong[0]!r:.60}")
            object.__setattr__(self, "labels", [float(label) for label in labels])
        for name, given in (("labels", self.labels), ("answers", self.answers)):
            if given is not None and len(given) != len(self.responses):
                raise ValueError(f"{len(given)} {name} for {len(self.responses)} responses {of}")


def _texts(given: Sequence[str], name: str, of: str) -> Sequence[str]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(text, str) for text in given):
        raise ValueError(f"{name} must be a list of texts {of}, got {given!r:.60}")
    return given


async def score_table(
    panel: Verifier,
    problems: Sequence[Problem],
    *,
    concurrency: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> ScoreTable:
    """Score all responses of all problems. What fails is NaN, and the others go on; a warning says how many scores each
    verifier did not give, and why.

    Args:
        panel: any verifier; a `Panel` never raises for one problem.
        concurrency: problems at a time.
        progress: called with the number of problems that are done, and of all.

    Raises:
        ValueError: no problems, answers of some problems only, or a concurrency below 1.
    """
    if not problems or concurrency < 1:
        raise ValueError(f"there must be problems and a concurrency of at least 1: {len(problems)}, {concurrency}")
    with_answers = [problem.answers is not None for problem in problems]
    if any(with_answers) and not all(with_answers):
        raise ValueError("some problems have answers and others none: give all or leave all out")
    found = await _score_all(panel, problems, concurrency, progress)
    _tell_missing(panel, found)
    shape = (len(problems), max(len(problem.responses) for problem in problems))
    scores, labels, present = np.full((*shape, len(panel.names)), np.nan), np.full(shape, np.nan), np.zeros(shape, bool)
    for row, (problem, part) in enumerate(zip(problems, found, strict=True)):
        count = len(problem.responses)
        scores[row, :count], present[row, :count] = part.values, True
        if problem.labels is not None:
            labels[row, :count] = problem.labels
    return ScoreTable(
        scores=scores,
        verifiers=tuple(panel.names),
        labels=labels if any(problem.labels is not None for problem in problems) else None,
        answers=[list(problem.answers or ()) for problem in problems] if all(with_answers) else None,
        prompts=[problem.prompt for problem in problems],
        responses=[list(problem.responses) for problem in problems],
        families=families_by_name(panel.names),
        present=present,
    )


async def _score_all(
    panel: Verifier, problems: Sequence[Problem], concurrency: int, progress: Callable[[int, int], None] | None
) -> list[Scores]:
    found: dict[int, Scores] = {}
    waiting = iter(enumerate(problems))

    async def work() -> None:
        for number, problem in waiting:
            try:
                found[number] = await panel.score(problem.prompt, problem.responses, problem.target)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                found[number] = Scores.none(len(problem.responses), len(panel.names), reason)
            if progress is not None:
                progress(len(found), len(problems))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(problems))):
            tasks.create_task(work())
    return [found[number] for number in range(len(problems))]


def _tell_missing(panel: Verifier, found: Sequence[Scores]) -> None:
    total = sum(len(part.values) for part in found)
    for column, name in enumerate(panel.names):
        why = Counter(reason for part in found for (_, j), reason in part.reasons.items() if j == column)
        if why:
            common = "; ".join(f"{count} x {reason}" for reason, count in why.most_common(3))
            log.warning("%s: %d of %d scores are missing: %s", name, why.total(), total, common)


FIELDS = tuple(field.name for field in fields(Problem))


def write_problems(path: str | Path, problems: Sequence[Problem]) -> None:
    """One line a problem, with what is known of it; written aside and renamed."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        for problem in problems:
            known = {name: value for name in FIELDS if (value := getattr(problem, name)) is not None}
            file.write(json.dumps(known, default=list) + "\n")
    aside.replace(path)


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
