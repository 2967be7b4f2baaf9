"""A model of verifiers that err together."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from .aggregator import Aggregator, Data
from .dependence import problem_correlation
from .em import first_guess
from .normalise import NormalScores, imputed, scattered
from .prior import Prior

TOLERANCE = 1e-3


@dataclasses.dataclass
class CorrelatedMixture(Aggregator):
    """Normal scores of right and of wrong responses are Gaussian with two means and one full covariance.

    Verifiers that repeat each other share one weight, and what they share without being right about it is subtracted:
    a weight may be negative. Expectation maximisation starts at the rank mean, and no verifier's mean may be lower for
    right responses, so the classes cannot swap. Labels are not looked at.

    What tells the classes apart where errors are correlated is that problems differ in their rate of right responses,
    or that one response of each is right. If the difficulty of a problem moves all its scores, rates by problem are
    no guide, and the result may be worse than chance. `report.details["problem_effect"]` is the correlation, between
    responses to one problem, of what the model leaves unexplained, which it takes to be 0; `Auto` looks at it first.

    Args:
        one_right: exactly one response of each problem is right, as among the options of a choice.
        class_balance: the share of right responses where it is known; not with `one_right`.
        shrink: of the covariance towards its diagonal.
        steps: most steps.
        most: fit on at most this many responses, whole problems drawn by `seed`.
        seed: also breaks ties of scores.
    """

    one_right: bool = False
    class_balance: float | None = None
    shrink: float = 0.02
    steps: int = 150
    most: int = 20_000
    seed: int = 0

    LEARNED: ClassVar[tuple[str, ...]] = (
        "values",
        "heights",
        "precision",
        "line",
        "offset",
        "rates",
        "weights",
        "mass",
        "sums",
        "moments",
    )

    def learn(self, data: Data) -> None:
        if self.one_right and self.class_balance is not None:
            raise ValueError("one_right gives the class balance itself: leave class_balance out")
        if self.one_right and data.problem[-1] + 1 == len(data.problem):
            raise ValueError("one_right needs problems of several responses: each has one")
        normal = NormalScores.fit(data.x)
        self.values, self.heights = normal.values, normal.heights
        kept = self._sample(data.problem)
        x, self.precision = imputed(scattered(data.x[kept], self.seed))
        problem = np.unique(data.problem[kept], return_inverse=True)[1]
        u, m = x.mean(1), x.shape[1]
        balance = self.class_balance or ((problem[-1] + 1) / len(problem) if self.one_right else 0.5)
        past = np.zeros(2), np.zeros((2, m)), np.zeros((m, m))
        start = first_guess(u - u.mean(), balance), Prior.start(balance, by_problem=True)
        r = self._maximise(x, problem, past, start, data.names)
        residual = x - np.stack([r, 1 - r], axis=1) @ (self.sums / (self.mass[:, None] + 1e-9))
        self.report.details["problem_effect"] = problem_correlation(residual, problem)

    def _sample(self, problem: np.ndarray) -> np.ndarray:
        drawn = np.random.default_rng(self.seed).permutation(problem[-1] + 1)
        sizes = np.bincount(problem)[drawn]
        return np.isin(problem, drawn[: max(1, (np.cumsum(sizes) <= self.most).sum())])

    def update(self, data: Data) -> None:
        x, _ = imputed(NormalScores(self.values, self.heights)(data.x), self.precision)
        prior, past = Prior(self.rates, self.weights), (self.mass, self.sums, self.moments)
        start = self._judge(x @ self.line - self.offset, data.problem, prior)
        self._maximise(x, data.problem, past, start, data.names)

    def _maximise(
        self,
        x: np.ndarray,
        problem: np.ndarray,
        past: tuple[np.ndarray, np.ndarray, np.ndarray],
        start: tuple[np.ndarray, Prior],
        names: list[str],
    ) -> np.ndarray:
        """From [responses, verifiers] without gaps, what earlier responses sum to, and probabilities to start from."""
        r, prior = start
        self.moments, step = past[2] + x.T @ x, 0
        for step in range(1, self.steps + 1):  # noqa: B007
            both = np.stack([r, 1 - r])
            self.mass, self.sums = past[0] + both.sum(1), past[1] + both @ x
            high, low = means = self.sums / (self.mass[:, None] + 1e-9)
            distance = np.maximum(high - low, 0.0)
            covariance = (self.moments - means.T @ self.sums) / self.mass.sum()
            spread = np.sqrt(np.diag(covariance)) + 1e-6
            line = np.linalg.solve((1 - self.shrink) * covariance + self.shrink * np.diag(spread**2), distance)
            self.line, self.offset, last = line, np.array((high + low) @ line / 2), r
            r, prior = self._judge(x @ line - self.offset, problem, prior)
            if np.abs(r - last).max() < TOLERANCE:
                break
        self.rates, self.weights = prior.rates, prior.weights
        self.report.class_balance = float(r.mean())
        self.report.details["steps"] = step
        for name, weight, apart in zip(names, line, distance / spread, strict=True):
            self.report.verifiers[name].update(weight=float(weight), separation=float(apart))
        return r

    def _judge(self, evidence: np.ndarray, problem: np.ndarray, prior: Prior) -> tuple[np.ndarray, Prior]:
        if self.one_right:
            return one_of_each(evidence, problem), prior
        return prior.step(evidence, problem, self.class_balance)

    def posterior(self, data: Data) -> np.ndarray:
        evidence = self.evidence(data)
        if not self.one_right:
            return Prior(self.rates, self.weights).posterior(evidence, data.problem)
        # What nobody scored cannot be the right one, and is not given a probability.
        return one_of_each(np.where(self.scored(data), evidence, -np.inf), data.problem)

    def evidence(self, data: Data) -> np.ndarray:
        """[responses] log P(scores | right) / P(scores | wrong)."""
        x, _ = imputed(NormalScores(self.values, self.heights)(data.x), self.precision)
        return x @ self.line - self.offset


def one_of_each(evidence: np.ndarray, problem: np.ndarray) -> np.ndarray:
    """[responses] probabilities that sum to 1 over each problem; `problem` rises."""
    starts = np.flatnonzero(np.diff(problem, prepend=-1))
    sizes = np.diff(np.append(starts, len(problem)))
    top = np.maximum.reduceat(evidence, starts)
    r = np.exp(evidence - np.repeat(np.where(np.isfinite(top), top, 0.0), sizes))
    return r / np.repeat(np.maximum(np.add.reduceat(r, starts), 1e-300), sizes)
