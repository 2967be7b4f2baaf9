"""Dawid and Skene's model on quantile bins of scores, on verdicts, and online during training."""

import copy
import dataclasses
import warnings
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


# The constants of alarms are those of the test with a gamed policy (docs/weaver.md, "Measured: methods"): over 20
# seeds, 60 of 60 gamed verifiers raised an alarm, and no other verifier did.
ALARM_WINDOW = 700  # responses of the sliding window, about three batches
MIN_RESPONSES = 300  # for an alarm: with fewer the standard errors are themselves uncertain
BATCH = 256  # responses to which `decay` refers
MIN_VARIANCE = 0.02  # of the others' probabilities, for measuring agreement with them
STANDARD_ERRORS = 4.0  # for an alarm: each batch tests every verifier twice, over hundreds of batches
# With this many verifiers or fewer none is muted: the majority that contradicts one would be too small. With three,
# updating made the Brier score worse (docs/weaver.md: .230 against .195).
MIN_VERIFIERS = 3


@dataclasses.dataclass
class Online(BinnedDawidSkene):
    """`BinnedDawidSkene` for a changing policy: counts decay, and the prior follows recent problems.

    Call `partial_fit` with each batch, then `predict_proba`. When a verifier is being gamed an alarm is raised, at most
    once per verifier: as a warning, and in `report.alarms`. Compared with the fit, and judged by the other verifiers on
    about the last 700 responses, there are two signs of gaming:

    - runaway: the verifier's mean score is above what the rate of right responses explains;
    - lost agreement: its separation of right from wrong responses has fallen.

    An alarm needs a sign that is statistically significant, scores of other verifiers, and responses that differ. The
    verifier is then muted and monitoring of the others restarts, unless `mute` is False or at most three verifiers are
    left, where rising scores and rising skill are hard to tell apart.

    Args:
        decay: factor by which the counts of earlier responses shrink with every 256 more.
        memory: number of earlier problems that the prior remembers, besides those of the batch.
        runaway: standard deviations above the expected mean score that raise an alarm.
        fallen: fraction of the separation whose loss raises an alarm.
        mute: ignore a verifier after its alarm.
    """

    decay: float = 0.97
    memory: int = 16
    runaway: float = 0.25
    fallen: float = 0.5
    mute: bool = True

    LEARNED: ClassVar[tuple[str, ...]] = (*BinnedDawidSkene.LEARNED, "levels", "origin", "watch", "muted")

    def learn(self, data: Data) -> None:
        """Fit with no verifier muted, and record the moments that alarms compare later batches with."""
        self.muted = np.zeros(len(data.columns), dtype=bool)
        super().learn(data)
        normal = NormalScores.fit(data.x)(data.x)
        codes = to_bins(data.x, self.edges)
        # Each bin is represented by its mean normal score: alarms do not depend on a verifier's scale.
        self.levels = np.full((len(codes), self.bins + 1), np.nan)
        for v, code in enumerate(codes):
            for bin_number in np.unique(code[code < self.bins]):
                self.levels[v, bin_number] = normal[code == bin_number, v].mean()
        self.origin = self._sum_moments(data)
        self.watch = np.zeros_like(self.origin)

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
        """Continue EM from decayed counts; then raise an alarm if a verifier is being gamed, and mute it."""
        self.report.grow(data)
        # The prior counts earlier problems as at most `memory`.
        prior = Prior(self.rates, self.weights, self.tally * min(1.0, self.memory / self.tally.sum()))
        decay = self.decay ** (len(data.x) / BATCH)
        past = Counts(decay * self.right, decay * self.wrong)
        start, codes = self.posterior(data), self.codes(data)
        solution = solve_em(codes, self.bins, data.problem, start, prior, past=past, **self._state_settings())
        self._keep_solution(solution, data)

        # Alarms are by an exponentially weighted window.
        self.watch = self.watch * np.exp(-len(data.x) / ALARM_WINDOW) + self._sum_moments(data)
        self._raise_alarm(data.names)

    def codes(self, data: Data) -> np.ndarray:
        """Return the bin of each score, [verifiers, responses]; a muted verifier's scores count as missing."""
        codes = super().codes(data)
        codes[self.muted] = self.bins
        return codes

    def _sum_moments(self, data: Data) -> np.ndarray:
        """Return each verifier's sums over responses of 1, q, q^2, x, x^2 and x q, [6, verifiers].

        x is the verifier's normal score of a response, and q its probability of being right by all other active
        verifiers. Responses without either are left out.
        """
        codes = to_bins(data.x, self.edges)
        active = (codes < self.bins) & ~self.muted[:, None]
        total, prior = self.evidence(data), Prior(self.rates, self.weights)
        sums = np.zeros((6, len(codes)))
        for v, code in enumerate(codes):
            x = self.levels[v, code]
            scored_by_others = active.sum(0) > active[v]
            judged = (code < self.bins) & scored_by_others & ~np.isnan(x)
            evidence_of_v = 0.0 if self.muted[v] else self.ratios[v, code]
            x, q = x[judged], prior.posterior(total - evidence_of_v, data.problem)[judged]
            sums[:, v] = len(x), q.sum(), q @ q, x.sum(), x @ x, x @ q
        return sums

    def _raise_alarm(self, names: list[str]) -> None:
        """Raise an alarm for the verifier with the strongest sign of being gamed, if any, and mute it.

        One per update: a gamed verifier may be what makes the others look bad.
        """
        then, now = _Line(self.origin), _Line(self.watch)

        # Runaway: the mean score is above the line from the fit, at today's rate of right responses.
        away = now.q - then.q
        excess = now.x - (then.x + away * then.slope)
        error = np.sqrt(now.error_x**2 + then.error_x**2 + (away * then.error) ** 2)
        ran = np.where(excess > STANDARD_ERRORS * error, excess / self.runaway, 0.0)

        # Lost agreement: the slope has fallen.
        lost = then.slope - now.slope
        significant = lost > STANDARD_ERRORS * np.hypot(then.error, now.error)

        # A verifier that separated little at the fit has no separation to lose.
        fell = np.where((then.slope > 0.25) & significant, lost / then.slope, 0.0)
        fell = np.where((now.spread >= MIN_VARIANCE) & (then.spread >= MIN_VARIANCE), fell / self.fallen, 0.0)

        # Severity is in multiples of the setting, `runaway` or `fallen`: an alarm is raised from 1 on.
        alarmed = np.array([any(alarm.startswith(f"{name}: ") for alarm in self.report.alarms) for name in names])
        too_few = (now.n < MIN_RESPONSES) | (then.n < MIN_RESPONSES)
        severity = np.where(alarmed | too_few, 0.0, np.maximum(ran, fell))
        v = int(severity.argmax())
        if severity[v] < 1:
            return

        if ran[v] >= fell[v]:
            message = f"its scores are {excess[v]:.2f} standard deviations above what the other verifiers explain"
        else:
            message = (
                "it agrees less with the others: its separation of right from wrong fell from "
                f"{then.slope[v]:.2f} to {now.slope[v]:.2f} standard deviations"
            )

        if self.mute and (~self.muted).sum() <= MIN_VERIFIERS:
            message += f"; not muted, {MIN_VERIFIERS} verifiers or fewer are left"
        elif self.mute:
            self.muted[v] = True
            message += "; it is muted"
            # Sums so far judged the other verifiers by this one among others: reset them.
            self.watch = np.zeros_like(self.watch)

        self.report.alarms.append(f"{names[v]}: {message}")
        warnings.warn(f"a verifier may be gamed: {names[v]}: {message}", stacklevel=5)


class _Line:
    """Regression of each verifier's score x on the probability q by the others, from the sums of `_sum_moments`.

    Regressing on a calibrated probability has the same slope as regressing on the truth: the mean score of right
    responses less the mean of wrong ones.

    Attributes, each [verifiers]:
        n: number of responses.
        q, x: means.
        spread: variance of q.
        slope: of the regression.
        error_x, error: standard errors of the mean of x and of the slope.
    """

    def __init__(self, sums: np.ndarray) -> None:
        self.n = sums[0]
        self.q, q2, self.x, x2, xq = sums[1:] / np.maximum(self.n, 1e-9)
        self.spread = np.maximum(q2 - self.q**2, 0.0)
        covariance = xq - self.x * self.q
        self.slope = covariance / (self.spread + 1e-6)
        noise = np.maximum(x2 - self.x**2 - self.slope * covariance, 0.0)
        self.error_x = np.sqrt(noise / np.maximum(self.n, 1.0))
        self.error = self.error_x / np.sqrt(self.spread + 1e-6)
