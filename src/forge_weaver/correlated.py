"""Verifiers that err together: how much they do, and a model of it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from .aggregator import Aggregator, Data
from .em import STARTS, Prior, first_guess, thinned
from .normalise import NormalScores, imputed, scattered

FEWEST = 30


def residual_correlation(normal: np.ndarray, r: np.ndarray) -> tuple[float, np.ndarray]:
    """Correlations between verifiers within the classes, and their root mean square less what chance makes.

    Responses are weighted by their posterior. If a conditionally independent model is right, the expectation of every
    weighted product within a class is 0, however uncertain the posteriors are.

    Args:
        normal: [responses, verifiers] normal scores, NaN where missing.
        r: [responses] posterior of being right.

    Returns:
        The root mean square off the diagonal, and the matrix; NaN of pairs with fewer than FEWEST common responses,
        and NaN altogether where no pair has more.
    """
    known = ~np.isnan(normal)
    x = np.where(known, normal, 0.0)
    weights = known.astype(np.float64)
    covariance = np.zeros((x.shape[1],) * 2)
    for w in (r, 1 - r):
        mean = (w @ x) / np.maximum(w @ weights, 1e-9)
        deviation = (x - mean) * weights
        covariance += (deviation * w[:, None]).T @ deviation
    pairs = weights.T @ weights
    covariance /= np.maximum(pairs, 1)
    spread = np.sqrt(np.diag(covariance)) + 1e-12
    matrix = np.where(pairs >= FEWEST, covariance / spread / spread[:, None], np.nan)
    off = ~np.eye(len(matrix), dtype=bool) & ~np.isnan(matrix)
    if not off.any():
        return float("nan"), matrix
    excess = (matrix[off] ** 2 - 1 / pairs[off]).mean()
    return float(np.sqrt(max(excess, 0.0))), matrix


def within_problems(a: np.ndarray, b: np.ndarray, problem: np.ndarray) -> float:
    """The correlation of two values per response once each problem's mean is taken off; 0 where one does not vary."""
    sizes = np.bincount(problem)
    a, b = (x - (np.bincount(problem, x) / np.maximum(sizes, 1))[problem] for x in (a, b))
    spread = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / spread) if spread > 0 else 0.0


def problem_correlation(residual: np.ndarray, problem: np.ndarray) -> float:
    """The intraclass correlation of [responses, verifiers] residuals within problems, the median over verifiers.

    0 where the responses to a problem are alike in nothing but how many are right; NaN where each problem has one.
    """
    sizes = np.bincount(problem)
    pairs = (sizes * (sizes - 1)).sum()
    if pairs == 0:
        return float("nan")
    square = (residual**2).sum(0)
    sums = np.stack([np.bincount(problem, column) for column in residual.T])
    between = ((sums**2).sum(1) - square) / pairs
    return float(np.median(between / (square / len(residual) + 1e-12)))


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
    steps: int = 300
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
        "tally",
        "mass",
        "sums",
        "moments",
    )

    def learn(self, data: Data) -> None:
        if self.one_right and self.class_balance is not None:
            raise ValueError("one_right gives the class balance itself: leave class_balance out")
        if self.one_right and data.table.present.sum(1).max() == 1:
            raise ValueError("one_right needs problems of several responses: each has one")
        normal = NormalScores.fit(data.x)
        self.values, self.heights = normal.values, normal.heights
        kept = self._sample(data.problem)
        unscored, data = data.unscored, data.take(kept)
        x, self.precision = imputed(scattered(data.x, data.names, self.seed))
        problem, m = data.problem, x.shape[1]
        past = np.zeros(2), np.zeros((2, m)), np.zeros((m, m))

        def begun(some: np.ndarray, balance: float) -> tuple[np.ndarray, Prior]:
            guess, prior = first_guess(x[some].mean(1), balance), Prior.start(balance, by_problem=True)
            return self._maximise(x[some], problem[some], past, (guess, prior), unscored)

        if self.one_right:
            r, _ = begun(np.ones(len(x), dtype=bool), len(data.table) / data.table.present.sum())
        elif self.class_balance is not None:
            r, _ = begun(np.ones(len(x), dtype=bool), self.class_balance)
        else:
            # One start may end far from the truth where nearly all responses are wrong or right.
            some, found = thinned(problem), []
            for balance in STARTS:
                _, prior = begun(some, balance)
                likelihood = self._log_likelihood(x[some], problem[some], prior)
                found.append((likelihood, self._judge(x @ self.line - self.offset, problem, prior, unscored)))
            r, prior = max(found, key=lambda pair: pair[0])[1]
            start = r, Prior(prior.rates, prior.weights)
            r, _ = self._maximise(x, problem, past, start, unscored)
        self._tell(data.names)
        residual = x - np.stack([r, 1 - r], axis=1) @ (self.sums / (self.mass[:, None] + 1e-9))
        self.report.details["problem_effect"] = problem_correlation(residual, problem)

    def _sample(self, problem: np.ndarray) -> np.ndarray:
        drawn = np.random.default_rng(self.seed).permutation(np.unique(problem))
        sizes = np.bincount(problem)[drawn]
        return np.isin(problem, drawn[: max(1, (np.cumsum(sizes) <= self.most).sum())])

    def update(self, data: Data) -> None:
        x, _ = imputed(NormalScores(self.values, self.heights)(data.x), self.precision)
        prior, past = Prior(self.rates, self.weights, self.tally), (self.mass, self.sums, self.moments)
        r, _ = self._judge(x @ self.line - self.offset, data.problem, prior, data.unscored)
        self._maximise(x, data.problem, past, (r, prior), data.unscored)
        self._tell(data.names)

    def _maximise(
        self,
        x: np.ndarray,
        problem: np.ndarray,
        past: tuple[np.ndarray, np.ndarray, np.ndarray],
        start: tuple[np.ndarray, Prior],
        unscored: np.ndarray,
    ) -> tuple[np.ndarray, Prior]:
        """From [responses, verifiers] without gaps, what earlier responses sum to, and probabilities to start from."""
        r, prior = start
        self.moments = past[2] + x.T @ x
        step, moved = 0, np.inf
        while step < self.steps and moved >= TOLERANCE:
            step += 1
            both = np.stack([r, 1 - r])
            self.mass, self.sums = past[0] + both.sum(1), past[1] + both @ x
            means, distance, covariance = self._model()
            self.line = np.linalg.solve(covariance, distance)
            self.offset, last = np.array(means.mean(0) @ self.line), r
            r, prior = self._judge(x @ self.line - self.offset, problem, prior, unscored)
            moved = np.abs(r - last).max()
        self.rates, self.weights, self.tally = prior.rates, prior.weights, prior.counts
        self.report.class_balance = float(self.mass[0] / self.mass.sum())
        self.report.details.update(steps=step, converged=bool(moved < TOLERANCE))
        return r, prior

    def _model(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Means of the right and of the wrong [2, verifiers], how far apart, never below 0, and the covariance."""
        means = self.sums / (self.mass[:, None] + 1e-9)
        covariance = (self.moments - means.T @ self.sums) / self.mass.sum()
        shrunk = (1 - self.shrink) * covariance + self.shrink * np.diag((np.sqrt(np.diag(covariance)) + 1e-6) ** 2)
        return means, np.maximum(means[0] - means[1], 0.0), shrunk

    def _log_likelihood(self, x: np.ndarray, problem: np.ndarray, prior: Prior) -> float:
        """Of the scores, but for a constant."""
        means, distance, covariance = self._model()
        # The evidence is that of two means about the middle of those found; this is the way from the lower one.
        away = x - means.mean(0) + distance / 2
        squares = (away * np.linalg.solve(covariance, away.T).T).sum()
        evidence = x @ self.line - self.offset
        return float(
            prior.log_likelihood(evidence, problem) - (squares + len(x) * np.linalg.slogdet(covariance)[1]) / 2
        )

    def _tell(self, names: list[str]) -> None:
        _, distance, covariance = self._model()
        for name, weight, apart in zip(names, self.line, distance / np.sqrt(np.diag(covariance)), strict=True):
            self.report.verifiers[name].update(weight=float(weight), separation=float(apart))

    def _judge(
        self, evidence: np.ndarray, problem: np.ndarray, prior: Prior, unscored: np.ndarray
    ) -> tuple[np.ndarray, Prior]:
        if self.one_right:
            return one_of_each(evidence, problem, unscored), prior
        return prior.step(evidence, problem, self.class_balance)

    def posterior(self, data: Data) -> np.ndarray:
        evidence = self.evidence(data)
        if not self.one_right:
            return Prior(self.rates, self.weights).posterior(evidence, data.problem)
        return one_of_each(evidence, data.problem, data.unscored)

    def evidence(self, data: Data) -> np.ndarray:
        """[responses] log P(scores | right) / P(scores | wrong)."""
        x, _ = imputed(NormalScores(self.values, self.heights)(data.x), self.precision)
        return x @ self.line - self.offset


def one_of_each(evidence: np.ndarray, problem: np.ndarray, unscored: np.ndarray) -> np.ndarray:
    """[responses] probabilities that sum to 1 over each problem, with those of the responses that nothing scored.

    Args:
        evidence, problem: [responses], `problem` rising.
        unscored: [problems] how many further responses there are, with evidence 0.
    """
    starts = np.flatnonzero(np.diff(problem, prepend=-1))
    sizes = np.diff(np.append(starts, len(problem)))
    others = unscored[problem[starts]]
    top = np.maximum.reduceat(evidence, starts)
    top = np.where(others > 0, np.maximum(top, 0.0), top)
    r = np.exp(evidence - np.repeat(top, sizes))
    return r / np.repeat(np.add.reduceat(r, starts) + others * np.exp(-np.maximum(top, 0.0)), sizes)
