"""Problems with responses: JSON lines files, and score tables from a panel of verifiers."""

import asyncio
import json
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from forge.rewards.verifier import Scores, Verifier
from forge.system.files import written_aside
from forge.types import Conversation

from .table import ScoreTable, check_labels, families_by_name

log = logging.getLogger(f"forge.{__name__}")


@dataclass(frozen=True, slots=True)
class Problem:
    """Prompt with its responses, and their labels and answers if known.

    Args:
        target: reference answer, which the verifiers may use.
        labels: for each response 1 if it is right, 0 if wrong, NaN or None if unknown.
        answers: final answer of each response for voting, "" for none.

    Raises:
        ValueError: lists of different lengths, or other labels.
    """

    prompt: str
    responses: Sequence[str]
    target: str | None = None
    labels: Sequence[float] | None = None
    answers: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.labels is not None:
            labels = [math.nan if label is None else float(label) for label in self.labels]
            check_labels(np.array(labels))
            object.__setattr__(self, "labels", labels)
        for name, values in (("labels", self.labels), ("answers", self.answers)):
            if values is not None and len(values) != len(self.responses):
                raise ValueError(f"{len(values)} {name} for {len(self.responses)} responses to {self.prompt[:60]!r}")


async def score_table(panel: Verifier, problems: Sequence[Problem], *, concurrency: int = 16) -> ScoreTable:
    """Return the scores of all responses to all problems.

    A failed score becomes NaN; a logged warning per verifier counts its failures, with the most frequent reasons.

    Args:
        panel: any verifier; if it raises for a problem, all scores of that problem have failed.
        concurrency: number of problems that are scored at the same time.

    Raises:
        ValueError: some problems have answers and others none.
    """
    with_answers = all(problem.answers is not None for problem in problems)
    if not with_answers and any(problem.answers is not None for problem in problems):
        raise ValueError("either all problems or none must have answers")
    slots = asyncio.Semaphore(concurrency)

    async def score_problem(problem: Problem) -> Scores:
        async with slots:
            try:
                return await panel.score(problem.prompt, problem.responses, problem.target)
            except Exception as error:
                return Scores.none(len(problem.responses), len(panel.names), f"{type(error).__name__}: {error}")

    scored = await asyncio.gather(*map(score_problem, problems))

    # One warning per verifier, with its most frequent reasons.
    total = sum(len(problem.responses) for problem in problems)
    for column, name in enumerate(panel.names):
        missing = Counter(reason for part in scored for (_, j), reason in part.reasons.items() if j == column)
        if missing:
            common = "; ".join(f"{count} x {reason}" for reason, count in missing.most_common(3))
            log.warning("%s: %d of %d scores are missing: %s", name, missing.total(), total, common)

    # Arrays as wide as the problem with most responses.
    shape = (len(problems), max(len(problem.responses) for problem in problems))
    scores = np.full((*shape, len(panel.names)), np.nan)
    labels, present = np.full(shape, np.nan), np.zeros(shape, bool)

    for row, problem in enumerate(problems):
        count = len(problem.responses)
        scores[row, :count], present[row, :count] = scored[row].values, True
        if problem.labels is not None:
            labels[row, :count] = problem.labels

    return ScoreTable(
        scores=scores,
        verifiers=tuple(panel.names),
        labels=labels if any(problem.labels is not None for problem in problems) else None,
        answers=[list(problem.answers or ()) for problem in problems] if with_answers else None,
        prompts=[problem.prompt for problem in problems],
        responses=[list(problem.responses) for problem in problems],
        families=families_by_name(panel.names),
        present=present,
    )


_TEXTS = {"type": "array", "items": {"type": "string"}}
_FIELDS = {
    "prompt": {"type": "string"},
    "row": {"type": "object", "required": ["question"]},
    "responses": {**_TEXTS, "minItems": 1},
    "target": {"type": ["string", "null"]},
    "labels": {"type": "array", "items": {"enum": [1, 0, True, False, None]}},
    "answers": _TEXTS,
}
# Unknown fields are errors: a misspelt "labels" would otherwise be no labels.
_LINE = Draft202012Validator(
    {"type": "object", "properties": _FIELDS, "required": ["prompt", "responses"], "additionalProperties": False}
)


def write_problems(path: str | Path, problems: Sequence[Problem]) -> None:
    """Write one line of JSON per problem, without fields that are None, to a file that appears when it is complete."""
    with written_aside(Path(path)) as aside, aside.open("w", encoding="utf-8") as file:
        for problem in problems:
            row = {name: value for name, value in asdict(problem).items() if value is not None}
            if isinstance(problem.prompt, Conversation):
                row["row"] = problem.prompt.row
            if problem.labels is not None:
                row["labels"] = [None if math.isnan(label) else label for label in problem.labels]
            file.write(json.dumps(row) + "\n")


def read_problems(path: str | Path) -> list[Problem]:
    """Return the problems in a file with one JSON object a line, whose keys are fields of `Problem`.

    Blank lines are skipped.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line is invalid (the message has its number), or there are no problems.
    """
    problems = []
    with Path(path).open("rb") as lines:  # bytes: str.splitlines would also split at U+2028 and others within texts
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
                if (error := best_match(_LINE.iter_errors(row))) is not None:
                    raise ValueError(f"{error.json_path}: {error.message[:200]}")
                row["prompt"] = (
                    Conversation(row["prompt"], fields) if (fields := row.pop("row", None)) else row["prompt"]
                )
                problems.append(Problem(**row))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None

    if not problems:
        raise ValueError(f"{path} has no problems")
    return problems
