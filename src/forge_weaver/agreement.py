"""Weights from agreement about the best response: without labels, and without a model of the verifiers."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit as sigmoid
from scipy.special import ndtri, softmax
from scipy.stats import rankdata

from .aggregator import Aggregator, Data
from .means import family_numbers, fitted_slope


@dataclasses.dataclass
class TopAgreement(Aggregator):
    """Weights verifiers by how far they agree with those of other families on which response of a problem is best.

    Within a problem a verifier's scores become shares, softmax(sharpness * normal score of the rank). Two verifiers
    agree by the sum of the products of their shares, less what equal shares would give. A verifier's weight is its mean
    agreement with other families to the power `power`, over the size of its family, and none if that is
    below chance. Related verifiers also agree in their errors, and mostly so on bad responses: hence the tops, and
    other families only. A response is judged relative to the others of its problem, which have to be in one table.

    Args:
        class_balance: the fraction pi of right responses.
        sharpness, power: 1 to 3 and 1 to 4 differ little on RewardMATH (docs/weaver.md).
    """

    class_balance: float = 0.5
    sharpness: float = 2.0
    power: float = 2.0

    LEARNED: ClassVar[tuple[str, ...]] = ("weights", "line")

    def learn(self, data: Data) -> None:
        """Weigh the verifiers, and fit a line from the weighted shares to log-odds."""
        shares = problem_shares(data.x, data.problem, self.sharpness)
        numbers = family_numbers(data)
        families = np.arange(len(data.columns)) if numbers is None else numbers
        foreign = families[:, None] != families
        agreement = top_agreement(shares, data.problem)
        mean = (agreement * foreign).sum(1) / np.maximum(foreign.sum(1), 1)
        weights = np.maximum(mean, 0.0) ** self.power / np.bincount(families)[families]
        if not weights.any():
            weights = np.ones(len(weights))
            self.warn("no verifier agrees with others on the best responses: equal weights are taken")
        self.weights = weights / weights.sum()
        u = self._sum(shares)
        # As in `RankMean`: the slope is per standard deviation, the offset sets the mean probability.
        slope = fitted_slope(u)
        a = slope / (u.std() + 1e-9)
        self.line = np.array([a, brentq(lambda b: sigmoid(a * u + b).mean() - self.class_balance, -500.0, 500.0)])
        self.report.class_balance = self.class_balance
        self.report.details["slope"] = slope
        for name, weight in zip(data.names, self.weights, strict=True):
            self.report.verifiers[name]["weight"] = float(weight)

    def posterior(self, data: Data) -> np.ndarray:
        """[responses] probability from the weighted shares within the response's problem."""
        return sigmoid(self.line[0] * self._sum(problem_shares(data.x, data.problem, self.sharpness)) + self.line[1])

    def _sum(self, shares: np.ndarray) -> np.ndarray:
        return (shares - 1.0) @ self.weights


def problem_shares(x: np.ndarray, problem: np.ndarray, sharpness: float) -> np.ndarray:
    """[responses, verifiers] share of each response in its problem, relative to an equal share: 1 is the average, and
    what a verifier that did not score the response has."""
    shares = np.ones(x.shape)
    for rows in np.split(np.arange(len(x)), np.flatnonzero(np.diff(problem)) + 1):
        ranks = rankdata(x[rows], axis=0, nan_policy="omit")
        count = (~np.isnan(ranks)).sum(0)
        normal = np.where(np.isnan(ranks), -np.inf, sharpness * ndtri((ranks - 0.5) / np.maximum(count, 1)))
        scored = count > 0
        block = shares[rows]
        block[:, scored] = softmax(normal[:, scored], axis=0) * count[scored]
        block[np.isnan(x[rows])] = 1.0
        shares[rows] = block
    return shares


def top_agreement(shares: np.ndarray, problem: np.ndarray) -> np.ndarray:
    """[verifiers, verifiers] sum of products of shares in a problem, less that of equal ones; mean over problems."""
    size = np.bincount(problem)[problem][:, None]
    problems = len(np.unique(problem))
    # Relative shares are n times as large, and equal ones give 1 / n.
    return ((shares - 1.0) / size).T @ ((shares - 1.0) / size) / problems
