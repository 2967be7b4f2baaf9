"""Aggregators that do not model the verifiers: mean score, mean rank."""

import dataclasses
from typing import ClassVar

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit as sigmoid
from scipy.special import logit

from .aggregator import Aggregator, Data
from .normalise import NormalScores, family_means, scatter_scores


@dataclasses.dataclass
class NaiveMean(Aggregator):
    """Mean of the min-max scaled scores that are not missing. Scores beyond the range of the fit are clipped to it."""

    LEARNED: ClassVar[tuple[str, ...]] = ("low", "high")

    def learn(self, data: Data) -> None:
        """Record the range of each verifier."""
        self.low, self.high = np.nanmin(data.x, axis=0), np.nanmax(data.x, axis=0)
        for name in data.names:
            self.report.verifiers[name]["weight"] = 1 / len(data.columns)

    def posterior(self, data: Data) -> np.ndarray:
        """[responses] mean of the scores, each scaled to its range."""
        return mean_of_known(np.clip((data.x - self.low) / (self.high - self.low), 0, 1))


# Bounds of the slope, in logits per standard deviation of the mean: never useless, never certain.
MIN_SLOPE = 0.5
MAX_SLOPE = 10.0
MIN_RESPONSES = 30  # to estimate the slope from
SAMPLE = 10_000  # about that many responses are used, which determine one number well enough


def mean_of_known(x: np.ndarray) -> np.ndarray:
    """[responses] mean of [responses, verifiers] over values that are not NaN; 0 where all are."""
    scored = ~np.isnan(x)
    return np.where(scored, x, 0.0).sum(1) / np.maximum(scored.sum(1), 1)


def rank_means(normal: np.ndarray, families: np.ndarray | None = None) -> np.ndarray:
    """[responses] mean of normal scores [responses, verifiers]; 0, the middle, where all are missing."""
    return mean_of_known(normal if families is None else family_means(normal, families))


def unheap_scores(data: Data, families: np.ndarray | None = None) -> np.ndarray:
    """Rank means of about SAMPLE responses, ties broken at random: clusters of ties must not pass as classes."""
    return rank_means(scatter_scores(data.x[:: 1 + len(data.x) // SAMPLE], data.names, 0), families)


def fitted_slope(u: np.ndarray, steps: int = 200) -> float:
    """Maximum-likelihood slope in logits per standard deviation of u [responses], between MIN_SLOPE and MAX_SLOPE.

    The model is two Gaussians of equal variance, fitted by expectation maximisation from a median split; nothing is
    assumed about the verifiers behind u. The slope is at most 1 if BIC (Schwarz 1978) prefers one Gaussian, and 1 for
    fewer than MIN_RESPONSES responses.
    """
    if len(u) < MIN_RESPONSES:
        return 1.0
    z = (u - u.mean()) / (u.std() + 1e-9)
    high = (z > np.median(z)).astype(np.float64)

    for _ in range(steps):
        share = np.clip(high.mean(), 0.01, 0.99)
        upper, lower = high @ z / (high.sum() + 1e-9), (1 - high) @ z / ((1 - high).sum() + 1e-9)
        variance = (high @ (z - upper) ** 2 + (1 - high) @ (z - lower) ** 2) / len(z) + 1e-9
        slope, last = (upper - lower) / variance, high
        odds = slope * (z - (upper + lower) / 2) + logit(share)
        high = sigmoid(odds)
        if np.abs(high - last).max() < 1e-4:
            break

    # Two clusters must be more likely than one by more than their three parameters cost.
    below = np.log1p(-share) - (z - lower) ** 2 / (2 * variance) - np.log(variance) / 2
    gain = (np.logaddexp(0.0, odds) + below + z**2 / 2).sum()
    return float(np.clip(slope if gain > np.log(len(z)) else min(slope, 1.0), MIN_SLOPE, MAX_SLOPE))


def family_numbers(data: Data) -> np.ndarray | None:
    """[verifiers] index of each one's family; None if the table has no families."""
    if data.table.families is None:
        return None
    return np.unique([data.table.families[c] for c in data.columns], return_inverse=True)[1]


@dataclasses.dataclass
class RankMean(Aggregator):
    """Equal weights by rank: sigmoid(slope * mean normal score + b), with b such that the mean probability is pi.

    Args:
        class_balance: the fraction pi of right responses.
        slope: logits per standard deviation of the mean; None estimates it by maximum likelihood.
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
        u = rank_means(normal(data.x), self.families)
        slope = fitted_slope(unheap_scores(data, self.families)) if self.slope is None else self.slope
        # The slope is per standard deviation; b sets the mean probability.
        a = slope / (u.std() + 1e-9)
        b = brentq(lambda b: sigmoid(a * u + b).mean() - self.class_balance, -500.0, 500.0)
        self.line = np.array([a, b])
        self.report.class_balance = self.class_balance
        self.report.details["slope"] = slope
        sizes = np.ones(len(data.columns)) if self.families is None else np.bincount(self.families)[self.families]
        for name, weight in zip(data.names, 1 / sizes, strict=True):
            self.report.verifiers[name]["weight"] = float(weight / (1 / sizes).sum())

    def posterior(self, data: Data) -> np.ndarray:
        """[responses] probability from the mean of normal scores; related verifiers count as one."""
        u = rank_means(NormalScores(self.values, self.heights)(data.x), self.families)
        return sigmoid(self.line[0] * u + self.line[1])
