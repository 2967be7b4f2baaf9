"""Scores on a common scale. What is learned from one table is frozen: new scores are read on the scale of the old."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri

KNOTS = 1024


def mid_ranks(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values of a column without NaN, rising, and the share of it below each, half of equals counted."""
    values, counts = np.unique(column, return_counts=True)
    return values, (np.cumsum(counts) - counts / 2) / len(column)


class NormalScores:
    """Each verifier's scores as quantiles of a standard normal distribution, by its empirical distribution function.

    Ties get their middle rank, values between known ones are interpolated, those outside get the score of the
    outermost. At most KNOTS points a verifier are kept.

    Attributes:
        values, heights: [verifiers, knots] points of the functions, the last repeated to fill a row.
    """

    def __init__(self, values: np.ndarray, heights: np.ndarray) -> None:
        self.values, self.heights = values, heights

    @classmethod
    def fit(cls, x: np.ndarray) -> NormalScores:
        """From [responses, verifiers] with NaN for missing; no column without scores."""
        points = []
        for column in x.T:
            values, ranks = mid_ranks(column[~np.isnan(column)])
            heights = ndtri(ranks)
            if len(values) > KNOTS:
                # Half of the points evenly by rank, half by height, for the tails.
                even = [np.searchsorted(y, np.linspace(y[0], y[-1], KNOTS // 2)) for y in (ranks, heights)]
                kept = np.unique(even)
                values, heights = values[kept], heights[kept]
            points.append((values, heights))
        width = max(len(values) for values, _ in points)
        filled = [[np.pad(side, (0, width - len(side)), mode="edge") for side in pair] for pair in points]
        return cls(*(np.array(side) for side in zip(*filled, strict=True)))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[responses, verifiers] normal scores, NaN where missing."""
        out = np.empty(x.shape)
        for v, (values, heights) in enumerate(zip(self.values, self.heights, strict=True)):
            # np.interp says NaN for NaN.
            out[:, v] = np.interp(x[:, v], values, heights)
        return out


def scattered(x: np.ndarray, names: Sequence[str], seed: int) -> np.ndarray:
    """Normal scores of [responses, verifiers] with ties broken by chance, so that each column is exactly normal.

    A mixture of Gaussians takes the lumps of a judge's few verdicts for its classes; without lumps it cannot.
    The chance is each name's own, so that the order of the columns does not matter.
    """
    out = np.full(x.shape, np.nan)
    for v, (name, column) in enumerate(zip(names, x.T, strict=True)):
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        known = np.flatnonzero(~np.isnan(column))
        order = np.lexsort((rng.random(len(known)), column[known]))
        out[known[order], v] = ndtri((np.arange(len(known)) + 0.5) / len(known))
    return out


def imputed(z: np.ndarray, precision: np.ndarray | None = None, rounds: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """[responses, verifiers] with what is missing regressed on the rest, and the precision matrix that this took.

    Each round sets every missing value to its expectation under a Gaussian given all others (Jacobi iteration).

    Args:
        precision: that of the fit; estimated along the way where not given.
    """
    missing = np.isnan(z)
    x = np.where(missing, 0.0, z)
    frozen = precision is not None
    for _ in range(rounds if missing.any() else 1):
        if not frozen:
            # A little on the diagonal: columns that say the same have no inverse.
            precision = np.linalg.inv(np.atleast_2d(np.cov(x.T)) + 0.05 * np.eye(x.shape[1]))
        assert precision is not None
        if missing.any():
            x = np.where(missing, x - (x @ precision) / np.diag(precision), x)
    assert precision is not None
    return x, precision


def min_max(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each column's least and largest value."""
    return np.nanmin(x, axis=0), np.nanmax(x, axis=0)


def bin_edges(x: np.ndarray, bins: int) -> np.ndarray:
    """[verifiers, bins - 1] rising edges that split each column into equal shares, infinite where fewer are needed.

    A column of at most `bins` different values gets one bin for each.
    """
    edges = np.full((x.shape[1], bins - 1), np.inf)
    for v, column in enumerate(x.T):
        known = np.sort(column[~np.isnan(column)])
        distinct = known[np.flatnonzero(np.diff(known, prepend=np.nan) != 0)]
        if len(distinct) <= bins:
            found = (distinct[1:] + distinct[:-1]) / 2
        else:
            found = np.unique(np.quantile(known, np.arange(1, bins) / bins))
            found = found[found > known[0]]
        edges[v, : len(found)] = found
    return edges


def to_bins(x: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """[verifiers, responses] the bin of each score, from 0; the number of bins where it is missing."""
    codes = np.empty(x.shape[::-1], dtype=np.intp)
    for v, (column, edge) in enumerate(zip(x.T, edges, strict=True)):
        codes[v] = np.searchsorted(edge, column, side="right")
        codes[v, np.isnan(column)] = edges.shape[1] + 1
    return codes


def thresholds(x: np.ndarray, accept: float, at: float | None = None) -> np.ndarray:
    """[verifiers] the score from which a verifier accepts: `at`, or the value that the share `accept` reaches.

    A column of two values is already a verdict: the higher one accepts.
    """
    found = np.empty(x.shape[1])
    for v, column in enumerate(x.T):
        known = column[~np.isnan(column)]
        low, high = known.min(), known.max()
        if ((known == low) | (known == high)).all():
            found[v] = (low + high) / 2
        elif at is not None:
            found[v] = at
        else:
            cut = np.quantile(known, 1 - accept)
            # Of many equal scores at the cut, take in or leave out all: whichever comes nearer to the share.
            above = known[known > cut].min() if (known > cut).any() else cut
            shares = [(known >= cut).mean(), (known >= above).mean()]
            found[v] = cut if abs(shares[0] - accept) <= abs(shares[1] - accept) and cut > low else above
    return found


def verdicts(x: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """[responses, verifiers] 1 where a score reaches its threshold, 0 where not, NaN where it is missing."""
    return np.where(np.isnan(x), np.nan, x >= cuts)


def family_means(x: np.ndarray, families: np.ndarray) -> np.ndarray:
    """[responses, families] the mean score within each family, of those not missing; NaN where all are.

    Args:
        x: [responses, verifiers] on a common scale.
        families: [verifiers] numbers from 0.
    """
    member = np.eye(families.max() + 1)[families]
    counts = (~np.isnan(x)) @ member
    with np.errstate(invalid="ignore"):
        return np.where(counts > 0, np.nan_to_num(x) @ member / counts, np.nan)
