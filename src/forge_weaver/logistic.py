"""Penalised logistic regression."""

from __future__ import annotations

import numpy as np

from .prior import sigmoid


def logistic_regression(
    x: np.ndarray, labels: np.ndarray, pull: np.ndarray, centre: np.ndarray, steps: int = 50
) -> np.ndarray:
    """[columns] the maximum of the likelihood less pull / 2 (line - centre)^2, by Newton's method with halved steps.

    Args:
        x: [responses, columns]
        labels: [responses] 1 or 0.
        pull, centre: [columns], pull positive: then the maximum is one point, separable labels or not.
    """
    sign = 2 * labels - 1

    def loss(line: np.ndarray) -> float:
        return float(np.logaddexp(0, -sign * (x @ line)).sum() + 0.5 * (pull * (line - centre) ** 2).sum())

    line = np.array(centre, dtype=np.float64)
    now = loss(line)
    for _ in range(steps):
        p = sigmoid(x @ line)
        gradient = x.T @ (p - labels) + pull * (line - centre)
        step = np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + np.diag(pull), gradient)
        size = 1.0
        while (then := loss(line - size * step)) > now and size > 1e-6:
            size /= 2
        if now - then < 1e-10 * (1 + abs(now)):
            break
        line, now = line - size * step, then
    return line
