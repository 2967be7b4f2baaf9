"""How many of a problem's responses are right, before the verifiers are asked."""

from __future__ import annotations

import dataclasses

import numpy as np

RATES = np.array([0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])
FARTHEST = 500.0
# Problems a rate that are made up, so that a rate which has died out can come back.
FLOOR = 0.01


def sigmoid(x: np.ndarray) -> np.ndarray:
    # Of both signs by the small one of e^x and e^-x: small probabilities keep their order.
    small = np.exp(-np.abs(x))
    return np.where(np.asarray(x) < 0, small, 1.0) / (1 + small)


def logit(p: np.ndarray | float) -> np.ndarray:
    return np.log(p) - np.log1p(-np.asarray(p))


@dataclasses.dataclass
class Prior:
    """Each problem has a rate of right responses, drawn from a few values. One value is one rate for all.

    The weights are a nonparametric maximum likelihood estimate (Kiefer & Wolfowitz 1956; Laird 1978) by expectation
    maximisation. A problem whose responses all look bad then makes each of them look worse; the order within a
    problem is that of the evidence, whatever the weights.

    Args:
        rates, weights: [values]
        past: [values] problems of each rate among earlier responses; of one rate, [2] right and wrong responses.
        counts: the same with those of the last step; empty before one.
    """

    rates: np.ndarray
    weights: np.ndarray
    past: np.ndarray | float = 0.0
    counts: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))

    @classmethod
    def start(cls, balance: float, by_problem: bool) -> Prior:
        if not by_problem:
            return cls(np.array([balance]), np.ones(1))
        rates = RATES
        if not rates[0] <= balance <= rates[-1]:
            # A mean beyond the values needs one that is farther out.
            rates = np.sort(np.append(rates, balance / 2 if balance < 0.5 else (1 + balance) / 2))
        return cls(rates, _tilted(np.full(len(rates), 1 / len(rates)), rates, balance))

    @property
    def balance(self) -> float:
        """The mean rate."""
        return float(self.rates @ self.weights)

    def posterior(self, evidence: np.ndarray, problem: np.ndarray) -> np.ndarray:
        """[responses] probability of being right.

        Args:
            evidence: [responses] log P(scores | right) / P(scores | wrong).
            problem: [responses] its number, rising.
        """
        return self._infer(evidence, problem)[0]

    def step(self, evidence: np.ndarray, problem: np.ndarray, balance: float | None) -> tuple[np.ndarray, Prior]:
        """The posterior, and the prior that explains it better; its mean stays at `balance` where that is given."""
        r, found, _ = self._infer(evidence, problem)
        counts = self.past + found
        if len(self.rates) == 1:
            # One pseudo-response of each class keeps the rate inside (0, 1).
            rate = balance if balance is not None else (counts[0] + 1) / (counts.sum() + 2)
            return r, Prior(np.array([rate]), self.weights, self.past, counts)
        weights = (counts + FLOOR) / (counts + FLOOR).sum()
        if balance is not None:
            weights = _tilted(weights, self.rates, balance)
        return r, Prior(self.rates, weights, self.past, counts)

    def log_likelihood(self, evidence: np.ndarray, problem: np.ndarray) -> float:
        """Of the scores, less that of all responses' being wrong."""
        return self._infer(evidence, problem)[2]

    def _infer(self, evidence: np.ndarray, problem: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        if len(self.rates) == 1:
            rate = self.rates[0]
            r = sigmoid(evidence + logit(rate))
            fit = np.logaddexp(evidence + np.log(rate), np.log1p(-rate)).sum()
            return r, np.array([r.sum(), len(r) - r.sum()]), float(fit)
        evidence = np.clip(evidence, -FARTHEST, FARTHEST)
        # Split so that nothing overflows: the larger of the two likelihoods is taken out.
        up, down = np.exp(np.minimum(evidence, 0)), np.exp(-np.maximum(evidence, 0))
        right = up[:, None] * self.rates
        both = right + down[:, None] * (1 - self.rates)
        starts = np.flatnonzero(np.diff(problem, prepend=-1))
        with np.errstate(divide="ignore"):
            fit = np.add.reduceat(np.log(both), starts) + np.log(self.weights)
        top = fit.max(1, keepdims=True)
        fit = np.exp(fit - top)
        total = fit.sum(1, keepdims=True)
        likelihood = (top + np.log(total)).sum() + np.maximum(evidence, 0).sum()
        fit /= total
        per_response = np.repeat(fit, np.diff(np.append(starts, len(problem))), axis=0)
        return np.minimum(np.einsum("ng,ng->n", right / both, per_response), 1.0), fit.sum(0), float(likelihood)


def _tilted(weights: np.ndarray, rates: np.ndarray, balance: float) -> np.ndarray:
    """The weights times exp(c rate), c such that the mean rate is `balance`, by bisection."""
    low, high = -1e5, 1e5
    for _ in range(80):
        c = (low + high) / 2
        found = np.log(weights + 1e-12) + c * rates
        found = np.exp(found - found.max())
        found /= found.sum()
        low, high = (c, high) if found @ rates < balance else (low, c)
    return found
