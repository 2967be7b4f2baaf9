"""The label model of the Weaver paper, with the schedule of its public code or converged."""

from __future__ import annotations

import dataclasses

import numpy as np

from .verdict_model import VerdictModel


@dataclasses.dataclass
class PublishedWeaver(VerdictModel):
    """Moment matching (Ratner et al. 2019, as in Saad-Falcon et al. 2025): with mu[i a, y] = P(verifier i says a | y),
    O the second moments of all (i, a) and P = diag(1 - pi, pi), minimise

        |off-diagonal blocks of (O - mu P mu')|^2 + |mu P 1 - diag O|^2 + 10 |sum over a of mu - 1|^2

    As in the public code, a missing verdict counts as a rejection, and with its schedule (1,000 steps of 1e-5, momentum
    .9, a random start) the result depends on the seed. The posterior is naive Bayes with all four entries of a
    verifier's mu, held to .01 to .99; they need not sum to 1 over a. `converged` goes on, with larger steps, until
    nothing moves.

    Args:
        class_balance: pi; estimated by the binned Dawid-Skene model where it is not given.
        threshold: from which score a verifier accepts; None takes its (1 - pi) quantile.
        marginals: verifiers that accept a share outside of these are dropped; by default .2 to .8 with a threshold, and
            none without, where each accepts the share pi as nearly as its equal scores allow.
        converged: minimise to the end.
        seed: of the start.
    """

    class_balance: float | None = None
    threshold: float | None = None
    marginals: tuple[float, float] | None = None
    converged: bool = False
    seed: int = 0

    def estimate(self) -> np.ndarray:
        m = len(self.known)
        # Every response counts, and what is missing is a rejection: the moments follow from those of acceptance.
        total = float(self.responses)
        both = self.moments[:m, :m] / total
        accept = np.diag(both)
        o = np.empty((2 * m, 2 * m))
        o[1::2, 1::2] = both
        o[0::2, 1::2] = accept - both
        o[1::2, 0::2] = accept[:, None] - both
        o[0::2, 0::2] = 1 - accept - accept[:, None] + both
        mu = minimise(o, float(self.balance), converged=self.converged, seed=self.seed)
        self.report.details["loss"] = loss(mu, o, float(self.balance))
        return mu

    def _take_in(self, said: np.ndarray) -> None:
        if np.isnan(said).any():
            note = "missing verdicts counted as rejections, as in the public code"
            if note not in self.report.warnings:
                self.report.warnings.append(note)
        super()._take_in(self.filled(said))

    @property
    def responses(self) -> float:
        return self.known[0, 0]

    def filled(self, said: np.ndarray) -> np.ndarray:
        return np.nan_to_num(said)


def loss(mu: np.ndarray, o: np.ndarray, pi: float) -> float:
    """The objective, at mu [2 verifiers, 2]."""
    residual, marginal, sums = _parts(mu, o, np.array([1 - pi, pi]))
    return float((residual**2).sum() + (marginal**2).sum() + 10 * (sums**2).sum())


def minimise(o: np.ndarray, pi: float, *, converged: bool, seed: int, precision: float = 0.7) -> np.ndarray:
    """mu [2 verifiers, 2], rows (i says no, i says yes), columns (wrong, right).

    Args:
        o: [2 verifiers, 2 verifiers] second moments.
        pi: share of right responses.
        converged: stop where nothing moves, at most 50,000 steps; otherwise after the published 1,000.
        seed: of the start's scale.
        precision: P(y | says y) of the start.
    """
    p = np.array([1 - pi, pi])
    mu = np.zeros((len(o), 2))
    for y in (0, 1):
        mu[y::2, y] = np.clip(np.diag(o)[y::2] * precision / p[y], 0, 1)
    mu *= np.random.RandomState(seed).random_sample()
    # Steps that shrink with the curvature, which grows with the verifiers.
    rate, most = (1 / (100 + 4 * len(o)), 50_000) if converged else (1e-5, 1000)
    velocity = np.zeros_like(mu)
    for _ in range(most):
        residual, marginal, sums = _parts(mu, o, p)
        gradient = -4 * residual @ mu * p + 2 * marginal[:, None] * p + 20 * np.repeat(sums, 2, axis=0)
        velocity = 0.9 * velocity + gradient
        moved = np.clip(mu - rate * velocity, 0, 1)
        step, mu = np.abs(moved - mu).max(), moved
        if converged and step < 1e-9:
            break
    return mu


def _parts(mu: np.ndarray, o: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the three terms square."""
    residual = o - (mu * p) @ mu.T
    n = np.arange(len(mu))
    residual[n, n] = residual[n, n ^ 1] = 0.0
    return residual, mu @ p - np.diag(o), mu.reshape(-1, 2, 2).sum(1) - 1
