"""Scores on a common scale. Scales learned from one table are frozen and applied to later scores."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri

KNOTS = 1024  # points of a distribution function, half of them evenly by rank: no more than 1 / 512 lies between two


class NormalScores:
    """Each verifier's scores as standard normal quantiles, by its empirical distribution function.

    Ties get their middle rank; values between known ones are interpolated, those outside are clamped. At most KNOTS
    points per verifier are kept.

    Args:
        values, heights: [verifiers, knots] points of the functions, the last one repeated to fill a row.
    """

    def __init__(self, values: np.ndarray, heights: np.ndarray) -> None:
        self.values, self.heights = values, heights

    @classmethod
    def fit(cls, x: np.ndarray) -> NormalScores:
        """Fit to [responses, verifiers], NaN for missing; each column needs a score."""
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
        """[responses, verifiers] normal scores, NaN where missing."""
        # np.interp gives NaN for NaN.
        return np.stack([np.interp(*points) for points in zip(x.T, self.values, self.heights, strict=True)], axis=1)


def scatter_scores(x: np.ndarray, names: Sequence[str], seed: int) -> np.ndarray:
    """Normal scores of [responses, verifiers] with ties broken at random, so that each column is exactly normal.

    Otherwise a Gaussian mixture mistakes the clusters of a judge's few verdicts for its classes. The random numbers are
    seeded by name: the order of the columns does not matter.
    """
    out = np.full(x.shape, np.nan)
    for v, (name, column) in enumerate(zip(names, x.T, strict=True)):
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        scored = np.flatnonzero(~np.isnan(column))
        order = np.lexsort((rng.random(len(scored)), column[scored]))
        out[scored[order], v] = ndtri((np.arange(len(scored)) + 0.5) / len(scored))
    return out


def impute_scores(z: np.ndarray, precision: np.ndarray | None = None, rounds: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Impute the missing values of [responses, verifiers] by regression; also returns the precision matrix used.

    Each round sets every missing value to its expectation under a Gaussian given all others (Jacobi iteration).

    Args:
        precision: matrix of a previous fit; estimated in each round if not given.
    """
    missing = np.isnan(z)
    x, used = np.where(missing, 0.0, z), precision
    for _ in range(rounds if missing.any() else 1):
        if precision is None:
            # Regularised: identical columns make the covariance singular.
            used = np.linalg.inv(np.atleast_2d(np.cov(x.T)) + 0.05 * np.eye(x.shape[1]))
        assert used is not None
        x = np.where(missing, x - (x @ used) / np.diag(used), x)
    assert used is not None
    return x, used


def bin_edges(x: np.ndarray, bins: int) -> np.ndarray:
    """[verifiers, bins - 1] increasing quantile edges, padded with infinity.

    A column of at most `bins` distinct values gets one bin for each.
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
    """[verifiers, responses] bin of each score, from 0; the number of bins for missing."""
    codes = np.empty(x.shape[::-1], dtype=np.intp)
    for v, (column, edge) in enumerate(zip(x.T, edges, strict=True)):
        codes[v] = np.searchsorted(edge, column, side="right")
        codes[v, np.isnan(column)] = edges.shape[1] + 1
    return codes


def find_thresholds(x: np.ndarray, accept: float) -> np.ndarray:
    """[verifiers] lowest accepted score: the quantile that the fraction `accept` reaches.

    A column of two values is already a verdict: the higher one accepts.
    """
    lowest = np.empty(x.shape[1])
    for v, column in enumerate(x.T):
        scores = column[~np.isnan(column)]
        # Two values: already a verdict.
        low, high = scores.min(), scores.max()
        if ((scores == low) | (scores == high)).all():
            lowest[v] = (low + high) / 2
        else:
            cut = np.quantile(scores, 1 - accept)
            # Ties at the cut are all in or all out, whichever is nearer to the share.
            above = scores[scores > cut].min() if (scores > cut).any() else cut
            shares = [(scores >= cut).mean(), (scores >= above).mean()]
            lowest[v] = cut if abs(shares[0] - accept) <= abs(shares[1] - accept) and cut > low else above
    return lowest


def apply_thresholds(x: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """[responses, verifiers] 1 where a score reaches its threshold, else 0; NaN for missing."""
    return np.where(np.isnan(x), np.nan, x >= cuts)


def family_means(x: np.ndarray, families: np.ndarray) -> np.ndarray:
    """[responses, families] mean of x [responses, verifiers] within each family, NaN where all are missing.

    Args:
        families: [verifiers] indices from 0.
    """
    member = np.eye(families.max() + 1)[families]
    counts = (~np.isnan(x)) @ member
    with np.errstate(invalid="ignore"):
        return np.where(counts > 0, np.nan_to_num(x) @ member / counts, np.nan)
