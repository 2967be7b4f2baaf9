"""Dawid and Skene's model on quantile bins of scores, on verdicts, and online during training."""

import copy
import dataclasses
from typing import Any, ClassVar, Self

import numpy as np

from .aggregator import Aggregator, Data
from .correlated import residual_correlation
from .em import Counts, Prior, Solution, search_em, solve_em, sum_evidence
from .means import mean_of_known
from .normalise import NormalScores, bin_edges, find_thresholds, to_bins
from .table import ScoreTable


@dataclasses.dataclass
class BinnedDawidSkene(Aggregator):
    """Each verifier has a histogram of its scores on right and one on wrong responses, and errs independently.

    Fitted without labels by expectation maximisation (Dawid & Skene 1979) from the rank mean. Log ratios are
    non-decreasing in the score, so the classes cannot swap. Missing scores carry no evidence.
    `report.details["converged"]` is False if the step limit was reached.

    Args:
        bins: quantile bins per verifier; a verifier with at most that many distinct scores has one for each.
        class_balance: the fraction of right responses, if known.
        shrink: pseudo-responses per bin that shrink its log ratio to 0.
        steps: maximum steps of expectation maximisation.
    """

    bins: int = 8
    class_balance: float | None = None
    shrink: float = 2.0
    steps: int = 200

    LEARNED: ClassVar[tuple[str, ...]] = ("edges", "ratios", "right", "wrong", "rates", "weights", "tally")

    MONOTONE: ClassVar = True

    def learn(self, data: Data) -> None:
        """Cut scores into quantile bins, and estimate each bin's rate in each class by EM (Dawid and Skene 1979)."""
        self.edges = self.cut(data)
        codes = self.codes(data)
        normal = NormalScores.fit(data.x)(data.x)
        rank_mean, settings = mean_of_known(normal), self._state_settings()
        solution = search_em(codes, self.bins, data.problem, rank_mean, **settings)
        if not self.MONOTONE and solution.r @ (rank_mean - rank_mean.mean()) < 0:
            # The classes have swapped, which monotone log ratios rule out.
            solution = search_em(codes, self.bins, data.problem, rank_mean, **{**settings, "monotone": True})
        self._keep_solution(solution, data)

        # The dependence that the model ignores.
        self.report.residual_correlation, matrix = residual_correlation(normal, solution.r)
        self.report.correlated, self.report.correlation = data.names, matrix.tolist()

    def _state_settings(self) -> dict[str, Any]:
        return {
            "shrink": self.shrink,
            "monotone": self.MONOTONE,
            "balance": self.class_balance,
            "steps": self.steps,
        }

    def cut(self, data: Data) -> np.ndarray:
        """Return the edges between each verifier's bins, [verifiers, bins - 1]."""
        return bin_edges(data.x, self.bins)

    def posterior(self, data: Data) -> np.ndarray:
        """Return each response's probability of being right, [responses], by Bayes' rule with independent errors."""
        return Prior(self.rates, self.weights).posterior(self.evidence(data), data.problem)

    def evidence(self, data: Data) -> np.ndarray:
        """Return log P(scores | right) / P(scores | wrong) of each response, [responses]."""
        return sum_evidence(self.codes(data), self.ratios)

    def codes(self, data: Data) -> np.ndarray:
        """Return the bin of each score, [verifiers, responses], from 0; `bins` for a missing score."""
        return to_bins(data.x, self.edges)

    def _keep_solution(self, solution: Solution, data: Data) -> None:
        self.ratios, self.rates, self.weights = solution.ratios, solution.prior.rates, solution.prior.weights
        self.right, self.wrong = solution.counts
        self.tally = solution.prior.counts
        self.report.class_balance = solution.prior.balance
        self.report.details.update(steps=solution.steps, converged=solution.converged)
        # A verifier's weight is the mean absolute log ratio.
        shares = (self.right + self.wrong) / (self.right + self.wrong).sum(1, keepdims=True)
        self.report.describe(data.names, weight=(np.abs(self.ratios[:, :-1]) * shares).sum(1))


@dataclasses.dataclass
class DawidSkene(BinnedDawidSkene):
    """Each verifier accepts or rejects, with one rate per class (Dawid & Skene 1979).

    A verifier accepts scores from its (1 - pi) quantile on, where pi is `class_balance`, or .5 if that is None. Missing
    scores carry no evidence. A verifier may be worse than chance and then counts inversely. Of the two classes, the one
    with the higher rank means is the right one.
    """

    bins: ClassVar[int] = 2  # type: ignore[misc]  # reject, accept; not a setting
    MONOTONE: ClassVar = False

    def cut(self, data: Data) -> np.ndarray:
        """Return each verifier's lowest accepted score, [verifiers, 1]."""
        accept = self.class_balance if self.class_balance is not None else 0.5
        return find_thresholds(data.x, accept)[:, None]

    def _keep_solution(self, solution: Solution, data: Data) -> None:
        super()._keep_solution(solution, data)
        rejected_wrong, accepted_right = self.wrong[:, 0] / self.wrong.sum(1), self.right[:, 1] / self.right.sum(1)
        self.report.describe(data.names, tpr=accepted_right, tnr=rejected_wrong)


BATCH = 256  # responses to which `decay` refers


@dataclasses.dataclass
class Online(BinnedDawidSkene):
    """`BinnedDawidSkene` for a changing policy: counts decay, and the prior follows recent problems.

    Call `partial_fit` with each batch, then `predict_proba`.

    Args:
        decay: factor by which the counts of earlier responses shrink with every 256 more.
        memory: number of earlier problems that the prior remembers, besides those of the batch.
    """

    decay: float = 0.97
    memory: int = 16

    def partial_fit(self, table: ScoreTable) -> Self:
        """Update on another table; the first call is a fit.

        Bins and scales stay as the fit set them. A table without scores has no effect.
        """
        if not hasattr(self, "report"):
            return self.fit(table)
        table = self._match_verifiers(table)
        data = self._table_data(table)
        if len(data.x):
            # A copy, as updates add to arrays in place: a failed one leaves the state as it was.
            updated = copy.deepcopy(self)
            updated._update_counts(data)
            vars(self).update(vars(updated))
        return self

    def _update_counts(self, data: Data) -> None:
        """Continue EM from decayed counts."""
        # The prior counts earlier problems as at most `memory`.
        prior = Prior(self.rates, self.weights, self.tally * min(1.0, self.memory / self.tally.sum()))
        decay = self.decay ** (len(data.x) / BATCH)
        past = Counts(decay * self.right, decay * self.wrong)
        start, codes = self.posterior(data), self.codes(data)
        solution = solve_em(codes, self.bins, data.problem, start, prior, past=past, **self._state_settings())
        self._keep_solution(solution, data)
