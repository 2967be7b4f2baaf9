"""Verifiers with correlated errors: a measure and a model of the correlation."""

import dataclasses
from typing import ClassVar

import numpy as np

from .aggregator import Aggregator, Data
from .em import STARTS, TOLERANCE, Prior, first_guess, thin_problems
from .normalise import NormalScores, impute_scores, scatter_scores

MIN_COMMON_RESPONSES = 30  # of two verifiers: by chance fewer correlate by 1 / sqrt(30) = .18


def residual_correlation(normal: np.ndarray, r: np.ndarray) -> tuple[float, np.ndarray]:
    """Correlations between verifiers within the classes.

    Responses are weighted by their posterior. If a conditionally independent model is right, the expectation of every
    weighted product within a class is 0, however uncertain the posteriors are.

    Args:
        normal: [responses, verifiers] normal scores, NaN for missing.
        r: [responses] posterior of being right.

    Returns:
        The off-diagonal root mean square corrected for chance, and the matrix [verifiers, verifiers], NaN for pairs
        with fewer than MIN_COMMON_RESPONSES common responses. The former is NaN if all pairs are.
    """
    scored = ~np.isnan(normal)
    x = np.where(scored, normal, 0.0)
    weights = scored.astype(np.float64)
    covariance = np.zeros((x.shape[1],) * 2)

    # The covariance within the classes, each response in both by its posterior.
    for w in (r, 1 - r):
        mean = (w @ x) / np.maximum(w @ weights, 1e-9)
        deviation = (x - mean) * weights
        covariance += (deviation * w[:, None]).T @ deviation

    pairs = weights.T @ weights
    covariance /= np.maximum(pairs, 1)

    # As correlations, for pairs with enough common responses.
    spread = np.sqrt(np.diag(covariance)) + 1e-12
    matrix = np.where(pairs >= MIN_COMMON_RESPONSES, covariance / spread / spread[:, None], np.nan)
    off = ~np.eye(len(matrix), dtype=bool) & ~np.isnan(matrix)
    if not off.any():
        return float("nan"), matrix
    excess = (matrix[off] ** 2 - 1 / pairs[off]).mean()

    return float(np.sqrt(max(excess, 0.0))), matrix


def within_problems(a: np.ndarray, b: np.ndarray, problem: np.ndarray) -> float:
    """Correlation of two values per response after subtracting each problem's mean; 0 if one does not vary."""
    sizes = np.bincount(problem)
    a, b = (x - (np.bincount(problem, x) / np.maximum(sizes, 1))[problem] for x in (a, b))
    spread = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / spread) if spread > 0 else 0.0


def problem_correlation(residual: np.ndarray, problem: np.ndarray) -> float:
    """Median over verifiers of the intraclass correlation of residuals [responses, verifiers] within problems.

    0 if responses to one problem share nothing but their rate of being right; NaN if each problem has one response.
    """
    sizes = np.bincount(problem)
    pairs = (sizes * (sizes - 1)).sum()
    if pairs == 0:
        return float("nan")
    square = (residual**2).sum(0)
    sums = np.stack([np.bincount(problem, column) for column in residual.T])
    between = ((sums**2).sum(1) - square) / pairs
    return float(np.median(between / (square / len(residual) + 1e-12)))


@dataclasses.dataclass
class CorrelatedMixture(Aggregator):
    """Normal scores are Gaussian with a mean per class and one full covariance (linear discriminant, unsupervised).

    Redundant verifiers share one weight; shared noise is subtracted, so weights may be negative. Expectation
    maximisation starts at the rank mean, and no verifier's mean may be lower for right responses, so the classes
    cannot swap.

    With correlated errors the classes are identified by the rate of right responses varying between problems, or by
    one response of each being right. If a problem's difficulty shifts all its scores, these rates mislead, and the
    result may be worse than chance: `report.details["problem_effect"]` is the intraclass correlation of the residuals
    within problems, 0 under the model; `Auto` checks it first.

    Args:
        one_right: exactly one response of each problem is right, as in multiple choice.
        class_balance: the fraction of right responses, if known; not with `one_right`.
        shrink: shrinkage of the covariance towards its diagonal.
        steps: maximum steps.
        most: fit on at most this many responses, whole problems drawn by `seed`.
        seed: also breaks ties of scores.
    """

    one_right: bool = False
    class_balance: float | None = None
    shrink: float = 0.02
    steps: int = 300
    most: int = 20_000
    seed: int = 0

    LEARNED: ClassVar[tuple[str, ...]] = ("values", "heights", "precision", "line", "offset", "rates", "weights")

    def learn(self, data: Data) -> None:
        """Fit two Gaussians with one covariance to normal scores by EM."""
        if self.one_right and data.table.present.sum(1).max() == 1:
            raise ValueError("one_right needs problems of several responses: each has one")
        normal = NormalScores.fit(data.x)
        self.values, self.heights = normal.values, normal.heights

        # Whole problems, in random order, up to `most` responses: the time of a step grows with their number.
        drawn = np.random.default_rng(self.seed).permutation(np.unique(data.problem))
        sizes = np.bincount(data.problem)[drawn]
        selected = np.isin(data.problem, drawn[: max(1, (np.cumsum(sizes) <= self.most).sum())])
        unscored, data = data.unscored, data.take(selected)
        x, self.precision = impute_scores(scatter_scores(data.x, data.names, self.seed))
        problem = data.problem

        def from_balance(subset: np.ndarray, balance: float) -> tuple[np.ndarray, Prior]:
            start = first_guess(x[subset].mean(1), balance), Prior.start(balance)
            return self._maximise_likelihood(x[subset], problem[subset], start, unscored)

        # With a known balance one start is enough.
        balance = len(data.table) / data.table.present.sum() if self.one_right else self.class_balance
        if balance is not None:
            r, _ = from_balance(np.ones(len(x), dtype=bool), balance)
        else:
            # A single start can be far off under extreme balances.
            subset, candidates = thin_problems(problem), []
            for balance in STARTS:
                _, prior = from_balance(subset, balance)
                likelihood = self._log_likelihood(x[subset], problem[subset], prior)
                candidates.append(
                    (likelihood, self._judge_evidence(x @ self.line - self.offset, problem, prior, unscored))
                )
            r, prior = max(candidates, key=lambda pair: pair[0])[1]
            r, _ = self._maximise_likelihood(x, problem, (r, Prior(prior.rates, prior.weights)), unscored)

        _, distance, covariance = self._model_moments()
        for name, weight, apart in zip(data.names, self.line, distance / np.sqrt(np.diag(covariance)), strict=True):
            self.report.verifiers[name].update(weight=float(weight), separation=float(apart))
        residual = x - np.stack([r, 1 - r], axis=1) @ (self.sums / (self.mass[:, None] + 1e-9))
        self.report.details["problem_effect"] = problem_correlation(residual, problem)

    def _maximise_likelihood(
        self, x: np.ndarray, problem: np.ndarray, start: tuple[np.ndarray, Prior], unscored: np.ndarray
    ) -> tuple[np.ndarray, Prior]:
        """Expectation maximisation on x [responses, verifiers] without NaN.

        Args:
            start: initial probabilities and prior.
        """
        r, prior = start
        self.moments = x.T @ x
        step, moved = 0, np.inf

        # M step: sums of each class, and the discriminant; E step: the posterior.
        while step < self.steps and moved >= TOLERANCE:
            step += 1
            classes = np.stack([r, 1 - r])
            self.mass, self.sums = classes.sum(1), classes @ x
            means, distance, covariance = self._model_moments()
            self.line = np.linalg.solve(covariance, distance)
            self.offset, last = np.array(means.mean(0) @ self.line), r
            r, prior = self._judge_evidence(x @ self.line - self.offset, problem, prior, unscored)
            moved = np.abs(r - last).max()

        self.rates, self.weights = prior.rates, prior.weights
        self.report.class_balance = float(self.mass[0] / self.mass.sum())
        self.report.details.update(steps=step, converged=bool(moved < TOLERANCE))

        return r, prior

    def _model_moments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return means of right and wrong [2, verifiers], their distance (at least 0) [verifiers], and the
        covariance."""
        means = self.sums / (self.mass[:, None] + 1e-9)
        covariance = (self.moments - means.T @ self.sums) / self.mass.sum()
        shrunk = (1 - self.shrink) * covariance + self.shrink * np.diag((np.sqrt(np.diag(covariance)) + 1e-6) ** 2)
        return means, np.maximum(means[0] - means[1], 0.0), shrunk

    def _log_likelihood(self, x: np.ndarray, problem: np.ndarray, prior: Prior) -> float:
        """Log likelihood of the scores, up to a constant."""
        means, distance, covariance = self._model_moments()
        # From the lower mean, with the distance clipped as in the evidence.
        away = x - means.mean(0) + distance / 2
        squares = (away * np.linalg.solve(covariance, away.T).T).sum()
        evidence = x @ self.line - self.offset
        return float(
            prior.log_likelihood(evidence, problem) - (squares + len(x) * np.linalg.slogdet(covariance)[1]) / 2
        )

    def _judge_evidence(
        self, evidence: np.ndarray, problem: np.ndarray, prior: Prior, unscored: np.ndarray
    ) -> tuple[np.ndarray, Prior]:
        if self.one_right:
            return one_of_each(evidence, problem, unscored), prior
        return prior.step(evidence, problem, self.class_balance)

    def posterior(self, data: Data) -> np.ndarray:
        """[responses] probability by Bayes' rule; with `one_right` normalised over the responses of a problem."""
        evidence = self.evidence(data)
        if not self.one_right:
            return Prior(self.rates, self.weights).posterior(evidence, data.problem)
        return one_of_each(evidence, data.problem, data.unscored)

    def evidence(self, data: Data) -> np.ndarray:
        """[responses] log P(scores | right) / P(scores | wrong)."""
        x, _ = impute_scores(NormalScores(self.values, self.heights)(data.x), self.precision)
        return x @ self.line - self.offset


def one_of_each(evidence: np.ndarray, problem: np.ndarray, unscored: np.ndarray) -> np.ndarray:
    """[responses] softmax of the evidence over each problem, including its unscored responses.

    Args:
        evidence, problem: [responses], `problem` non-decreasing.
        unscored: [problems] number of additional responses, with evidence 0.
    """
    starts = np.flatnonzero(np.diff(problem, prepend=-1))
    sizes = np.diff(np.append(starts, len(problem)))
    unscored_counts = unscored[problem[starts]]
    top = np.maximum.reduceat(evidence, starts)
    top = np.where(unscored_counts > 0, np.maximum(top, 0.0), top)
    r = np.exp(evidence - np.repeat(top, sizes))
    return r / np.repeat(np.add.reduceat(r, starts) + unscored_counts * np.exp(-np.maximum(top, 0.0)), sizes)
