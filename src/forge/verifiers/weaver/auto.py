"""The aggregator to take when nothing more is known."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from .aggregator import Aggregator, Data
from .anchored import AnchoredLogistic
from .binned import BinnedDawidSkene
from .calibration import log_loss
from .correlated import CorrelatedMixture
from .dependence import residual_correlation, within_problems
from .normalise import NormalScores
from .rank_mean import RankMean, rank_means


@dataclasses.dataclass
class Auto(Aggregator):
    """Chooses by what the table allows. Without labels:

    - verifiers that are conditionally independent as far as one can tell: `BinnedDawidSkene`, or with `one_right` the
      mixture, which knows what to make of that;
    - else, with a warning, `CorrelatedMixture`, if it orders the responses to a problem much as the rank mean does, and
      unless the problems themselves move the scores (that matters not where one response of each is right);
    - else, with a warning, `RankMean`, families counted as one, with the mean probability at pi.

    With labels of at least `labelled` problems: `AnchoredLogistic`, if it predicts those of them that can be held out,
    of both classes, better than what was chosen without labels does.

    Args:
        class_balance: the share of right responses where it is known.
        one_right: exactly one response of each problem is right. Say it if it is so: it is worth many labels.
        labelled: fewest labelled problems.
        gate: largest residual correlation (root mean square, after the binned model's fit) that passes as independence.
        agreement: least correlation, within problems, of the mixture's evidence with the rank mean.
        problem_effect: largest correlation, between responses to one problem, of what the mixture does not explain.
    """

    class_balance: float | None = None
    one_right: bool = False
    labelled: int = 5
    gate: float = 0.05
    agreement: float = 0.45
    problem_effect: float = 0.25

    LEARNED: ClassVar[tuple[str, ...]] = ("chosen",)

    def learn(self, data: Data) -> None:
        if self.one_right and self.class_balance is not None:
            raise ValueError("one_right gives the class balance itself: leave class_balance out")
        table = data.table
        known = ~np.isnan(data.labels)
        labelled = len(np.unique(data.problem[known]))
        enough = labelled >= self.labelled
        if 0 < labelled < self.labelled:
            self.warn(f"labels of {labelled} problems are too few to be used: {self.labelled} are needed")
        if enough and np.ptp(data.labels[known]) == 0:
            self.warn("all labels are of one class: they are not used")
            enough = False
        independent = BinnedDawidSkene(class_balance=self.class_balance).fit(table)
        normal = NormalScores.fit(data.x)(data.x)
        rms, matrix = residual_correlation(normal, independent.posterior(data))
        self.chosen: Aggregator = independent
        warning = None
        if np.isnan(rms) and len(data.columns) > 1:
            warning = "too few responses to tell whether the verifiers are conditionally independent: taken to be"
        elif rms > self.gate:
            self.chosen, warning = self._for_dependent(data, normal, independent, rms)
        elif self.one_right:
            self.chosen = self._mixture(data)
        if enough:
            supervised = AnchoredLogistic().fit(table)
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
        if warning is not None:
            self.warn(warning)
        self._tell(rms, matrix, data.names)

    def _for_dependent(
        self, data: Data, normal: np.ndarray, independent: BinnedDawidSkene, rms: float
    ) -> tuple[Aggregator, str]:
        """What to take where verifiers err together, and what to say about it."""
        together = f"the verifiers err together (residual correlation {rms:.2f}; independence is up to {self.gate:.2f})"
        mixture = self._mixture(data)
        agreement = within_problems(mixture.evidence(data), rank_means(normal), data.problem)
        effect = 0.0 if self.one_right else mixture.report.details["problem_effect"]
        self.report.details.update(agreement=agreement, problem_effect=effect)
        if agreement >= self.agreement and not effect > self.problem_effect:
            return mixture, f"{together}: the correlated mixture is taken; labels of a few problems would be safer"
        balance, guess = self.class_balance, ""
        if self.one_right:
            balance = len(data.table) / int(data.table.present.sum())
        elif balance is None:
            balance = independent.report.class_balance
            guess = f", and that {balance:.0%} are right is no more than a guess"
        assert balance is not None
        ranks = RankMean(balance, by_family=data.table.families is not None).fit(data.table)
        return ranks, f"{together}: the rank mean is taken{guess}; labels of a few problems would help most"

    def _mixture(self, data: Data) -> CorrelatedMixture:
        return CorrelatedMixture(one_right=self.one_right, class_balance=self.class_balance).fit(data.table)

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
            details={**self.report.details, **inner.details},
            warnings=self.report.warnings + [text for text in inner.warnings if text not in self.report.warnings],
            residual_correlation=rms,
            correlated=list(names),
            correlation=matrix.tolist(),
        )
