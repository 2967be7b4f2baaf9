"""Selection among the responses to a problem.

Arrays are [problems, responses]. A response without a probability (NaN) ranks below all others; ties are broken at
random, and accuracies are expectations over them.
"""

import numpy as np


def best_of(p: np.ndarray) -> np.ndarray:
    """[problems] index of the most probable response, the first of equals; -1 if none has a probability."""
    filled = np.where(np.isnan(p), -np.inf, p)
    return np.where(np.isnan(p).all(1), -1, filled.argmax(1))


def selection_accuracy(p: np.ndarray, labels: np.ndarray) -> float:
    """Fraction of problems whose most probable response is right; label NaN for absent or unknown.

    Raises:
        ValueError: no problem has labels.
    """
    right = selected_right(p, labels)
    if np.isnan(right).all():
        raise ValueError("no problem has labels: selection accuracy is undefined")
    return float(np.nanmean(right))


def selected_right(p: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """[problems] probability that the selected response is right; NaN for a problem without labels."""
    filled = np.where(np.isnan(p), -1.0, p)
    top = np.where(np.isnan(labels), -2.0, filled).max(1, keepdims=True)
    ties = (filled == top) & ~np.isnan(labels)
    with np.errstate(invalid="ignore"):
        return np.where(ties, np.nan_to_num(labels), 0.0).sum(1) / ties.sum(1)
