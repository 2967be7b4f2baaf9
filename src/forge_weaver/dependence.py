"""Whether verifiers are conditionally independent, and which are not."""

from __future__ import annotations

import numpy as np

FEWEST = 30


def residual_correlation(normal: np.ndarray, r: np.ndarray) -> tuple[float, np.ndarray]:
    """Correlations between verifiers within the classes, and their root mean square less what chance makes.

    Responses are weighted by their posterior. If a conditionally independent model is right, the expectation of every
    weighted product within a class is 0, however uncertain the posteriors are.

    Args:
        normal: [responses, verifiers] normal scores, NaN where missing.
        r: [responses] posterior of being right.

    Returns:
        The root mean square off the diagonal, and the matrix; NaN of pairs with fewer than FEWEST common responses,
        and NaN altogether where no pair has more.
    """
    known = ~np.isnan(normal)
    x = np.where(known, normal, 0.0)
    weights = known.astype(np.float64)
    covariance = np.zeros((x.shape[1],) * 2)
    for w in (r, 1 - r):
        mean = (w @ x) / np.maximum(w @ weights, 1e-9)
        deviation = (x - mean) * weights
        covariance += (deviation * w[:, None]).T @ deviation
    pairs = weights.T @ weights
    covariance /= np.maximum(pairs, 1)
    spread = np.sqrt(np.diag(covariance)) + 1e-12
    matrix = np.where(pairs >= FEWEST, covariance / spread / spread[:, None], np.nan)
    off = ~np.eye(len(matrix), dtype=bool) & ~np.isnan(matrix)
    if not off.any():
        return float("nan"), matrix
    excess = (matrix[off] ** 2 - 1 / pairs[off]).mean()
    return float(np.sqrt(max(excess, 0.0))), matrix


def within_problems(a: np.ndarray, b: np.ndarray, problem: np.ndarray) -> float:
    """The correlation of two values per response once each problem's mean is taken off; 0 where one does not vary."""
    sizes = np.bincount(problem)
    a, b = (x - (np.bincount(problem, x) / np.maximum(sizes, 1))[problem] for x in (a, b))
    spread = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / spread) if spread > 0 else 0.0


def problem_correlation(residual: np.ndarray, problem: np.ndarray) -> float:
    """The intraclass correlation of [responses, verifiers] residuals within problems, the median over verifiers.

    0 where the responses to a problem are alike in nothing but how many are right; NaN where each problem has one.
    """
    sizes = np.bincount(problem)
    pairs = (sizes * (sizes - 1)).sum()
    if pairs == 0:
        return float("nan")
    square = (residual**2).sum(0)
    sums = np.stack([np.bincount(problem, column) for column in residual.T])
    between = ((sums**2).sum(1) - square) / pairs
    return float(np.median(between / (square / len(residual) + 1e-12)))
