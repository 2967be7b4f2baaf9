"""Aggregators on verdicts (accept or reject), with two rates per verifier."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import ClassVar

import numpy as np
from scipy.special import expit as sigmoid
from scipy.special import logit

from .aggregator import Aggregator, Data
from .binned import estimate_balance
from .means import rank_means
from .normalise import NormalScores, thresholds, verdicts

CLIP = 0.01  # rates and class balance lie at least this far from 0 and 1: no verdict is certain


@dataclasses.dataclass
class VerdictModel(Aggregator):
    """Binarise, drop one-sided verifiers, estimate rates (`estimate`), and combine by naive Bayes.

    Args:
        class_balance: pi, the fraction of right responses; estimated by the binned Dawid-Skene model if not given.
        threshold: lowest accepted score; None takes each verifier's (1 - pi) quantile.
        marginals: verifiers that accept a fraction outside these are dropped; by default .2 to .8 with a threshold,
            and no limits without, where each accepts the fraction pi as nearly as its ties allow.
    """

    class_balance: float | None = None
    threshold: float | None = None
    marginals: tuple[float, float] | None = None

    LEARNED: ClassVar[tuple[str, ...]] = ("cuts", "used", "mu", "balance", "moments", "known", "swapped")

    def learn(self, data: Data) -> None:
        """Turn scores into verdicts, and estimate the verifiers' rates from their moments."""
        balance = self.class_balance
        if balance is None:
            balance = min(max(estimate_balance(data.x, data.problem), CLIP), 1 - CLIP)
        self.balance = np.array(balance)
        self.report.class_balance = float(balance)
        self.cuts = thresholds(data.x, float(balance), self.threshold)
        # A verifier that accepts nearly all or nearly nothing says little, and makes the moments singular.
        share = np.nanmean(verdicts(data.x, self.cuts), axis=0)
        low, high = self.marginals or ((0.2, 0.8) if self.threshold is not None else (0.0, 1.0))
        self.used = (share >= low) & (share <= high) & (share > 0) & (share < 1)
        for name, accepted, used in zip(data.names, share, self.used, strict=True):
            if not used:
                bounds = f"{low:.0%} to {high:.0%}"
                self.report.dropped[name] = f"it accepts {accepted:.0%} of the responses, outside {bounds}"
        m = int(self.used.sum())
        if m < 3:
            raise ValueError(
                f"{m} verifiers accept between {low:.0%} and {high:.0%} of the responses, 3 are needed: "
                "give another threshold or other marginals"
            )
        self.moments, self.known, self.swapped = np.zeros((2 * m, 2 * m)), np.zeros((m, m)), np.array(False)
        self.mu: np.ndarray = np.zeros((2 * m, 2))
        self.update(data)
        u = rank_means(NormalScores.fit(data.x)(data.x))
        if self.posterior(data) @ (u - u.mean()) < 0:
            # The moments do not identify the classes; most verifiers are better than chance.
            self.swapped = np.array(True)
            self.mu = self.mu[:, ::-1]
            self._report_rates(data)

    def update(self, data: Data) -> None:
        """Accumulate second moments of [accepts, rejects] and counts of judged pairs, then estimate."""
        filled_verdicts = self.filled(verdicts(data.x, self.cuts)[:, self.used])
        indicators = np.concatenate([filled_verdicts == 1, filled_verdicts == 0], axis=1).astype(np.float64)
        judged = (~np.isnan(filled_verdicts)).astype(np.float64)
        self.moments = self.moments + indicators.T @ indicators
        self.known = self.known + judged.T @ judged
        mu = np.clip(self.estimate(), CLIP, 1 - CLIP)
        self.mu = mu[:, ::-1] if self.swapped else mu
        self._report_rates(data)

    @abstractmethod
    def estimate(self) -> np.ndarray:
        """mu [2 used verifiers, 2] from `moments`, `known` and `balance`: P(verdict | class), rows (verifier i rejects,
        i accepts), columns (wrong, right)."""

    def _report_rates(self, data: Data) -> None:
        names = [name for name, used in zip(data.names, self.used, strict=True) if used]
        rejects, accepts = self._evidence()
        for name, tpr, tnr, weight in zip(names, self.mu[1::2, 1], self.mu[0::2, 0], accepts - rejects, strict=True):
            self.report.verifiers[name].update(weight=float(weight), tpr=float(tpr), tnr=float(tnr))

    def posterior(self, data: Data) -> np.ndarray:
        """[responses] probability by Bayes' rule from verdicts."""
        filled_verdicts = self.filled(verdicts(data.x, self.cuts)[:, self.used])
        rejects, accepts = self._evidence()
        return sigmoid((filled_verdicts == 1) @ accepts + (filled_verdicts == 0) @ rejects + logit(float(self.balance)))

    def _evidence(self) -> np.ndarray:
        """[2, used verifiers] log ratios of a rejection and of an acceptance."""
        return (np.log(self.mu[:, 1]) - np.log(self.mu[:, 0])).reshape(-1, 2).T

    def filled(self, verdicts_of_used: np.ndarray) -> np.ndarray:
        """Verdicts [responses, used verifiers] with missing ones replaced; here they stay NaN and carry no evidence."""
        return verdicts_of_used


@dataclasses.dataclass
class PublishedWeaver(VerdictModel):
    """Moment matching (Ratner et al. 2019, as in Saad-Falcon et al. 2025): with mu[i a, y] = P(verifier i says a | y),
    O the second moments of all (i, a) and P = diag(1 - pi, pi), minimise

        |off-diagonal blocks of (O - mu P mu')|^2 + |mu P 1 - diag O|^2 + 10 |sum over a of mu - 1|^2

    As in the public code, a missing verdict counts as a rejection, and with its schedule (1,000 steps of 1e-5, momentum
    .9, random start) the result depends on the seed. The posterior is naive Bayes with all four entries of a
    verifier's mu, clipped to [.01, .99]; they need not sum to 1 over a.

    Args:
        converged: minimise to convergence, with larger steps.
        seed: of the start.
    """

    converged: bool = False
    seed: int = 0

    def estimate(self) -> np.ndarray:
        """[verifiers] true-positive rates by the published objective and schedule."""
        m, pi = len(self.known), float(self.balance)
        # Missing verdicts are rejections: every moment follows from those of acceptance.
        accept_both = self.moments[:m, :m] / float(self.known[0, 0])
        accept = np.diag(accept_both)
        # Rows and columns alternate: rejects, accepts.
        o = np.empty((2 * m, 2 * m))
        o[1::2, 1::2] = accept_both
        o[0::2, 1::2] = accept - accept_both
        o[1::2, 0::2] = accept[:, None] - accept_both
        o[0::2, 0::2] = 1 - accept - accept[:, None] + accept_both
        mu = minimise(o, pi, converged=self.converged, seed=self.seed)
        self.report.details["loss"] = loss(mu, o, pi)
        return mu

    def update(self, data: Data) -> None:
        """Accumulate moments and estimate, with a note in the report where verdicts are missing."""
        note = "missing verdicts counted as rejections, as in the public code"
        if np.isnan(data.x[:, self.used]).any() and note not in self.report.warnings:
            self.report.warnings.append(note)
        super().update(data)

    def filled(self, verdicts_of_used: np.ndarray) -> np.ndarray:
        """Missing verdicts count as rejections."""
        return np.nan_to_num(verdicts_of_used)


def loss(mu: np.ndarray, o: np.ndarray, pi: float) -> float:
    """The objective of `PublishedWeaver` at mu [2 verifiers, 2]."""
    residual, marginal, sums = _parts(mu, o, np.array([1 - pi, pi]))
    return float((residual**2).sum() + (marginal**2).sum() + 10 * (sums**2).sum())


def minimise(o: np.ndarray, pi: float, *, converged: bool, seed: int, precision: float = 0.7) -> np.ndarray:
    """mu [2 verifiers, 2], rows (verifier i rejects, i accepts), columns (wrong, right).

    Args:
        o: [2 verifiers, 2 verifiers] second moments.
        pi: fraction of right responses.
        converged: run until nothing moves, at most 50,000 steps; otherwise the published 1,000.
        seed: of the start's scale.
        precision: P(y | says y) of the start.
    """
    p = np.array([1 - pi, pi])
    mu = np.zeros((len(o), 2))
    for y in (0, 1):
        mu[y::2, y] = np.clip(np.diag(o)[y::2] * precision / p[y], 0, 1)
    mu *= np.random.RandomState(seed).random_sample()
    # The curvature grows with the number of verifiers: shrink the steps with it.
    rate, max_steps = (1 / (100 + 4 * len(o)), 50_000) if converged else (1e-5, 1000)
    # Gradient descent with momentum, within [0, 1].
    velocity = np.zeros_like(mu)
    for _ in range(max_steps):
        residual, marginal, sums = _parts(mu, o, p)
        gradient = -4 * residual @ mu * p + 2 * marginal[:, None] * p + 20 * np.repeat(sums, 2, axis=0)
        velocity = 0.9 * velocity + gradient
        moved = np.clip(mu - rate * velocity, 0, 1)
        step, mu = np.abs(moved - mu).max(), moved
        if converged and step < 1e-9:
            break
    return mu


def _parts(mu: np.ndarray, o: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The three terms of the objective before squaring."""
    residual = o - (mu * p) @ mu.T
    n = np.arange(len(mu))
    residual[n, n] = residual[n, n ^ 1] = 0.0
    return residual, mu @ p - np.diag(o), mu.reshape(-1, 2, 2).sum(1) - 1


MIN_COVARIANCE = 1e-4  # covariances below this are not divided by


@dataclasses.dataclass
class MedianTriplets(VerdictModel):
    """Closed-form rates from triplets (Fu et al. 2020; the medians of Chen et al. 2021).

    Under conditional independence the covariance of two verifiers is c_i c_j, so c_i^2 = C_ij C_ik / C_jk for every
    j, k: the median over them is taken. Moments are over the responses that both of a pair judged.
    """

    def estimate(self) -> np.ndarray:
        """[verifiers] true-positive rates in closed form, the median over pairs of others (Fu et al. 2020)."""
        m, pi = len(self.known), float(self.balance)
        accept = np.diag(self.moments)[:m] / np.diag(self.known)
        pairs = np.maximum(self.known, 1)
        yes = self.moments[:m, :m] / pairs
        # Acceptance rates over the same responses: those that the other of a pair judged too.
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
        usable = (j != i) & (k != i) & (np.abs(between) >= MIN_COVARIANCE)
        products = covariance[i, j[usable]] * covariance[i, k[usable]] / between[usable]
        products = products[products > 0]
        out[i] = np.sqrt(np.median(products)) if len(products) else 0.0
    return out


def signed(size: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Signs for |c_i|: a verifier that opposes the others, weighted by size, is worse than chance; most are better."""
    off_diagonal = covariance - np.diag(np.diag(covariance))
    sign = np.ones(len(size))
    for _ in range(10):
        sign = np.where(off_diagonal @ (sign * size) < 0, -1.0, 1.0)
    return size * (sign if (sign * size).sum() >= 0 else -sign)
