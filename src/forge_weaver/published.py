"""The published method of Weaver, by moments of verdicts."""

import dataclasses
from typing import ClassVar

import numpy as np
from scipy.special import expit as sigmoid
from scipy.special import logit

from .aggregator import Aggregator, Data
from .binned import estimate_balance
from .means import rank_means
from .normalise import NormalScores, apply_thresholds, find_thresholds

CLIP = 0.01  # rates and class balance lie at least this far from 0 and 1: no verdict is certain


@dataclasses.dataclass
class PublishedWeaver(Aggregator):
    """Verdicts (accept or reject) with two rates per verifier, by moment matching (Ratner et al. 2019, as in
    Saad-Falcon et al. 2025): with mu[i a, y] = P(verifier i says a | y), O the second moments of all (i, a) and
    P = diag(1 - pi, pi), minimise

        |off-diagonal blocks of (O - mu P mu')|^2 + |mu P 1 - diag O|^2 + 10 |sum over a of mu - 1|^2

    A verifier accepts scores from its (1 - pi) quantile on, as nearly as its ties allow. As in the public code, a
    missing verdict counts as a rejection, and with its schedule (1,000 steps of 1e-5, momentum .9, random start) the
    result depends on the seed. The posterior is naive Bayes with all four entries of a verifier's mu, clipped to
    [.01, .99]; they need not sum to 1 over a.

    Args:
        class_balance: pi, the fraction of right responses; estimated by the binned Dawid-Skene model if not given.
        converged: minimise to convergence, with larger steps.
        seed: of the start.
    """

    class_balance: float | None = None
    converged: bool = False
    seed: int = 0

    LEARNED: ClassVar[tuple[str, ...]] = ("cuts", "used", "mu", "balance")

    def learn(self, data: Data) -> None:
        """Turn scores into verdicts, and estimate the verifiers' rates from their moments."""
        balance = self.class_balance
        if balance is None:
            balance = min(max(estimate_balance(data.x, data.problem), CLIP), 1 - CLIP)
        self.balance = np.array(balance)
        self.report.class_balance = float(balance)
        self.cuts = find_thresholds(data.x, float(balance))

        # A verifier that accepts all or nothing says nothing, and makes the moments singular.
        share = np.nanmean(apply_thresholds(data.x, self.cuts), axis=0)
        self.used = (share > 0) & (share < 1)
        for name, accepted, used in zip(data.names, share, self.used, strict=True):
            if not used:
                self.report.dropped[name] = f"it accepts {accepted:.0%} of the responses"
        m = int(self.used.sum())
        if m < 3:
            raise ValueError(f"{m} verifiers accept some of the responses and reject others, 3 are needed")
        if np.isnan(data.x[:, self.used]).any():
            self.report.warnings.append("missing verdicts counted as rejections, as in the public code")

        accepts = self._accepted_responses(data).astype(np.float64)
        # Missing verdicts are rejections: every moment follows from acceptance's.
        pi = float(self.balance)
        both = accepts.T @ accepts / len(accepts)
        accept = np.diag(both)

        # Rows and columns alternate: rejects, accepts.
        o = np.empty((2 * m, 2 * m))
        o[1::2, 1::2] = both
        o[0::2, 1::2] = accept - both
        o[1::2, 0::2] = accept[:, None] - both
        o[0::2, 0::2] = 1 - accept - accept[:, None] + both
        mu = minimise_loss(o, pi, converged=self.converged, seed=self.seed)
        self.report.details["loss"] = published_loss(mu, o, pi)

        mu = np.clip(mu, CLIP, 1 - CLIP)
        self.mu = mu
        u = rank_means(NormalScores.fit(data.x)(data.x))
        if self.posterior(data) @ (u - u.mean()) < 0:
            # The moments do not identify the classes; most verifiers are better than chance.
            self.mu = mu[:, ::-1]
        names = [name for name, used in zip(data.names, self.used, strict=True) if used]
        rejects, accepts = self._log_ratios()

        for name, tpr, tnr, weight in zip(names, self.mu[1::2, 1], self.mu[0::2, 0], accepts - rejects, strict=True):
            self.report.verifiers[name].update(weight=float(weight), tpr=float(tpr), tnr=float(tnr))

    def posterior(self, data: Data) -> np.ndarray:
        """[responses] probability by Bayes' rule from verdicts."""
        accepts = self._accepted_responses(data)
        rejecting, accepting = self._log_ratios()
        return sigmoid(accepts @ accepting + ~accepts @ rejecting + logit(float(self.balance)))

    def _accepted_responses(self, data: Data) -> np.ndarray:
        """[responses, used verifiers] whether each accepts."""
        return apply_thresholds(data.x, self.cuts)[:, self.used] == 1

    def _log_ratios(self) -> np.ndarray:
        """[2, used verifiers] log ratios of a rejection and of an acceptance."""
        return (np.log(self.mu[:, 1]) - np.log(self.mu[:, 0])).reshape(-1, 2).T


def published_loss(mu: np.ndarray, o: np.ndarray, pi: float) -> float:
    """Return the objective of `PublishedWeaver` at mu [2 verifiers, 2]."""
    residual, marginal, sums = _loss_terms(mu, o, np.array([1 - pi, pi]))
    return float((residual**2).sum() + (marginal**2).sum() + 10 * (sums**2).sum())


def minimise_loss(o: np.ndarray, pi: float, *, converged: bool, seed: int, precision: float = 0.7) -> np.ndarray:
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
        residual, marginal, sums = _loss_terms(mu, o, p)
        gradient = -4 * residual @ mu * p + 2 * marginal[:, None] * p + 20 * np.repeat(sums, 2, axis=0)
        velocity = 0.9 * velocity + gradient
        moved = np.clip(mu - rate * velocity, 0, 1)
        step, mu = np.abs(moved - mu).max(), moved
        if converged and step < 1e-9:
            break

    return mu


def _loss_terms(mu: np.ndarray, o: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the three terms of the objective before squaring."""
    residual = o - (mu * p) @ mu.T
    n = np.arange(len(mu))
    residual[n, n] = residual[n, n ^ 1] = 0.0
    return residual, mu @ p - np.diag(o), mu.reshape(-1, 2, 2).sum(1) - 1
