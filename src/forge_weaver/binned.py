"""Dawid and Skene's model over quantile bins of continuous scores."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from .aggregator import Aggregator, Data
from .em import Counts, Solution, evidence, search, solve
from .normalise import NormalScores, bin_edges, to_bins
from .prior import Prior
from .rank_mean import rank_means


@dataclasses.dataclass
class BinnedDawidSkene(Aggregator):
    """Verifiers are conditionally independent given whether a response is right; each has a histogram in each class.

    Labels are not looked at. Expectation maximisation (Dawid & Skene 1979) starts at the rank mean, and a higher score
    never counts against a response, so the classes cannot swap. A missing score says nothing.
    `report.details["converged"]` is False where the steps ran out.

    Args:
        bins: quantile bins a verifier; a verifier with at most that many different scores has one for each.
        class_balance: the share of right responses where it is known.
        shrink: pseudo-responses a bin that pull its log ratio to 0.
        steps: most steps of expectation maximisation.
        by_problem: each problem has its own rate of right responses, so the responses to one inform each other.
    """

    bins: int = 8
    class_balance: float | None = None
    shrink: float = 2.0
    steps: int = 200
    by_problem: bool = True

    LEARNED: ClassVar[tuple[str, ...]] = ("edges", "ratios", "right", "wrong", "totals", "rates", "weights", "tally")

    MONOTONE: ClassVar = True

    def learn(self, data: Data) -> None:
        self.edges = self.cut(data)
        codes, u = self.codes(data), rank_means(NormalScores.fit(data.x)(data.x))

        def found(monotone: bool) -> Solution:
            return search(
                codes,
                self.bins,
                data.problem,
                u,
                shrink=self.shrink,
                monotone=monotone,
                balance=self.class_balance,
                by_problem=self.by_problem,
                steps=self.steps,
            )

        solution = found(self.MONOTONE)
        if not self.MONOTONE and solution.r @ (u - u.mean()) < 0:
            # The classes have swapped: with higher scores bound to be better they cannot.
            solution = found(True)
        self._keep(solution)
        self.tell(data)

    def update(self, data: Data) -> None:
        solution = solve(
            self.codes(data),
            self.bins,
            data.problem,
            self.posterior(data),
            Prior(self.rates, self.weights, self.remembered(data)),
            shrink=self.shrink,
            monotone=self.MONOTONE,
            balance=self.class_balance,
            past=Counts(self.right, self.wrong, self.totals),
            decay=self.fading(data),
            steps=self.steps,
        )
        self._keep(solution)
        self.tell(data)

    def fading(self, data: Data) -> float:
        """What an earlier response still counts after an update with these."""
        return 1.0

    def remembered(self, data: Data) -> np.ndarray:
        """[rates] the earlier problems of each rate that still count, as of `Prior.past`."""
        return self.tally

    def cut(self, data: Data) -> np.ndarray:
        """[verifiers, bins - 1] edges of the bins."""
        return bin_edges(data.x, self.bins)

    def posterior(self, data: Data) -> np.ndarray:
        return Prior(self.rates, self.weights).posterior(self.evidence(data), data.problem)

    def evidence(self, data: Data) -> np.ndarray:
        """[responses] log P(scores | right) / P(scores | wrong)."""
        return evidence(self.codes(data), self.ratios)

    def codes(self, data: Data) -> np.ndarray:
        """[verifiers, responses] the bin of each score, `bins` where it says nothing."""
        return to_bins(data.x, self.edges)

    def _keep(self, found: Solution) -> None:
        self.ratios, self.rates, self.weights = found.ratios, found.prior.rates, found.prior.weights
        self.right, self.wrong, self.totals = found.counts.right, found.counts.wrong, found.counts.balance
        self.tally = found.prior.counts
        self.report.class_balance = found.prior.balance
        self.report.details.update(steps=found.steps, converged=found.converged)

    def tell(self, data: Data) -> None:
        """A verifier's weight is the mean size of its log ratio."""
        shares = (self.right + self.wrong) / (self.right + self.wrong).sum(1, keepdims=True)
        for name, weight in zip(data.names, (np.abs(self.ratios[:, :-1]) * shares).sum(1), strict=True):
            self.report.verifiers[name]["weight"] = float(weight)


def estimate_balance(x: np.ndarray, problem: np.ndarray) -> float:
    """The share of right responses that the binned model finds in [responses, verifiers]."""
    codes, u = to_bins(x, bin_edges(x, 8)), rank_means(NormalScores.fit(x)(x))
    return search(codes, 8, problem, u, shrink=2.0, monotone=True).prior.balance
