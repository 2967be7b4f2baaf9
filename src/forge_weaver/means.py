"""Aggregators that do not model the verifiers: mean score, mean rank."""

import dataclasses
from typing import ClassVar

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit as sigmoid, logit

from .aggregator import Aggregator, Data
from .normalise import NormalScores, family_means, scatter_scores


@dataclasses.dataclass
class NaiveMean(Aggregator):
    """Mean of the min-max scaled scores that are not missing. Scores beyond the range of the fit are clipped to it."""

    LEARNED: ClassVar[tuple[str, ...]] = ("low", "high")

    def learn(self, data: Data) -> None:
        """Record each verifier's lowest and highest score."""
        self.low, self.high = np.nanmin(data.x, axis=0), np.nanmax(data.x, axis=0)
        self.report.describe(data.names, weight=np.full(len(data.columns), 1 / len(data.columns)))

    def posterior(self, data: Data) -> np.ndarray:
        """Return each response's mean score, [responses], each verifier's scaled from its range to [0, 1]."""
        return mean_of_known(np.clip((data.x - self.low) / (self.high - self.low), 0, 1))


# Bounds of the slope, in logits per standard deviation of the mean: never useless, never certain.
MIN_SLOPE = 0.5
MAX_SLOPE = 10.0
MIN_RESPONSES = 30  # to estimate the slope from
SAMPLE = 10_000  # about that many responses are used, which determine one number well enough


def mean_of_known(x: np.ndarray) -> np.ndarray:
    """Return the mean of each row of x [responses, verifiers] over values that are not NaN, [responses]; 0 for none.

    >>> mean_of_known(np.array([[1.0, 2.0], [np.nan, 3.0], [np.nan, np.nan]]))
    array([1.5, 3. , 0. ])
    """
    scored = ~np.isnan(x)
    return np.where(scored, x, 0.0).sum(1) / np.maximum(scored.sum(1), 1)


def rank_means(normal: np.ndarray, families: np.ndarray | None = None) -> np.ndarray:
    """Return each response's mean normal score, [responses]; 0, the middle, where all are missing.

    Args:
        normal: [responses, verifiers] normal scores, NaN for missing.
        families: [verifiers] index of each one's family, which then counts as one verifier.
    """
    return mean_of_known(normal if families is None else family_means(normal, families))


def unheap_scores(data: Data, families: np.ndarray | None = None) -> np.ndarray:
    """Return the rank means of evenly spaced responses, at most SAMPLE, with ties of scores broken at random.

    Otherwise a cluster of tied scores would look like a class of responses.
    """
    return rank_means(scatter_scores(data.x[:: 1 + len(data.x) // SAMPLE], data.names, 0), families)


def fitted_slope(u: np.ndarray, steps: int = 200) -> float:
    """Return how fast the log-odds of being right grow with u, in logits per standard deviation of u.

    It is the maximum-likelihood estimate under two Gaussians of equal variance, fitted by expectation maximisation from
    a median split, within MIN_SLOPE and MAX_SLOPE. It is at most 1 if BIC (Schwarz 1978) prefers one Gaussian, and 1
    for fewer than MIN_RESPONSES responses.

    Args:
        u: [responses] one value per response, such as the rank mean.
        steps: maximum steps of expectation maximisation.
    """
    if len(u) < MIN_RESPONSES:
        return 1.0
    z = (u - u.mean()) / (u.std() + 1e-9)
    high = (z > np.median(z)).astype(np.float64)

    for _ in range(steps):
        # M step: share, means and variance of the two Gaussians.
        share = np.clip(high.mean(), 0.01, 0.99)
        upper, lower = high @ z / (high.sum() + 1e-9), (1 - high) @ z / ((1 - high).sum() + 1e-9)
        variance = (high @ (z - upper) ** 2 + (1 - high) @ (z - lower) ** 2) / len(z) + 1e-9

        # E step: the log-odds of the upper one.
        slope, previous = (upper - lower) / variance, high
        odds = slope * (z - (upper + lower) / 2) + logit(share)
        high = sigmoid(odds)
        if np.abs(high - previous).max() < 1e-4:
            break

    # BIC: two Gaussians must be more likely than one by log(n) / 2 for each of their two additional parameters.
    below = np.log1p(-share) - (z - lower) ** 2 / (2 * variance) - np.log(variance) / 2
    gain = (np.logaddexp(0.0, odds) + below + z**2 / 2).sum()
    if gain <= np.log(len(z)):
        slope = min(slope, 1.0)
    return float(np.clip(slope, MIN_SLOPE, MAX_SLOPE))


def family_numbers(data: Data) -> np.ndarray | None:
    """Return the index of each verifier's family, [verifiers], from 0; None if the table has no families."""
    if data.table.families is None:
        return None
    return np.unique([data.table.families[c] for c in data.columns], return_inverse=True)[1]


@dataclasses.dataclass
class RankMean(Aggregator):
    """Equal weights by rank: sigmoid(a * mean normal score + b), with b such that the mean probability is pi.

    Args:
        class_balance: the fraction pi of right responses.
        slope: logits per standard deviation of the mean, which gives a; None estimates it by maximum likelihood.
        by_family: verifiers of one family count as one.
    """

    class_balance: float = 0.5
    slope: float | None = None
    by_family: bool = False

    LEARNED: ClassVar[tuple[str, ...]] = ("values", "heights", "families", "line")

    def learn(self, data: Data) -> None:
        """Fit normal scores, and a line from their mean to log-odds."""
        normal = NormalScores.fit(data.x)
        self.values, self.heights = normal.values, normal.heights
        self.families = family_numbers(data) if self.by_family else None
        rank_mean = rank_means(normal(data.x), self.families)
        slope = fitted_slope(unheap_scores(data, self.families)) if self.slope is None else self.slope

        # The slope is per standard deviation; b sets the mean probability.
        a = slope / (rank_mean.std() + 1e-9)
        b = brentq(lambda b: sigmoid(a * rank_mean + b).mean() - self.class_balance, -500.0, 500.0)
        self.line = np.array([a, b])
        self.report.class_balance = self.class_balance
        self.report.details["slope"] = slope

        # A verifier's weight: the larger its family, the smaller its part.
        sizes = np.ones(len(data.columns)) if self.families is None else np.bincount(self.families)[self.families]
        self.report.describe(data.names, weight=1 / sizes / (1 / sizes).sum())

    def posterior(self, data: Data) -> np.ndarray:
        """Return each response's probability of being right, [responses], from its mean normal score."""
        rank_mean = rank_means(NormalScores(self.values, self.heights)(data.x), self.families)
        return sigmoid(self.line[0] * rank_mean + self.line[1])
