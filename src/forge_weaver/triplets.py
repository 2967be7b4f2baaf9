"""The method of moments over triplets of verifiers."""

from __future__ import annotations

import dataclasses

import numpy as np

from .verdict_model import VerdictModel

SMALLEST = 1e-4


@dataclasses.dataclass
class MedianTriplets(VerdictModel):
    """Closed-form rates from triplets (Fu et al. 2020; the medians of Chen et al. 2021).

    Under conditional independence the covariance of two verifiers is c_i c_j, so c_i^2 = C_ij C_ik / C_jk for every
    j, k: the median over them is taken. Moments are over the responses that both of a pair judged.

    Args: as of `PublishedWeaver`.
    """

    class_balance: float | None = None
    threshold: float | None = None
    marginals: tuple[float, float] | None = None

    def estimate(self) -> np.ndarray:
        m, pi = len(self.known), float(self.balance)
        accept = np.diag(self.moments)[:m] / np.diag(self.known)
        pairs = np.maximum(self.known, 1)
        yes = self.moments[:m, :m] / pairs
        # Of the same responses: what each of a pair accepts where the other judged too.
        alone = (self.moments[:m, :m] + self.moments[:m, m:]) / pairs
        c = signed(median_products(yes - alone * alone.T), yes - alone * alone.T)
        # Cov(accepts, right) = c sd(right); P(accepts | y) follows.
        covariance = c * np.sqrt(pi * (1 - pi))
        yes_of = np.stack([accept - covariance / (1 - pi), accept + covariance / pi], axis=1)
        return np.stack([1 - yes_of, yes_of], axis=1).reshape(-1, 2)


def median_products(covariance: np.ndarray) -> np.ndarray:
    """[verifiers] |c_i| as the median over pairs j < k of sqrt(C_ij C_ik / C_jk), of those that are positive."""
    m = len(covariance)
    j, k = np.triu_indices(m, 1)
    between = covariance[j, k]
    out = np.zeros(m)
    for i in range(m):
        usable = (j != i) & (k != i) & (np.abs(between) >= SMALLEST)
        products = covariance[i, j[usable]] * covariance[i, k[usable]] / between[usable]
        products = products[products > 0]
        out[i] = np.sqrt(np.median(products)) if len(products) else 0.0
    return out


def signed(size: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """A verifier that goes against the others, weighted by their size, is worse than chance; most are better."""
    others = covariance - np.diag(np.diag(covariance))
    sign = np.ones(len(size))
    for _ in range(10):
        sign = np.where(others @ (sign * size) < 0, -1.0, 1.0)
    return size * (sign if (sign * size).sum() >= 0 else -sign)
