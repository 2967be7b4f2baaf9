"""Dawid and Skene's model over quantile bins of continuous scores, of verdicts, and one that follows a policy."""

from __future__ import annotations

import dataclasses
import warnings
from typing import ClassVar

import numpy as np

from .aggregator import Aggregator, Data
from .em import Counts, Prior, Solution, evidence, search, solve
from .means import rank_means
from .normalise import NormalScores, bin_edges, thresholds, to_bins


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


@dataclasses.dataclass
class DawidSkene(BinnedDawidSkene):
    """Two rates a verifier (Dawid & Skene 1979) by expectation maximisation; a missing verdict says nothing.

    A verifier may be worse than chance, and then counts the other way. The rank mean decides which class is right.

    Args:
        threshold: from which score a verifier accepts; None takes its (1 - pi) quantile, pi `class_balance` or .5.
    """

    threshold: float | None = None

    # A verdict has two; not a setting.
    bins: ClassVar[int] = 2  # type: ignore[misc]
    MONOTONE: ClassVar = False

    def cut(self, data: Data) -> np.ndarray:
        accept = self.class_balance if self.class_balance is not None else 0.5
        return thresholds(data.x, accept, self.threshold)[:, None]

    def tell(self, data: Data) -> None:
        super().tell(data)
        for name, right, wrong in zip(data.names, self.right, self.wrong, strict=True):
            rates = {"tpr": right[1] / right.sum(), "tnr": wrong[0] / wrong.sum()}
            self.report.verifiers[name].update({rate: float(value) for rate, value in rates.items()})


# Responses over which a verifier is watched, and the fewest that raise an alarm.
WINDOW, FEWEST = 700, 300
# Responses that `decay` is for.
BATCH = 256
# The least variance of the others' probabilities at which agreement with them can be told.
SPREAD = 0.02
# How many standard errors make sure.
SURE = 4.0
# Of fewer verifiers none can be spared: which one is wrong would be one's word against another's.
LISTENERS = 3


@dataclasses.dataclass
class Online(BinnedDawidSkene):
    """`BinnedDawidSkene` whose counts fade as responses come in, and whose share of right responses is that of the last
    problems.

    Call `partial_fit` with each batch, then `predict_proba`. An alarm, once a verifier, in `report.alarms` and as a
    warning, says that it is being gamed: against what it did at the fit, and by what the other verifiers say of the
    last 700 responses or so,

    - its scores run away: their mean is above what the share of right responses explains;
    - it no longer agrees: its separation of right from wrong responses has fallen.

    Each must be beyond chance, too, and where no other verifier gave a score, or all responses seem alike, nothing is
    said. From then on the verifier is not listened to, unless `mute` is False or no more than three are left: its
    rising scores and the policy's rising skill would look like one thing. The others are then watched anew.

    Args:
        decay: what a response counts after 256 more.
        memory: of how many earlier problems the share of right responses is, besides those of the batch.
        runaway: standard deviations above the expected mean that raise an alarm.
        fallen: the part of the separation that, when lost, raises an alarm.
        mute: stop listening to a verifier with an alarm.
    """

    decay: float = 0.97
    memory: int = 16
    runaway: float = 0.25
    fallen: float = 0.5
    mute: bool = True

    LEARNED: ClassVar[tuple[str, ...]] = (*BinnedDawidSkene.LEARNED, "levels", "origin", "watch", "muted")

    def fading(self, data: Data) -> float:
        return self.decay ** (len(data.x) / BATCH)

    def remembered(self, data: Data) -> np.ndarray:
        problems = self.tally.sum() if self.by_problem else self.tally.sum() / max(np.bincount(data.problem).max(), 1)
        return self.tally * min(1.0, self.memory / problems)

    def learn(self, data: Data) -> None:
        self.muted = np.zeros(len(data.columns), dtype=bool)
        super().learn(data)
        normal = NormalScores.fit(data.x)(data.x)
        codes = to_bins(data.x, self.edges)
        # Each bin stands for the mean normal score in it, so that a verifier's scale does not matter.
        self.levels = np.full((len(codes), self.bins + 1), np.nan)
        for v, code in enumerate(codes):
            for found in np.unique(code[code < self.bins]):
                self.levels[v, found] = normal[code == found, v].mean()
        self.origin = self._sums(data)
        self.watch = np.zeros_like(self.origin)

    def update(self, data: Data) -> None:
        super().update(data)
        self.watch = self.watch * np.exp(-len(data.x) / WINDOW) + self._sums(data)
        self._raise_alarm(data.names)

    def codes(self, data: Data) -> np.ndarray:
        codes = super().codes(data)
        codes[self.muted] = self.bins
        return codes

    def _sums(self, data: Data) -> np.ndarray:
        """[6, verifiers] sums of 1, q, q^2, x, x^2 and x q: x a verifier's normal scores, q the probabilities by all
        others that are listened to, over the responses that both speak of."""
        codes = to_bins(data.x, self.edges)
        heard = (codes < self.bins) & ~self.muted[:, None]
        total, prior = self.evidence(data), Prior(self.rates, self.weights)
        sums = np.zeros((6, len(codes)))
        for v, code in enumerate(codes):
            known = (code < self.bins) & (heard.sum(0) > heard[v])
            x = self.levels[v, code]
            known &= ~np.isnan(x)
            own = 0.0 if self.muted[v] else self.ratios[v, code]
            x, q = x[known], prior.posterior(total - own, data.problem)[known]
            sums[:, v] = len(x), q.sum(), q @ q, x.sum(), x @ x, x @ q
        return sums

    def _raise_alarm(self, names: list[str]) -> None:
        """At most one a time, of the verifier that is farthest off: it may be what makes the others look bad."""
        then, now = _Line(self.origin), _Line(self.watch)
        away = now.q - then.q
        excess = now.x - (then.x + away * then.slope)
        doubt = np.sqrt(now.doubt_x**2 + then.doubt_x**2 + (away * then.doubt) ** 2)
        ran = np.where(excess > SURE * doubt, excess / self.runaway, 0.0)
        lost = then.slope - now.slope
        fell = np.where((then.slope > 0.25) & (lost > SURE * np.hypot(then.doubt, now.doubt)), lost / then.slope, 0.0)
        fell = np.where((now.spread >= SPREAD) & (then.spread >= SPREAD), fell / self.fallen, 0.0)
        told = [any(alarm.startswith(f"{name}: ") for alarm in self.report.alarms) for name in names]
        off = np.where(np.array(told) | (now.n < FEWEST) | (then.n < FEWEST), 0.0, np.maximum(ran, fell))
        v = int(off.argmax())
        if off[v] < 1:
            return
        if ran[v] >= fell[v]:
            said = f"its scores are {excess[v]:.2f} standard deviations above what the other verifiers explain"
        else:
            fall = f"from {then.slope[v]:.2f} to {now.slope[v]:.2f} standard deviations"
            said = f"it agrees less with the others: its separation of right from wrong fell {fall}"
        if self.mute and (~self.muted).sum() <= LISTENERS:
            said += "; it is listened to all the same, with no more verifiers than this"
        elif self.mute:
            self.muted[v] = True
            said += "; it is listened to no more"
            # What the others were measured by was partly its word.
            self.watch = np.zeros_like(self.watch)
        self.report.alarms.append(f"{names[v]}: {said}")
        warnings.warn(f"a verifier may be gamed: {names[v]}: {said}", stacklevel=5)


class _Line:
    """The regression of x on q from `_sums`, [verifiers] each: responses, means, variance of q, slope, standard errors.

    The regression on a calibrated probability has the slope that one on the truth has.
    """

    def __init__(self, sums: np.ndarray) -> None:
        self.n = sums[0]
        q, q2, x, x2, xq = sums[1:] / np.maximum(self.n, 1e-9)
        self.q, self.x, self.spread = q, x, np.maximum(q2 - q * q, 0.0)
        self.slope = (xq - x * q) / (self.spread + 1e-6)
        noise = np.maximum(x2 - x * x - self.slope * (xq - x * q), 0.0)
        self.doubt_x = np.sqrt(noise / np.maximum(self.n, 1.0))
        self.doubt = self.doubt_x / np.sqrt(self.spread + 1e-6)
