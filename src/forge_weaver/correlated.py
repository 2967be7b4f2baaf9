"""Verifiers with correlated errors: a measure and a model of the correlation."""

import dataclasses
from typing import ClassVar

import numpy as np

from .aggregator import Aggregator, Data
from .em import STARTS, TOLERANCE, Prior, first_guess, thin_problems
from .normalise import NormalScores, impute_scores, scatter_scores
from .table import ScoreTable

# Fewest responses scored by two verifiers for a correlation: independent ones correlate by about 1 / sqrt(30) = .18.
MIN_COMMON_RESPONSES = 30
RIDGE = 1e-3  # of an estimated covariance, relative: one verifier may copy another
MIN_PROBLEMS = 20  # to judge an explanation by: of fewer a standard error is uncertain itself


def residual_correlation(normal: np.ndarray, r: np.ndarray) -> tuple[float, np.ndarray]:
    """Return how strongly the verifiers' errors correlate: one number for all pairs, and the matrix of correlations.

    The correlations are among right and among wrong responses, where independent verifiers have none. Each response
    counts in both classes, weighted by its posterior: if the verifiers are independent given the truth, the expectation
    of every weighted product is 0, however uncertain the posteriors are.

    Args:
        normal: [responses, verifiers] normal scores, NaN for missing.
        r: [responses] posterior probability of being right.

    Returns:
        The root mean square over pairs, less what chance explains; NaN if no pair has a correlation.
        The matrix [verifiers, verifiers], NaN for pairs with fewer than MIN_COMMON_RESPONSES common responses.
    """
    scored = ~np.isnan(normal)
    x, weights = np.where(scored, normal, 0.0), scored.astype(np.float64)
    covariance = np.zeros((x.shape[1],) * 2)

    # The covariance within the classes, each response in both by its posterior.
    for class_weights in (r, 1 - r):
        mean = (class_weights @ x) / np.maximum(class_weights @ weights, 1e-9)
        deviation = (x - mean) * weights
        covariance += (deviation * class_weights[:, None]).T @ deviation

    pairs = weights.T @ weights
    covariance /= np.maximum(pairs, 1)

    # As correlations, for pairs with enough common responses.
    spread = np.sqrt(np.diag(covariance)) + 1e-12
    matrix = np.where(pairs >= MIN_COMMON_RESPONSES, covariance / spread / spread[:, None], np.nan)
    known_pair = ~np.eye(len(matrix), dtype=bool) & ~np.isnan(matrix)
    if not known_pair.any():
        return float("nan"), matrix

    # The squared correlation of n independent values is 1 / n on average.
    excess = (matrix[known_pair] ** 2 - 1 / pairs[known_pair]).mean()
    return float(np.sqrt(max(excess, 0.0))), matrix


def within_problems(a: np.ndarray, b: np.ndarray, problem: np.ndarray) -> float:
    """Return the correlation of two values per response within problems; 0 if one of them does not vary there.

    Args:
        a, b: [responses] values; each problem's mean is subtracted first.
        problem: [responses] index of each response's problem.
    """
    a, b = _split_problems(np.stack([a, b], axis=1), problem)[2].T
    spread = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / spread) if spread > 0 else 0.0


def classless_likelihood(
    x: np.ndarray, problem: np.ndarray, y: np.ndarray, y_problem: np.ndarray, *, is_shifted: bool
) -> np.ndarray:
    """Return the log likelihood of each problem's scores if there are no classes, [problems of y], up to a constant.

    All scores are then of one Gaussian, whose mean every problem shifts by another Gaussian, if `is_shifted`: other
    explanations of dependence than that of `CorrelatedMixture`. The covariances are estimated by moments.

    Args:
        x: [responses, verifiers] scores to estimate from, without NaN.
        problem: [responses] index of each one's problem, non-decreasing; some have several responses.
        y, y_problem: the same of the responses to judge.
    """
    sizes, means, deviation = _split_problems(x, problem)
    within = deviation.T @ deviation / (len(x) - len(sizes)) if is_shifted else np.cov(x.T)
    within = within + RIDGE * np.diag(np.diag(within))
    centred = (means - x.mean(0)) * np.sqrt(sizes)[:, None]
    effective = (len(x) - (sizes**2).sum() / len(x)) / (len(sizes) - 1)

    # A difference of estimates may have negative eigenvalues, a covariance has none.
    eigenvalues, vectors = np.linalg.eigh((centred.T @ centred / (len(sizes) - 1) - within) / effective)
    between = (vectors * np.maximum(eigenvalues, 0)) @ vectors.T * is_shifted

    # Deviations from the problem's mean and the mean itself are independent.
    y_sizes, y_means, deviation = _split_problems(y, y_problem)
    squares = (deviation * np.linalg.solve(within, deviation.T).T).sum(1)
    likelihood = (y_sizes - 1) * np.linalg.slogdet(within)[1] + _sum_problems(squares, y_problem)
    for size in np.unique(y_sizes):
        covariance, same = within + size * between, y_sizes == size
        centred = (y_means[same] - x.mean(0)) * np.sqrt(size)
        squares = (centred * np.linalg.solve(covariance, centred.T).T).sum(1)
        likelihood[same] += np.linalg.slogdet(covariance)[1] + squares
    return -likelihood / 2


def _split_problems(x: np.ndarray, problem: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sizes [problems], mean scores [problems, verifiers], and deviations from them [responses, verifiers]."""
    sizes = np.unique(problem, return_counts=True)[1]
    means = _sum_problems(x, problem) / sizes[:, None]
    return sizes, means, x - np.repeat(means, sizes, axis=0)


def _sum_problems(values: np.ndarray, problem: np.ndarray) -> np.ndarray:
    return np.add.reduceat(values, np.flatnonzero(np.diff(problem, prepend=-1)))


@dataclasses.dataclass
class CorrelatedMixture(Aggregator):
    """Two Gaussians, of right and of wrong responses, with one full covariance: an unsupervised linear discriminant.

    The scores are turned into normal scores first. Redundant verifiers share one weight; shared noise is subtracted,
    so weights may be negative. Expectation maximisation starts at the rank mean, and no verifier's mean may be lower
    for right responses, so the classes cannot swap.

    With correlated errors the classes are identified by the rate of right responses varying between problems, or by
    one response of each being right. If a problem's difficulty shifts all its scores, these rates mislead, and the
    result may be worse than chance: `Auto` asks `class_evidence` first.

    Args:
        one_right: exactly one response of each problem is right, as in multiple choice.
        class_balance: the fraction of right responses, if known; not with `one_right`.
        shrink: fraction by which the covariance is shrunk towards its diagonal.
        steps: maximum steps of expectation maximisation.
        most: fit on at most this many responses, whole problems drawn by `seed`.
        seed: draws these problems and breaks ties of scores.
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
            raise ValueError("one_right needs at least one problem with several responses, but each has one")
        normal = NormalScores.fit(data.x)
        self.values, self.heights = normal.values, normal.heights

        # Whole problems, in random order, up to `most` responses: the time of a step grows with their number.
        drawn = np.random.default_rng(self.seed).permutation(np.unique(data.problem))
        sizes = np.bincount(data.problem)[drawn]
        selected = np.isin(data.problem, drawn[: max(1, (np.cumsum(sizes) <= self.most).sum())])
        unscored, data = data.unscored, data.take(selected)
        x, self.precision = impute_scores(scatter_scores(data.x, data.names, self.seed))
        problem = data.problem

        def fit_subset(subset: np.ndarray, balance: float) -> tuple[np.ndarray, Prior]:
            start = first_guess(x[subset].mean(1), balance), Prior.start(balance)
            return self._maximise_likelihood(x[subset], problem[subset], start, unscored)

        # With a known balance one start is enough.
        balance = len(data.table) / data.table.present.sum() if self.one_right else self.class_balance
        if balance is not None:
            fit_subset(np.ones(len(x), dtype=bool), balance)
        else:
            # A single start can be far off under extreme balances: the best of several initialises the full fit.
            subset, candidates = thin_problems(problem), []
            for balance in STARTS:
                _, prior = fit_subset(subset, balance)
                likelihood = self.log_likelihood(x[subset], problem[subset], prior).sum()
                judgement = self._judge_evidence(x @ self.line - self.offset, problem, prior, unscored)
                candidates.append((likelihood, judgement))
            r, prior = max(candidates, key=lambda pair: pair[0])[1]
            self._maximise_likelihood(x, problem, (r, Prior(prior.rates, prior.weights)), unscored)

        _, distance, covariance = self._model_moments()
        self.report.describe(data.names, weight=self.line, separation=distance / np.sqrt(np.diag(covariance)))

    def _maximise_likelihood(
        self, x: np.ndarray, problem: np.ndarray, start: tuple[np.ndarray, Prior], unscored: np.ndarray
    ) -> tuple[np.ndarray, Prior]:
        """Fit the model to x [responses, verifiers] without NaN, by expectation maximisation.

        Args:
            start: initial probability of being right, [responses], and initial prior.

        Returns:
            Both after the last step.
        """
        r, prior = start
        self.moments = x.T @ x
        step, moved = 0, np.inf

        while step < self.steps and moved >= TOLERANCE:
            step += 1

            # M step: sums of each class, and the discriminant.
            classes = np.stack([r, 1 - r])
            self.mass, self.sums = classes.sum(1), classes @ x
            means, distance, covariance = self._model_moments()
            self.line = np.linalg.solve(covariance, distance)
            self.offset, previous = np.array(means.mean(0) @ self.line), r

            # E step: the posterior.
            r, prior = self._judge_evidence(x @ self.line - self.offset, problem, prior, unscored)
            moved = np.abs(r - previous).max()

        self.rates, self.weights = prior.rates, prior.weights
        self.report.class_balance = float(self.mass[0] / self.mass.sum())
        self.report.details.update(steps=step, converged=bool(moved < TOLERANCE))

        return r, prior

    def _model_moments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the parameters of the two Gaussians, from the sums of the last M step.

        Returns:
            The means of right and of wrong responses, [2, verifiers]; right less wrong mean, at least 0, [verifiers];
            the shrunk covariance, [verifiers, verifiers].
        """
        means = self.sums / (self.mass[:, None] + 1e-9)
        covariance = (self.moments - means.T @ self.sums) / self.mass.sum()
        variances = (np.sqrt(np.diag(covariance)) + 1e-6) ** 2
        shrunk = (1 - self.shrink) * covariance + self.shrink * np.diag(variances)
        return means, np.maximum(means[0] - means[1], 0.0), shrunk

    def log_likelihood(self, x: np.ndarray, problem: np.ndarray, prior: Prior) -> np.ndarray:
        """Return the log likelihood of each problem's scores, [problems], up to a constant.

        Args:
            x: [responses, verifiers] normal scores, without NaN.
        """
        means, distance, covariance = self._model_moments()
        # That all are wrong: deviations are from the lower mean, with the distance clipped as in the evidence.
        deviation = x - means.mean(0) + distance / 2
        squares = (deviation * np.linalg.solve(covariance, deviation.T).T).sum(1)
        _, log_determinant = np.linalg.slogdet(covariance)
        # And how much likelier the evidence makes it that some are right.
        gain = prior.log_likelihood(x @ self.line - self.offset, problem)
        return gain - _sum_problems(squares + log_determinant, problem) / 2

    def _judge_evidence(
        self, evidence: np.ndarray, problem: np.ndarray, prior: Prior, unscored: np.ndarray
    ) -> tuple[np.ndarray, Prior]:
        if self.one_right:
            return one_of_each(evidence, problem, unscored), prior
        return prior.step(evidence, problem, self.class_balance)

    def posterior(self, data: Data) -> np.ndarray:
        """Return each response's probability of being right, [responses], by Bayes' rule.

        With `one_right` the probabilities of a problem's responses, those without a score included, sum to 1.
        """
        evidence = self.evidence(data)
        if self.one_right:
            return one_of_each(evidence, data.problem, data.unscored)
        return Prior(self.rates, self.weights).posterior(evidence, data.problem)

    def evidence(self, data: Data) -> np.ndarray:
        """Return log P(scores | right) / P(scores | wrong) of each response, [responses]."""
        x, _ = impute_scores(NormalScores(self.values, self.heights)(data.x), self.precision)
        return x @ self.line - self.offset


def class_evidence(table: ScoreTable, class_balance: float | None) -> float:
    """Return by how many standard errors `CorrelatedMixture` explains problems better than models without classes.

    It is the smaller one of two differences, to `classless_likelihood` with and without shifts. Each half of the
    problems is judged by fits to the other half. It is -inf for fewer than MIN_PROBLEMS problems, and if each has one
    response, whose dependence cannot be seen.

    Args:
        class_balance: the fraction of right responses, if known.
    """
    if len(table) < MIN_PROBLEMS or table.present.sum(1).max() == 1:
        return -np.inf
    gains = []
    for held_out in (np.arange(len(table)) % 2 == 0, np.arange(len(table)) % 2 == 1):
        mixture = CorrelatedMixture(class_balance=class_balance).fit(table.take(~held_out))
        data, judged = mixture._table_data(table.take(~held_out)), mixture._table_data(table.take(held_out))
        x, y = (
            impute_scores(scatter_scores(part.x, part.names, mixture.seed), mixture.precision)[0]
            for part in (data, judged)
        )
        likelihood = mixture.log_likelihood(y, judged.problem, Prior(mixture.rates, mixture.weights))
        gains.append(
            [
                likelihood - classless_likelihood(x, data.problem, y, judged.problem, is_shifted=is_shifted)
                for is_shifted in (False, True)
            ]
        )
    gain = np.concatenate(gains, axis=1)
    return float((gain.mean(1) / gain.std(1, ddof=1)).min() * np.sqrt(gain.shape[1]))


def one_of_each(evidence: np.ndarray, problem: np.ndarray, unscored: np.ndarray) -> np.ndarray:
    """Return each response's probability of being the right one of its problem, [responses]: a softmax of evidence.

    Args:
        evidence: [responses] log P(scores | right) / P(scores | wrong).
        problem: [responses] index of the problem, non-decreasing.
        unscored: [problems] number of additional responses of each problem, with evidence 0.
    """
    starts = np.flatnonzero(np.diff(problem, prepend=-1))
    sizes = np.diff(np.append(starts, len(problem)))
    unscored_counts = unscored[problem[starts]]

    # The largest evidence of each problem is subtracted, against overflow.
    top = np.maximum.reduceat(evidence, starts)
    top = np.where(unscored_counts > 0, np.maximum(top, 0.0), top)
    r = np.exp(evidence - np.repeat(top, sizes))
    total = np.add.reduceat(r, starts) + unscored_counts * np.exp(-np.maximum(top, 0.0))
    return r / np.repeat(total, sizes)
