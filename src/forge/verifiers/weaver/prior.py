"""How many of a problem's responses are right, before the verifiers are asked."""

from __future__ import annotations

import dataclasses

import numpy as np

RATES = np.array([0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])
FARTHEST = 500.0


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * np.asarray(x)))


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
    """

    rates: np.ndarray
    weights: np.ndarray

    @classmethod
    def start(cls, balance: float, by_problem: bool) -> Prior:
        if not by_problem:
            return cls(np.array([balance]), np.ones(1))
        return cls(RATES, _tilted(np.full(len(RATES), 1 / len(RATES)), RATES, balance))

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
        r, shares = self._infer(evidence, problem)
        if len(self.rates) == 1:
            # One pseudo-response of each class keeps the rate inside (0, 1).
            rate = balance if balance is not None else (r.sum() + 1) / (len(r) + 2)
            return r, Prior(np.array([rate]), self.weights)
        weights = shares if balance is None else _tilted(shares, self.rates, balance)
        return r, Prior(self.rates, weights)

    def _infer(self, evidence: np.ndarray, problem: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if len(self.rates) == 1:
            return sigmoid(evidence + logit(self.rates[0])), self.weights
        evidence = np.clip(evidence, -FARTHEST, FARTHEST)
        # Split so that nothing overflows: the larger of the two likelihoods is taken out.
        up, down = np.exp(np.minimum(evidence, 0)), np.exp(-np.maximum(evidence, 0))
        right = up[:, None] * self.rates
        both = right + down[:, None] * (1 - self.rates)
        starts = np.flatnonzero(np.diff(problem, prepend=-1))
        with np.errstate(divide="ignore"):
            fit = np.add.reduceat(np.log(both), starts) + np.log(self.weights)
        fit = np.exp(fit - fit.max(1, keepdims=True))
        fit /= fit.sum(1, keepdims=True)
        per_response = np.repeat(fit, np.diff(np.append(starts, len(problem))), axis=0)
        return np.minimum(np.einsum("ng,ng->n", right / both, per_response), 1.0), fit.mean(0)


def _tilted(weights: np.ndarray, rates: np.ndarray, balance: float) -> np.ndarray:
    """The weights times exp(c rate), c such that the mean rate is `balance`, by bisection."""
    low, high = -200.0, 200.0
    for _ in range(60):
        c = (low + high) / 2
        found = (weights + 1e-12) * np.exp(c * (rates - 0.5))
        found /= found.sum()
        low, high = (c, high) if found @ rates < balance else (low, c)
    return found
