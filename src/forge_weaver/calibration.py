"""Calibration metrics (Brier, log loss, AUC, ECE), Platt recalibration and penalised logistic regression.

All metrics take arrays of one shape, such as [problems, responses], and leave out what has no probability or no
label (NaN). Labels are 1 and 0, or but for the ROC curve anything between. ValueError where nothing is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit as sigmoid
from scipy.special import logit

from .table import check_labels


def logistic_regression(x: np.ndarray, labels: np.ndarray, pull: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """[columns] the line that maximises the likelihood less pull / 2 (line - centre)^2.

    Args:
        x: [responses, columns]
        labels: [responses] 1 or 0, or anything between.
        pull, centre: [columns], pull positive: then the maximum is one point, separable labels or not.
    """
    # Not scikit-learn's: it has one penalty for all columns, pulls to 0 alone, and takes no soft labels.
    sign = 2 * labels - 1

    def loss(line: np.ndarray) -> tuple[float, np.ndarray]:
        score = x @ line
        value = np.logaddexp(0, -sign * score).sum() if hard else (np.logaddexp(0, score) - labels * score).sum()
        return value + 0.5 * (pull * (line - centre) ** 2).sum(), x.T @ (sigmoid(score) - labels) + pull * (
            line - centre
        )

    def curvature(line: np.ndarray) -> np.ndarray:
        p = sigmoid(x @ line)
        return (x * (p * (1 - p))[:, None]).T @ x + np.diag(pull)

    hard = bool(np.isin(labels, (0, 1)).all())
    return minimize(loss, centre, jac=True, hess=curvature, method="trust-exact", options={"gtol": 1e-6}).x


BINS = 15
EDGE = 1e-6


def brier(p: np.ndarray, labels: np.ndarray) -> float:
    """Mean squared difference (Brier 1950)."""
    p, labels = _known(p, labels)
    return float(((p - labels) ** 2).mean())


def log_loss(p: np.ndarray, labels: np.ndarray) -> float:
    """Mean negative log-likelihood in nats, of probabilities kept 1e-6 from 0 and 1."""
    p, labels = _known(p, labels)
    p = np.clip(p, EDGE, 1 - EDGE)
    return float(-(labels * np.log(p) + (1 - labels) * np.log1p(-p)).mean())


def auc(p: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve, ties counted half; NaN where only one class is there."""
    p, labels = _known(p, labels)
    check_labels(labels)
    if labels.min() == labels.max():
        return float("nan")
    from sklearn.metrics import roc_auc_score  # takes a second to import

    return float(roc_auc_score(labels, p))


@dataclasses.dataclass
class Reliability:
    """Bins of equal width from 0 to 1, [bins] each; means are NaN where a bin is empty.

    Args:
        count: responses in the bin.
        predicted: their mean probability.
        right: the share of them that is right.
    """

    count: np.ndarray
    predicted: np.ndarray
    right: np.ndarray


def reliability(p: np.ndarray, labels: np.ndarray, bins: int = BINS) -> Reliability:
    p, labels = _known(p, labels)
    where = np.minimum((p * bins).astype(int), bins - 1)
    count = np.bincount(where, minlength=bins)
    with np.errstate(invalid="ignore"):
        predicted = np.bincount(where, p, bins) / count
        right = np.bincount(where, labels, bins) / count
    return Reliability(count, predicted, right)


def ece(p: np.ndarray, labels: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error (Naeini et al. 2015): the mean gap between probability and truth over `bins`."""
    found = reliability(p, labels, bins)
    return float(np.nansum(found.count * np.abs(found.predicted - found.right)) / found.count.sum())


@dataclasses.dataclass
class Recalibration:
    """p -> sigmoid(slope logit(p) + intercept): Platt scaling; temperature scaling where the intercept is 0."""

    slope: float = 1.0
    intercept: float = 0.0

    @classmethod
    def fit(cls, p: np.ndarray, labels: np.ndarray, *, intercept: bool = True) -> Recalibration:
        """By maximum likelihood, with a weak pull to the identity, so that separable labels have a solution.

        ValueError where only one class is labelled.
        """
        p, labels = _known(p, labels)
        if labels.min() == labels.max():
            raise ValueError("recalibration needs labels of both classes")
        x, free = np.stack([_logits(p), np.ones(len(p))], axis=1), 1 + intercept
        found = logistic_regression(x[:, :free], labels, np.array([1.0, 1e-3])[:free], np.array([1.0, 0.0])[:free])
        return cls(float(found[0]), float(found[1]) if intercept else 0.0)

    def __call__(self, p: np.ndarray) -> np.ndarray:
        return sigmoid(self.slope * _logits(p) + self.intercept)


def bootstrap(
    statistic: Callable[[np.ndarray], float], problems: int, *, draws: int = 1000, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of a statistic over problems drawn anew, whole: responses to one problem are not independent.

    Args:
        statistic: a number from [problems] the problems drawn; NaN is left out. The interval is NaN where all are.
    """
    if not 0 < level < 1:
        raise ValueError(f"level is the share of draws within the interval, above 0 and below 1: got {level}")
    rng = np.random.default_rng(seed)
    found = [statistic(rng.integers(0, problems, problems)) for _ in range(draws)]
    if np.isnan(found).all():
        return float("nan"), float("nan")
    low, high = np.nanquantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _logits(p: np.ndarray) -> np.ndarray:
    return logit(np.clip(p, EDGE, 1 - EDGE))


def _known(p: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    p, labels = np.asarray(p, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    if p.shape != labels.shape:
        raise ValueError(f"probabilities are {p.shape} and labels {labels.shape}")
    both = ~np.isnan(p) & ~np.isnan(labels)
    if not both.any():
        raise ValueError("no response has both a probability and a label")
    p, labels = p[both], labels[both]
    if p.min() < 0 or p.max() > 1:
        raise ValueError(f"probabilities lie in [0, 1]: these go from {p.min():g} to {p.max():g}")
    if labels.min() < 0 or labels.max() > 1:
        raise ValueError(f"labels lie in [0, 1]: these go from {labels.min():g} to {labels.max():g}")
    return p, labels
