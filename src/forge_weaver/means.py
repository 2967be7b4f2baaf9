"""Aggregators that do not model the verifiers: mean score, mean rank."""

import dataclasses
from typing import ClassVar

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit as sigmoid

from .aggregator import Aggregator, Data
from .normalise import NormalScores, scatter_scores

SLOPES = (0.5, 10.0)  # in logits per standard deviation of the mean: never useless, never certain
MIN_RESPONSES = 30  # to estimate the slope from
SAMPLE = 10_000  # about that many responses are used, which determine one number well enough


def mean_of_known(x: np.ndarray) -> np.ndarray:
    """Return the mean of each row of x [responses, verifiers] over values that are not NaN, [responses]; 0 for none.

    >>> mean_of_known(np.array([[1.0, 2.0], [np.nan, 3.0], [np.nan, np.nan]]))
    array([1.5, 3. , 0. ])
    """
    scored = ~np.isnan(x)
    return np.where(scored, x, 0.0).sum(1) / np.maximum(scored.sum(1), 1)


def fitted_slope(data: Data) -> float:
    """Return how fast the log-odds of being right grow with the mean score, in logits per standard deviation of it.

    It is the maximum-likelihood estimate under two Gaussians of equal variance, or 1 if BIC (Schwarz 1978) prefers one
    Gaussian, or for fewer than MIN_RESPONSES responses. Ties of scores are broken at random: a cluster of them would
    look like a class of responses.
    """
    from sklearn.mixture import GaussianMixture  # takes a second to import

    u = mean_of_known(scatter_scores(data.x[:: 1 + len(data.x) // SAMPLE], data.names, 0))
    z = ((u - u.mean()) / (u.std() + 1e-9))[:, None]
    one, two = (GaussianMixture(classes, covariance_type="tied", random_state=0).fit(z) for classes in (1, 2))
    if len(z) < MIN_RESPONSES or one.bic(z) <= two.bic(z):
        return 1.0
    return float(np.clip(np.ptp(two.means_) / two.covariances_[0, 0], *SLOPES))


@dataclasses.dataclass
class NaiveMean(Aggregator):
    """Mean of the min-max scaled scores that are not missing. Scores beyond the range of the fit are clipped to it."""

    LEARNED: ClassVar[tuple[str, ...]] = ("low", "high")

    def learn(self, data: Data) -> None:
        """Record each verifier's lowest and highest score."""
        self.low, self.high = np.nanmin(data.x, axis=0), np.nanmax(data.x, axis=0)
        self.report.describe(data.names, weight=np.full(len(data.columns), 1 / len(data.columns)))

    def means(self, data: Data) -> np.ndarray:
        """Return each response's mean score, [responses], each verifier's scaled from its range to [0, 1]."""
        return mean_of_known(np.clip((data.x - self.low) / (self.high - self.low), 0, 1))

    posterior = means  # which are no probabilities


@dataclasses.dataclass
class CalibratedMean(NaiveMean):
    """The order of `NaiveMean`, as probabilities: sigmoid(a * mean + b), with b such that the mean probability is pi.

    Args:
        class_balance: the fraction pi of right responses.
    """

    class_balance: float = 0.5

    LEARNED: ClassVar[tuple[str, ...]] = (*NaiveMean.LEARNED, "line")

    def learn(self, data: Data) -> None:
        """Record the ranges, and a line from the mean to log-odds."""
        super().learn(data)
        mean = self.means(data)
        a = fitted_slope(data) / (mean.std() + 1e-9)
        b = brentq(lambda b: sigmoid(a * mean + b).mean() - self.class_balance, -500.0, 500.0)
        self.line = np.array([a, b])
        self.report.class_balance = self.class_balance

    def evidence(self, data: Data) -> np.ndarray:
        """Return each response's log-odds of being right, [responses]."""
        return self.line[0] * self.means(data) + self.line[1]

    def posterior(self, data: Data) -> np.ndarray:
        """Return each response's probability of being right, [responses], from its mean score."""
        return sigmoid(self.evidence(data))


@dataclasses.dataclass
class RankMean(CalibratedMean):
    """`CalibratedMean` of normal scores, which depend on ranks only."""

    LEARNED: ClassVar[tuple[str, ...]] = (*CalibratedMean.LEARNED, "values", "heights")

    def learn(self, data: Data) -> None:
        """Fit normal scores, and a line from their mean to log-odds."""
        normal = NormalScores.fit(data.x)
        self.values, self.heights = normal.values, normal.heights
        super().learn(data)

    def means(self, data: Data) -> np.ndarray:
        """Return each response's mean normal score, [responses]; 0, the middle, where all are missing."""
        return mean_of_known(NormalScores(self.values, self.heights)(data.x))
