"""Scores of many responses by many verifiers."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

READINGS = re.compile(r"_(min|max|mean|avg|last)$")
ANSWER_FREQUENCY = "answer_frequency"


@dataclasses.dataclass
class ScoreTable:
    """Problems x responses x verifiers, checked when it is made. Arrays are taken as they are: do not change them.

    Args:
        scores: [problems, responses, verifiers], each verifier on its own scale; NaN where it gave none.
        verifiers: their names.
        labels: [problems, responses]: 1 right, 0 wrong, NaN unknown.
        answers: the final answer of each response, "" where it gave none, for votes.
        prompts, responses: the texts, for distillation; a prompt that is not known is "".
        families: one name a verifier; those that share one are known to be related, as readings of one model are. In
            files that do not say it, `families_by_name`.
        present: [problems, responses] bool, True up to a problem's last response; all by default. Lists (answers,
            responses) hold only the present ones.

    Raises:
        ValueError: shapes that do not fit, infinite scores, labels other than 0, 1, NaN, names that are not unique,
            a problem without responses, scores or labels of responses that are not present.
    """

    scores: np.ndarray
    verifiers: tuple[str, ...]
    labels: np.ndarray | None = None
    answers: list[list[str]] | None = None
    prompts: list[str] | None = None
    responses: list[list[str]] | None = None
    families: tuple[str, ...] | None = None
    present: np.ndarray = None  # type: ignore[assignment]  # made below where it is not given

    def __post_init__(self) -> None:
        self.scores = np.asarray(self.scores, dtype=np.float64)
        if self.scores.ndim != 3 or 0 in self.scores.shape:
            raise ValueError(f"scores must be [problems, responses, verifiers], none 0: they are {self.scores.shape}")
        shape = self.scores.shape[:2]
        self.verifiers = _names(self.verifiers, self.scores.shape[2])
        if self.present is None:
            self.present = np.ones(shape, dtype=bool)
        self.present = np.asarray(self.present)
        if self.present.dtype != bool or self.present.shape != shape:
            raise ValueError(f"present must be bool {shape}: it is {self.present.dtype} {self.present.shape}")
        if (self.present[:, 1:] & ~self.present[:, :-1]).any() or not self.present[:, 0].all():
            raise ValueError("present must be True from each problem's first response to its last, and False after it")
        if np.isinf(self.scores).any():
            i, j, v = np.argwhere(np.isinf(self.scores))[0]
            raise ValueError(f"{self.verifiers[v]} gave problem {i}, response {j} an infinite score: NaN means missing")
        if not np.isnan(self.scores[~self.present]).all():
            raise ValueError("there are scores of responses that are not present: they must be NaN")
        if self.labels is not None:
            self.labels = _labels(self.labels, self.present)
        self._check_lists()
        if self.families is not None:
            self.families = tuple(self.families)
            if len(self.families) != len(self.verifiers):
                raise ValueError(f"{len(self.families)} families for {len(self.verifiers)} verifiers")

    def _check_lists(self) -> None:
        counts = self.present.sum(1)
        if self.prompts is not None and len(self.prompts) != len(counts):
            raise ValueError(f"{len(self.prompts)} prompts for {len(counts)} problems")
        for name, lists in (("answers", self.answers), ("responses", self.responses)):
            if lists is None:
                continue
            if len(lists) != len(counts):
                raise ValueError(f"{name} of {len(lists)} problems where there are {len(counts)}")
            for i, (found, count) in enumerate(zip(lists, counts, strict=True)):
                if len(found) != count:
                    raise ValueError(f"problem {i} has {count} responses and {len(found)} {name}")

    def __len__(self) -> int:
        """Problems."""
        return len(self.scores)

    @property
    def problem_of(self) -> np.ndarray:
        """[present responses] the problem of each, in the order of `flat`."""
        return np.repeat(np.arange(len(self)), self.present.sum(1))

    @property
    def flat(self) -> np.ndarray:
        """[present responses, verifiers] scores, problem by problem."""
        return self.scores[self.present]

    def spread(self, values: np.ndarray) -> np.ndarray:
        """[problems, responses] of one value per present response; NaN where none is present."""
        out = np.full(self.present.shape, np.nan)
        out[self.present] = values
        return out

    def labelled_problems(self) -> np.ndarray:
        """Numbers of the problems of which at least one label is known."""
        if self.labels is None:
            return np.zeros(0, dtype=int)
        return np.flatnonzero(~np.isnan(self.labels).all(1))

    def take(self, problems: Sequence[int] | np.ndarray) -> ScoreTable:
        """Some problems, in the order given: a list of numbers or a mask."""
        chosen = np.arange(len(self))[np.asarray(problems)]
        return dataclasses.replace(
            self,
            scores=self.scores[chosen],
            labels=None if self.labels is None else self.labels[chosen],
            answers=None if self.answers is None else [self.answers[i] for i in chosen],
            prompts=None if self.prompts is None else [self.prompts[i] for i in chosen],
            responses=None if self.responses is None else [self.responses[i] for i in chosen],
            present=self.present[chosen],
        )

    def with_labels_of(self, problems: Sequence[int] | np.ndarray) -> ScoreTable:
        """The same table with all other labels hidden."""
        if self.labels is None:
            raise ValueError("the table has no labels to keep")
        chosen = np.arange(len(self))[np.asarray(problems, dtype=None if len(problems) else int)]
        labels = np.full_like(self.labels, np.nan)
        labels[chosen] = self.labels[chosen]
        return dataclasses.replace(self, labels=labels)

    def with_labels_from(self, first: int) -> ScoreTable:
        """The same table with the labels of the problems before this one hidden: what is judged by labels that a fit
        has not seen."""
        return self if self.labels is None else self.with_labels_of(np.arange(first, len(self)))

    def select(self, verifiers: Sequence[str]) -> ScoreTable:
        """The columns of these verifiers, in this order. ValueError names those that the table lacks."""
        missing = [name for name in verifiers if name not in self.verifiers]
        if missing:
            raise ValueError(f"the table has no scores of {', '.join(missing)}: it has {', '.join(self.verifiers)}")
        columns = [self.verifiers.index(name) for name in verifiers]
        families = None if self.families is None else tuple(self.families[c] for c in columns)
        return dataclasses.replace(
            self, scores=self.scores[:, :, columns], verifiers=tuple(verifiers), families=families
        )

    def with_verifier(self, name: str, scores: np.ndarray) -> ScoreTable:
        """One more verifier, of a family of its own, with its scores [problems, responses]."""
        return dataclasses.replace(
            self,
            scores=np.concatenate([self.scores, scores[:, :, None]], axis=2),
            verifiers=(*self.verifiers, name),
            families=None if self.families is None else (*self.families, name),
        )

    def with_answer_frequency(self) -> ScoreTable:
        """One more verifier: the share of the problem's other responses that give the same answer, 0 of one without.

        It is what `forge.verifiers.AnswerFrequency` says of answers that are compared as they are; NaN of a single
        response. ValueError: the table has no answers.
        """
        if self.answers is None:
            raise ValueError("the table has no answers to count")
        found: list[float] = []
        for answers in self.answers:
            counts, others = Counter(answer for answer in answers if answer), len(answers) - 1
            found += [((counts[answer] - 1) / others if answer else 0.0) if others else np.nan for answer in answers]
        return self.with_verifier(ANSWER_FREQUENCY, self.spread(np.array(found)))

    def save(self, path: str | Path) -> None:
        """Write a .npz or .parquet file, aside and renamed."""
        from .formats import save_table

        save_table(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> ScoreTable:
        """Read what `save` wrote, a tidy Parquet file of your own, or one in the public Weaver layout."""
        from .formats import load_table

        return load_table(Path(path))


def answer_shares(table: ScoreTable) -> list[np.ndarray]:
    """For each problem, the share of its answered responses that agree with each; NaN where a response has none."""
    if table.answers is None:
        raise ValueError("the table has no answers to count")
    shares = []
    for answers in table.answers:
        counts = Counter(answer for answer in answers if answer)
        total = counts.total()
        shares.append(np.array([counts[answer] / total if answer else np.nan for answer in answers]))
    return shares


def families_by_name(verifiers: Sequence[str]) -> tuple[str, ...]:
    """Families read off the names: `x_min`, `x_max`, `x_mean`, `x_avg` and `x_last` are readings of one model x."""
    return tuple(READINGS.sub("", name) for name in verifiers)


def check_labels(labels: np.ndarray) -> None:
    """ValueError: some are neither 1 nor 0 nor NaN."""
    wrong = labels[(labels != 0) & (labels != 1) & ~np.isnan(labels)]
    if wrong.size:
        raise ValueError(f"a label is {wrong[0]}: 1 is right, 0 wrong, NaN unknown")


def _names(verifiers: Sequence[str], count: int) -> tuple[str, ...]:
    names = (verifiers,) if isinstance(verifiers, str) else tuple(str(name) for name in verifiers)
    if len(names) != count:
        raise ValueError(f"{len(names)} names for {count} columns of scores")
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice or "" in names:
        raise ValueError(f"verifiers need names of their own: {', '.join(twice) or 'one is empty'}")
    return names


def _labels(labels: np.ndarray, present: np.ndarray) -> np.ndarray:
    labels = np.asarray(labels, dtype=np.float64)
    if labels.shape != present.shape:
        raise ValueError(f"labels are {labels.shape} where the responses are {present.shape}")
    check_labels(labels)
    if not np.isnan(labels[~present]).all():
        # Labels come as whole arrays of 0 and 1 more often than not; what is not there has none.
        labels = np.where(present, labels, np.nan)
    return labels
