"""Calibration metrics (Brier, log loss, AUC, ECE), Platt recalibration and penalised logistic regression.

Metrics take arrays of one shape, such as [problems, responses], and skip entries whose probability or label is NaN.
Labels are 1 and 0; soft labels in between are allowed except for AUC.

Raises:
    ValueError: the shapes differ, or nothing is left.
"""

import dataclasses

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit as sigmoid, logit

from .table import check_labels

BINS = 15  # as in Guo et al. 2017, so that errors compare with published ones
EDGE = 1e-6  # probabilities are clipped this far from 0 and 1


def logistic_regression(x: np.ndarray, labels: np.ndarray, pull: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """Return the coefficients, [columns], that maximise the log likelihood less pull / 2 (coefficients - centre)^2.

    Args:
        x: [responses, columns] inputs.
        labels: [responses] 0 to 1, soft labels allowed.
        pull: [columns] penalty; positive ones make the maximum unique, also for separable labels.
        centre: [columns] coefficients without a penalty.
    """

    # scikit-learn's regression has one penalty for all columns, centred at 0, and no soft labels.
    def penalised_loss(line: np.ndarray) -> tuple[float, np.ndarray]:
        score = x @ line
        likelihood = (labels * np.logaddexp(0, -score) + (1 - labels) * np.logaddexp(0, score)).sum()
        gradient = x.T @ (sigmoid(score) - labels) + pull * (line - centre)
        return likelihood + 0.5 * (pull * (line - centre) ** 2).sum(), gradient

    def loss_curvature(line: np.ndarray) -> np.ndarray:
        p = sigmoid(x @ line)
        return (x * (p * (1 - p))[:, None]).T @ x + np.diag(pull)

    return minimize(
        penalised_loss, centre, jac=True, hess=loss_curvature, method="trust-exact", options={"gtol": 1e-6}
    ).x


def brier_score(p: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean squared difference of probability and label (Brier 1950).

    >>> brier_score(np.array([0.5, 1.0]), np.array([1, 1]))
    0.125
    """
    p, labels = _drop_unknown(p, labels)
    return float(((p - labels) ** 2).mean())


def log_loss(p: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean negative log likelihood of the labels in nats, with p clipped to [1e-6, 1 - 1e-6]."""
    p, labels = _drop_unknown(p, labels)
    p = np.clip(p, EDGE, 1 - EDGE)
    return float(-(labels * np.log(p) + (1 - labels) * np.log1p(-p)).mean())


def auc(p: np.ndarray, labels: np.ndarray) -> float:
    """Return the area under the ROC curve, ties counted half; NaN if only one class is present."""
    p, labels = _drop_unknown(p, labels)
    check_labels(labels)
    if labels.min() == labels.max():
        return float("nan")
    from sklearn.metrics import roc_auc_score  # takes a second to import

    return float(roc_auc_score(labels, p))


def ece(p: np.ndarray, labels: np.ndarray, bins: int = BINS) -> float:
    """Return the expected calibration error (Naeini et al. 2015).

    It is the mean absolute gap between probability and accuracy in `bins` bins of equal width.

    >>> ece(np.array([0.9, 0.9]), np.array([1, 0]))
    0.4
    """
    p, labels = _drop_unknown(p, labels)
    bin_of = np.minimum((p * bins).astype(int), bins - 1)
    return float(np.abs(np.bincount(bin_of, p, bins) - np.bincount(bin_of, labels, bins)).sum() / len(p))


@dataclasses.dataclass
class Recalibration:
    """Platt scaling: p -> sigmoid(slope logit(p) + intercept)."""

    slope: float = 1.0
    intercept: float = 0.0

    @classmethod
    def fit(cls, p: np.ndarray, labels: np.ndarray) -> "Recalibration":
        """Return the scaling with the highest likelihood of the labels.

        A weak penalty of any difference from the identity ensures that separable labels have a solution.

        Raises:
            ValueError: all labels are of one class.
        """
        p, labels = _drop_unknown(p, labels)
        if labels.min() == labels.max():
            raise ValueError("recalibration needs labels of both classes")
        # Towards slope 1 and intercept 0; the pulls weigh about as much as one response.
        x = np.stack([_to_logits(p), np.ones(len(p))], axis=1)
        slope, intercept = logistic_regression(x, labels, np.array([1.0, 1e-3]), np.array([1.0, 0.0]))
        return cls(float(slope), float(intercept))

    def __call__(self, p: np.ndarray) -> np.ndarray:
        return sigmoid(self.slope * _to_logits(p) + self.intercept)


def _to_logits(p: np.ndarray) -> np.ndarray:
    return logit(np.clip(p, EDGE, 1 - EDGE))


def _drop_unknown(p: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities and labels as one-dimensional arrays, without entries where either is NaN."""
    p, labels = np.asarray(p, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    if p.shape != labels.shape:
        raise ValueError(f"probabilities are {p.shape} and labels {labels.shape}")
    judged = ~np.isnan(p) & ~np.isnan(labels)
    if not judged.any():
        raise ValueError("no response has both a probability and a label")
    return p[judged], labels[judged]
