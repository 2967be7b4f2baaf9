"""The aggregator to take when nothing more is known, and all of them by name."""

from __future__ import annotations

import copy
import dataclasses
from typing import ClassVar

import numpy as np

from .aggregator import Aggregator, Data, check_balance
from .anchored import AnchoredLogistic
from .binned import BinnedDawidSkene, DawidSkene, Online
from .calibration import log_loss
from .correlated import CorrelatedMixture, residual_correlation, within_problems
from .means import Majority, NaiveMean, RankMean, family_numbers, likeliest_slope, rank_means, unheaped
from .normalise import NormalScores
from .table import ScoreTable
from .verdict_models import MedianTriplets, PublishedWeaver

# So many verifiers must agree before anything follows from it, and so many before a covariance says what they share.
FEWEST, FEWEST_TOGETHER = 3, 6
MORE_SHRINK = 0.1


@dataclasses.dataclass
class Auto(Aggregator):
    """Chooses by what the table allows. Without labels:

    - one or two verifiers: `RankMean`, with a warning; with `one_right` the mixture;
    - verifiers that are conditionally independent as far as one can tell: `BinnedDawidSkene`, or with `one_right` the
      mixture, which knows what to make of that;
    - else, with a warning, `CorrelatedMixture`, where it may help and passes for sound: there are at least six
      verifiers, their mean does not tell two heaps of responses apart by itself, the mixture orders the responses to a
      problem much as the mean does, and the problems themselves do not move the scores. With `one_right` only the
      order matters;
    - else, with a warning, `RankMean`, families counted as one, with the mean probability at pi.

    With labels of at least `labelled` problems: `AnchoredLogistic`, if it predicts those of them that can be held out,
    of both classes, better than what was chosen without labels does.

    Args:
        class_balance: the share of right responses where it is known.
        one_right: exactly one response of each problem is right. Say it if it is so: it is worth many labels.
        labelled: fewest labelled problems.
        gate: largest residual correlation (root mean square, after the binned model's fit) that passes as independence.
        heaps: largest slope of the rank mean, logits per standard deviation, that leaves the mixture something to do.
        agreement: least correlation, within problems, of the mixture's evidence with the rank mean.
        problem_effect: largest correlation, between responses to one problem, of what the mixture does not explain.
    """

    class_balance: float | None = None
    one_right: bool = False
    labelled: int = 5
    gate: float = 0.05
    heaps: float = 2.0
    agreement: float = 0.45
    problem_effect: float = 0.25

    LEARNED: ClassVar[tuple[str, ...]] = ("chosen",)

    def learn(self, data: Data) -> None:
        if self.one_right and self.class_balance is not None:
            raise ValueError("one_right gives the class balance itself: leave class_balance out")
        known = ~np.isnan(data.labels)
        labelled = len(np.unique(data.problem[known]))
        enough = labelled >= self.labelled
        if 0 < labelled < self.labelled:
            self.warn(f"labels of {labelled} problems are too few to be used: {self.labelled} are needed")
        if enough and np.ptp(data.labels[known]) == 0:
            self.warn("all labels are of one class: they are not used")
            enough = False
        normal = NormalScores.fit(data.x)(data.x)
        independent = BinnedDawidSkene(class_balance=self.class_balance).fit(data.table)
        rms, matrix = residual_correlation(normal, independent.posterior(data))
        self.chosen: Aggregator
        self.chosen, warning = self._without_labels(data, normal, independent, rms)
        if enough:
            supervised = AnchoredLogistic().fit(data.table)
            labels, judged = data.labels[known], ~np.isnan(supervised.held_out)
            if len(np.unique(labels[judged])) < 2:
                self.warn("too few labelled problems have right responses, or wrong ones, to hold any out: not used")
            else:
                # On the same responses: losses of different problems say nothing about which method is better.
                losses = {"AnchoredLogistic": float(supervised.held_out[judged].mean())}
                name = type(self.chosen).__name__
                losses[name] = log_loss(self.chosen.posterior(data)[known][judged], labels[judged])
                self.report.details["log_loss_of_labels"] = losses
                if losses["AnchoredLogistic"] <= losses[name]:
                    self.chosen, warning = supervised, None
                else:
                    self.warn(f"labels of {labelled} problems are not used: {name} predicts them better without")
        if warning is not None:
            self.warn(warning)
        self._tell(rms, matrix, data.names)

    def _without_labels(
        self, data: Data, normal: np.ndarray, independent: BinnedDawidSkene, rms: float
    ) -> tuple[Aggregator, str | None]:
        """What to take, and what to beware of."""
        m = len(data.columns)
        if m < FEWEST:
            if self.one_right:
                return self._mixture(data, normal)[0], None
            warning = f"of {m} verifier{'s' * (m > 1)} nothing can be told without labels: the rank mean is taken"
            return self._rank_mean(data, 0.5, warning)
        if not rms > self.gate:
            warning = "too few responses to tell whether the verifiers are conditionally independent: taken to be"
            chosen = self._mixture(data, normal)[0] if self.one_right and not np.isnan(rms) else independent
            return chosen, warning if np.isnan(rms) else None
        warning = f"the verifiers err together (residual correlation {rms:.2f}; independence is up to {self.gate:.2f})"
        mixture, agreement = self._mixture(data, normal)
        found = {
            "agreement": agreement,
            "heaps": likeliest_slope(unheaped(data, family_numbers(data))),
            "problem_effect": mixture.report.details["problem_effect"],
        }
        sound = agreement >= self.agreement
        if not self.one_right:
            sound &= m >= FEWEST_TOGETHER and found["heaps"] <= self.heaps
            # One response of each problem leaves it unknown, NaN.
            sound &= not found["problem_effect"] > self.problem_effect
        self.report.details.update(found)
        if sound:
            return mixture, f"{warning}: the correlated mixture is taken; labels of a few problems would be safer"
        warning = f"{warning}: the rank mean is taken"
        return self._rank_mean(data, independent.report.class_balance, warning, found["heaps"])

    def _rank_mean(
        self, data: Data, guess: float | None, warning: str, slope: float | None = None
    ) -> tuple[Aggregator, str]:
        balance = self.class_balance
        if self.one_right:
            balance = len(data.table) / int(data.table.present.sum())
        elif balance is None:
            balance = guess
            warning = f"{warning}, and that {balance:.0%} are right is no more than a guess"
        assert balance is not None
        ranks = RankMean(balance, slope, by_family=data.table.families is not None).fit(data.table)
        return ranks, f"{warning}; labels of a few problems would help most"

    def _mixture(self, data: Data, normal: np.ndarray) -> tuple[CorrelatedMixture, float]:
        """The mixture, and the correlation of its evidence with the rank mean within problems.

        Of many verifiers and few problems it may take what the verifiers share for the truth. Where one response of
        each is right it is tried again then, with a covariance that is held closer to its diagonal.
        """
        for shrink in (CorrelatedMixture.shrink, MORE_SHRINK):
            mixture = CorrelatedMixture(one_right=self.one_right, class_balance=self.class_balance, shrink=shrink)
            agreement = within_problems(mixture.fit(data.table).evidence(data), rank_means(normal), data.problem)
            if agreement >= self.agreement or not self.one_right:
                break
        return mixture, agreement

    def update(self, data: Data) -> None:
        self.chosen.partial_fit(data.table)
        self._tell(self.report.residual_correlation, np.array(self.report.correlation), self.report.correlated)

    def posterior(self, data: Data) -> np.ndarray:
        return self.chosen.posterior(data)

    def _tell(self, rms: float | None, matrix: np.ndarray, names: list[str]) -> None:
        inner = self.chosen.report
        self.report = dataclasses.replace(
            inner,
            method=f"Auto: {inner.method}",
            verifiers=copy.deepcopy(inner.verifiers),  # each counts its coverage
            details={**self.report.details, **inner.details},
            warnings=self.report.warnings + [text for text in inner.warnings if text not in self.report.warnings],
            residual_correlation=rms,
            correlated=list(names),
            correlation=matrix.tolist(),
        )


METHODS: dict[str, type[Aggregator]] = {
    "auto": Auto,
    "anchored": AnchoredLogistic,
    "binned": BinnedDawidSkene,
    "correlated": CorrelatedMixture,
    "dawid_skene": DawidSkene,
    "majority": Majority,
    "naive_mean": NaiveMean,
    "online": Online,
    "rank_mean": RankMean,
    "triplets": MedianTriplets,
    "weaver": PublishedWeaver,
}
USE_LABELS = ("auto", "anchored")


def check_one_right(table: ScoreTable) -> None:
    """ValueError: by the table's labels, problems have none or several right responses."""
    if table.labels is None:
        return
    several = np.nansum(table.labels, axis=1) > 1
    none = (np.nansum(table.labels, axis=1) == 0) & ~(np.isnan(table.labels) & table.present).any(1)
    if wrong := int((several | none).sum()):
        raise ValueError(f"{wrong} problems have none or several right responses by their labels, not one")


def make(method: str, class_balance: float | None = None, one_right: bool = False, labelled: int = 0) -> Aggregator:
    """An aggregator that is still to be fitted.

    Args:
        class_balance: the share of right responses, where it is known.
        one_right: exactly one response of each problem is right.
        labelled: of how many problems it is going to see labels.

    ValueError: no such method, or it has no use for what is given.
    """
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r}: take one of {', '.join(METHODS)}")
    if labelled and method not in USE_LABELS:
        raise ValueError(f"method {method} does not look at labels: leave labelled out")
    check_balance(class_balance)
    if class_balance is not None and one_right:
        raise ValueError("one right response of each problem is a share of its own: leave the share out")
    given = {"class_balance": class_balance} if class_balance is not None else {"one_right": True} if one_right else {}
    known = {field.name for field in dataclasses.fields(METHODS[method])}  # type: ignore[arg-type]
    if idle := given.keys() - known:
        raise ValueError(f"method {method} does not use {min(idle)}: leave it out")
    return METHODS[method](**given)


def fit_table(
    table: ScoreTable,
    method: str = "auto",
    *,
    class_balance: float | None = None,
    one_right: bool = False,
    labelled: int = 0,
) -> Aggregator:
    """The aggregator that `make` gives, fitted; it sees the labels of the first `labelled` problems and no others.

    Raises:
        ValueError: the table has none of these labels or contradicts `one_right`, or what `make` and the fit refuse.
    """
    aggregator = make(method, class_balance, one_right, labelled)
    if one_right:
        check_one_right(table)
    if not 0 <= labelled <= len(table):
        raise ValueError(f"labelled must be 0 to {len(table)}, the number of problems")
    shown = table if table.labels is None else table.with_labels_of(np.arange(labelled))
    if labelled and not len(shown.labelled_problems()):
        raise ValueError(f"labelled is {labelled}, and there are no labels of these problems")
    aggregator.fit(shown)
    if isinstance(aggregator, BinnedDawidSkene):
        _tell_dependence(aggregator, shown)
    return aggregator


def _tell_dependence(aggregator: BinnedDawidSkene, table: ScoreTable) -> None:
    """What `Auto` would choose by, of a method that was asked for by name."""
    names = [name for name in aggregator.verifiers if name not in aggregator.report.dropped]
    p, scores = aggregator.predict_proba(table)[table.present], table.select(names).flat
    scored = ~np.isnan(p)
    rms, matrix = residual_correlation(NormalScores.fit(scores)(scores)[scored], p[scored])
    report = aggregator.report
    report.residual_correlation, report.correlated, report.correlation = rms, names, matrix.tolist()
    if rms > Auto.gate:
        aggregator.warn(
            f"the verifiers err together (residual correlation {rms:.2f}; independence is up to {Auto.gate:.2f}), and "
            "this method takes it that they do not: its probabilities are too sure; auto would take another"
        )
