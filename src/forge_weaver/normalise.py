"""Scores on a common scale. Scales learned from one table are frozen and applied to later scores."""

import zlib
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri

# Points of a distribution function, half of them evenly by rank: at most 1 / 512 of the scores lie between two.
KNOTS = 1024


class NormalScores:
    """Mapping of each verifier's scores to standard normal quantiles, by the empirical distribution function.

    Ties get their middle rank; values between known ones are interpolated, those outside are clamped. At most KNOTS
    points per verifier are kept.

    Args:
        values: [verifiers, knots] scores, increasing; the last one is repeated to fill a row.
        heights: [verifiers, knots] normal quantile of each.
    """

    def __init__(self, values: np.ndarray, heights: np.ndarray) -> None:
        self.values, self.heights = values, heights

    @classmethod
    def fit(cls, x: np.ndarray) -> "NormalScores":
        """Return the mapping of the scores x [responses, verifiers], NaN for missing; each column needs a score."""
        points = []
        for column in x.T:
            values, counts = np.unique(column[~np.isnan(column)], return_counts=True)
            ranks = (np.cumsum(counts) - counts / 2) / counts.sum()
            heights = ndtri(ranks)
            if len(values) > KNOTS:
                # Half of the points evenly by rank; half by height, for the tails.
                even = [np.searchsorted(y, np.linspace(y[0], y[-1], KNOTS // 2)) for y in (ranks, heights)]
                knots = np.unique(even)
                values, heights = values[knots], heights[knots]
            points.append((values, heights))
        width = max(len(values) for values, _ in points)
        filled = [[np.pad(side, (0, width - len(side)), mode="edge") for side in pair] for pair in points]
        return cls(*(np.array(side) for side in zip(*filled, strict=True)))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return the normal scores of x, [responses, verifiers], NaN where missing."""
        # np.interp gives NaN for NaN.
        return np.stack([np.interp(*points) for points in zip(x.T, self.values, self.heights, strict=True)], axis=1)


def scatter_scores(x: np.ndarray, names: Sequence[str], seed: int) -> np.ndarray:
    """Return normal scores with ties broken at random, [responses, verifiers], so that each column is exactly normal.

    Otherwise a Gaussian mixture mistakes the clusters of a judge's few verdicts for its classes.

    Args:
        x: [responses, verifiers] scores, NaN for missing, which stays.
        names: of the verifiers; they and `seed` seed the random numbers, so the order of columns does not matter.
    """
    normal = np.full(x.shape, np.nan)
    for v, (name, column) in enumerate(zip(names, x.T, strict=True)):
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        scored = np.flatnonzero(~np.isnan(column))
        order = np.lexsort((rng.random(len(scored)), column[scored]))
        normal[scored[order], v] = ndtri((np.arange(len(scored)) + 0.5) / len(scored))
    return normal


def impute_scores(z: np.ndarray, precision: np.ndarray | None = None, rounds: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Return scores with the missing ones imputed by regression, [responses, verifiers], and the precision matrix used.

    Each round sets every missing value to its expectation under a Gaussian given all others (Jacobi iteration).

    Args:
        z: [responses, verifiers] normal scores, NaN for missing.
        precision: [verifiers, verifiers] inverse covariance of a previous fit; estimated in each round if None.
        rounds: of imputation; one suffices to estimate the precision if nothing is missing.
    """
    missing = np.isnan(z)
    x, used = np.where(missing, 0.0, z), np.zeros(0) if precision is None else precision
    for _ in range(rounds if missing.any() else 1):
        if precision is None:
            # Regularised: identical columns make the covariance singular.
            used = np.linalg.inv(np.atleast_2d(np.cov(x.T)) + 0.05 * np.eye(x.shape[1]))
        x = np.where(missing, x - (x @ used) / np.diag(used), x)
    return x, used


def bin_edges(x: np.ndarray, bins: int) -> np.ndarray:
    """Return the edges between bins, [verifiers, bins - 1]: increasing quantiles, padded with infinity.

    A column of x [responses, verifiers] with at most `bins` distinct values gets one bin for each.
    """
    edges = np.full((x.shape[1], bins - 1), np.inf)
    for v, column in enumerate(x.T):
        scores = np.sort(column[~np.isnan(column)])
        distinct = scores[np.flatnonzero(np.diff(scores, prepend=np.nan) != 0)]
        if len(distinct) <= bins:
            inner_edges = (distinct[1:] + distinct[:-1]) / 2
        else:
            inner_edges = np.unique(np.quantile(scores, np.arange(1, bins) / bins))
            inner_edges = inner_edges[inner_edges > scores[0]]
        edges[v, : len(inner_edges)] = inner_edges
    return edges


def to_bins(x: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the bin of each score, [verifiers, responses], from 0; a missing score's is the number of bins.

    Args:
        x: [responses, verifiers] scores, NaN for missing.
        edges: [verifiers, bins - 1], as `bin_edges` returns them.
    """
    codes = np.empty(x.shape[::-1], dtype=np.intp)
    for v, (column, edge) in enumerate(zip(x.T, edges, strict=True)):
        codes[v] = np.searchsorted(edge, column, side="right")
        codes[v, np.isnan(column)] = edges.shape[1] + 1
    return codes


def find_thresholds(x: np.ndarray, accept: float) -> np.ndarray:
    """Return each verifier's lowest accepted score, [verifiers], such that about the fraction `accept` is accepted.

    Args:
        x: [responses, verifiers] scores, NaN for missing. A column of two values is already a verdict: its higher value
            accepts, whatever `accept` is.
    """
    lowest = np.empty(x.shape[1])
    for v, column in enumerate(x.T):
        scores = column[~np.isnan(column)]
        low, high = scores.min(), scores.max()
        if ((scores == low) | (scores == high)).all():
            lowest[v] = (low + high) / 2
        else:
            # Scores tied at the quantile are all accepted, or all rejected by taking the next score as threshold.
            quantile = np.quantile(scores, 1 - accept)
            next_score = scores[scores > quantile].min() if (scores > quantile).any() else quantile
            error, next_error = (abs((scores >= cut).mean() - accept) for cut in (quantile, next_score))
            # The threshold whose share is nearer to `accept`; but the lowest score would accept every response.
            lowest[v] = quantile if quantile > low and error <= next_error else next_score
    return lowest


def apply_thresholds(x: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Return verdicts, [responses, verifiers]: 1 where a score reaches its verifier's threshold, else 0; NaN stays.

    >>> apply_thresholds(np.array([[0.2, 5.0], [0.9, np.nan]]), np.array([0.5, 3.0]))
    array([[ 0.,  1.],
           [ 1., nan]])
    """
    return np.where(np.isnan(x), np.nan, x >= cuts)
