"""Selection among the responses to a problem.

Arrays are [problems, responses]. A response without a probability (NaN) ranks below all others; ties are broken at
random, and accuracies are expectations over them.
"""

import numpy as np


def selection_accuracy(p: np.ndarray, labels: np.ndarray) -> float:
    """Return the fraction of problems whose most probable response is right.

    Args:
        p: [problems, responses] probabilities.
        labels: [problems, responses] 1 for right, 0 for wrong, NaN for absent or unknown.

    Raises:
        ValueError: no problem has labels.
    """
    right = selected_right(p, labels)
    if np.isnan(right).all():
        raise ValueError("no problem has labels: selection accuracy is undefined")
    return float(np.nanmean(right))


def selected_right(p: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the probability that each problem's most probable response is right, [problems]; NaN without labels.

    Only labelled responses are selected from. Of equally probable ones each is taken equally often.

    >>> selected_right(np.array([[0.9, 0.9, 0.1]]), np.array([[1.0, 0.0, 1.0]]))
    array([0.5])
    """
    # In rank below every probability: -1 for a labelled response without one, -2 for an unlabelled response.
    filled = np.where(np.isnan(p), -1.0, p)
    top = np.where(np.isnan(labels), -2.0, filled).max(1, keepdims=True)
    ties = (filled == top) & ~np.isnan(labels)
    with np.errstate(invalid="ignore"):
        return np.where(ties, np.nan_to_num(labels), 0.0).sum(1) / ties.sum(1)
