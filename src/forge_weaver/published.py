"""The published method of Weaver, by moments of verdicts."""

import dataclasses
from typing import ClassVar

import numpy as np
from scipy.special import expit as sigmoid, logit

from .aggregator import Aggregator, Data
from .binned import BinnedDawidSkene
from .means import mean_of_known
from .normalise import NormalScores, apply_thresholds, find_thresholds

CLIP = 0.01  # rates and class balance lie at least this far from 0 and 1: no verdict is certain
SUM_WEIGHT = 10  # of the term that makes each verifier's two rates sum to 1, as published
MOMENTUM = 0.9


@dataclasses.dataclass
class PublishedWeaver(Aggregator):
    """Weaver as published (Saad-Falcon et al. 2025): each verifier's rates of verdicts are fitted to their moments.

    A verdict a is accept or reject, the truth y is right or wrong. With mu[i a, y] = P(verifier i says a | y), O the
    second moments of all (i, a) and P = diag(1 - pi, pi), the fit (Ratner et al. 2019) minimises

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
            balance = min(max(BinnedDawidSkene().fit(data.table).report.class_balance or CLIP, CLIP), 1 - CLIP)
        self.balance = np.array(balance)
        self.report.class_balance = float(balance)
        self.cuts = find_thresholds(data.x, float(balance))

        # A verifier that accepts all or nothing says nothing, and makes the moments singular.
        share = np.nanmean(apply_thresholds(data.x, self.cuts), axis=0)
        self.used = (share > 0) & (share < 1)
        self.report.dropped |= {
            name: f"it accepts {accepted:.0%} of the responses"
            for name, accepted, used in zip(data.names, share, self.used, strict=True)
            if not used
        }
        m = int(self.used.sum())
        if m < 3:
            raise ValueError(f"at least 3 verifiers must accept some responses and reject others, got {m}")
        if np.isnan(data.x[:, self.used]).any():
            self.report.warnings.append("missing verdicts counted as rejections, as in the public code")

        accepts = self._accepted_responses(data).astype(np.float64)
        # A verifier that does not accept rejects, so every moment follows from those of acceptances.
        pi = float(self.balance)
        both_accept = accepts.T @ accepts / len(accepts)
        accept = np.diag(both_accept)

        # Rows and columns alternate: 2 i is "verifier i rejects", 2 i + 1 is "verifier i accepts".
        moments = np.empty((2 * m, 2 * m))
        moments[1::2, 1::2] = both_accept
        moments[0::2, 1::2] = accept - both_accept
        moments[1::2, 0::2] = accept[:, None] - both_accept
        moments[0::2, 0::2] = 1 - accept - accept[:, None] + both_accept
        mu = minimise_loss(moments, pi, converged=self.converged, seed=self.seed)
        self.report.details["loss"] = published_loss(mu, moments, pi)

        # The moments do not tell the classes apart: swap them if right responses would have the lower scores.
        self.mu = np.clip(mu, CLIP, 1 - CLIP)
        rank_mean = mean_of_known(NormalScores.fit(data.x)(data.x))
        if self.posterior(data) @ (rank_mean - rank_mean.mean()) < 0:
            self.mu = self.mu[:, ::-1]

        names = [name for name, used in zip(data.names, self.used, strict=True) if used]
        if_rejects, if_accepts = self._log_ratios()
        self.report.describe(names, weight=if_accepts - if_rejects, tpr=self.mu[1::2, 1], tnr=self.mu[0::2, 0])

    def posterior(self, data: Data) -> np.ndarray:
        """Return each response's probability of being right, [responses], by Bayes' rule from its verdicts."""
        accepts = self._accepted_responses(data)
        if_rejects, if_accepts = self._log_ratios()
        return sigmoid(accepts @ if_accepts + ~accepts @ if_rejects + logit(float(self.balance)))

    def _accepted_responses(self, data: Data) -> np.ndarray:
        """Return whether each verifier in use accepts each response, [responses, used verifiers]."""
        return apply_thresholds(data.x, self.cuts)[:, self.used] == 1

    def _log_ratios(self) -> np.ndarray:
        """Return log P(verdict | right) / P(verdict | wrong), [2, used verifiers]: of a rejection, of an acceptance."""
        return (np.log(self.mu[:, 1]) - np.log(self.mu[:, 0])).reshape(-1, 2).T


def published_loss(mu: np.ndarray, moments: np.ndarray, pi: float) -> float:
    """Return the published objective, which `minimise_loss` minimises.

    Args:
        mu: the point, [2 * verifiers, 2], as `minimise_loss` returns it.
        moments: [2 * verifiers, 2 * verifiers] second moments.
        pi: fraction of right responses.
    """
    residual, marginal, sums = _loss_terms(mu, moments, np.array([1 - pi, pi]))
    return float((residual**2).sum() + (marginal**2).sum() + SUM_WEIGHT * (sums**2).sum())


def minimise_loss(moments: np.ndarray, pi: float, *, converged: bool, seed: int, precision: float = 0.7) -> np.ndarray:
    """Return mu, the rates P(verdict | truth) that fit the moments of verdicts.

    mu is [2 * verifiers, 2]: row 2 i is "verifier i rejects" and row 2 i + 1 "verifier i accepts"; column 0 is wrong
    responses and column 1 right ones.

    Args:
        moments: [2 * verifiers, 2 * verifiers] fraction of the responses with both verdicts, rows like the rows of mu.
        pi: fraction of right responses.
        converged: run until nothing moves, at most 50,000 steps; otherwise the published 1,000.
        seed: of the start, which is multiplied by one random number.
        precision: P(right | accepted) and P(wrong | rejected) at the start.
    """
    class_rates, mu = np.array([1 - pi, pi]), np.zeros((len(moments), 2))
    for truth in (0, 1):
        # Rows of the verdict that agrees with the truth: rejections of wrong, acceptances of right responses.
        agreeing = slice(truth, None, 2)
        mu[agreeing, truth] = np.clip(np.diag(moments)[agreeing] * precision / class_rates[truth], 0, 1)
    mu *= np.random.RandomState(seed).random_sample()

    # The curvature grows with the number of verifiers: shrink the steps with it.
    rate, max_steps = (1 / (100 + 4 * len(moments)), 50_000) if converged else (1e-5, 1000)

    # Gradient descent with momentum, within [0, 1].
    velocity = np.zeros_like(mu)
    for _ in range(max_steps):
        residual, marginal, sums = _loss_terms(mu, moments, class_rates)
        # The derivative of each squared term; mu stands twice in the first, so 4 where the others have 2.
        gradient = (
            -4 * residual @ mu * class_rates
            + 2 * marginal[:, None] * class_rates
            + 2 * SUM_WEIGHT * np.repeat(sums, 2, axis=0)
        )
        velocity = MOMENTUM * velocity + gradient
        moved = np.clip(mu - rate * velocity, 0, 1)
        largest_step, mu = np.abs(moved - mu).max(), moved
        if converged and largest_step < 1e-9:
            break

    return mu


def _loss_terms(
    mu: np.ndarray, moments: np.ndarray, class_rates: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the terms that the objective squares: the misfit of the moments, of their diagonal, and of sums over
    verdicts."""
    residual = moments - (mu * class_rates) @ mu.T
    # Two verdicts of one verifier are not independent: its block of rows 2 i and 2 i + 1 is left out.
    row = np.arange(len(mu))
    residual[row, row] = residual[row, row ^ 1] = 0.0
    return residual, mu @ class_rates - np.diag(moments), mu.reshape(-1, 2, 2).sum(1) - 1
