"""The default aggregator, which selects a method, and all methods by name."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from .aggregator import Aggregator, Data
from .anchored import AnchoredLogistic
from .binned import BinnedDawidSkene, DawidSkene, Online
from .calibration import log_loss
from .correlated import CorrelatedMixture, residual_correlation, within_problems
from .means import NaiveMean, RankMean, family_numbers, fitted_slope, rank_means, unheap_scores
from .normalise import NormalScores
from .published import PublishedWeaver
from .table import ScoreTable

# With one or two verifiers more rates are unknown than their agreement determines (Dawid & Skene 1979).
MIN_VERIFIERS = 3
# With fewer verifiers a full covariance can explain the scores without the classes. On 105 subsets of three to nine
# real verifiers the mixture would have lost .04 of the selection on average and .36 at most.
MIN_FOR_COVARIANCE = 6
# Shrinkage of the second try with `one_right`, beyond the best one on RewardMATH (.02: a selection of .517). Its .417
# is still above the rank mean's .271.
MORE_SHRINK = 0.1


@dataclasses.dataclass
class Auto(Aggregator):
    """Selects a method by what the table supports. Without labels:

    - one or two verifiers: `RankMean`, with a warning; with `one_right` the mixture;
    - verifiers whose residuals look conditionally independent: `BinnedDawidSkene`, or with `one_right` the mixture;
    - else, with a warning, `CorrelatedMixture` if it passes these checks: at least six verifiers, a rank mean that does
      not separate two clusters by itself, an order of each problem's responses close to that by the rank mean, and no
      strong effect of the problem on the scores. With `one_right` only the order is checked;
    - else, with a warning, `RankMean` with families counted as one and `class_balance`, known or estimated, as mean
      probability.

    With labels of at least `labelled` problems, of both classes: `AnchoredLogistic`, if its held-out log loss on them
    is no worse than that of the method selected without labels.

    Args:
        class_balance: the fraction of right responses, if known.
        one_right: exactly one response of each problem is right. Set it where it holds: it is worth many labels.
        labelled: fewest labelled problems for `AnchoredLogistic`.
        gate: largest residual correlation (root mean square, after the binned model's fit) that counts as independent.
        heaps: the mixture is taken up to this slope of the rank mean, in logits per standard deviation.
        agreement: the mixture is taken from this correlation, within problems, of its evidence with the rank mean on.
        problem_effect: the mixture is taken up to this intraclass correlation of its residuals within problems.
    """

    # The thresholds lie between the scenarios of `benchmarks/weaver.py all` (docs/weaver.md)
    # in which a method is right and those in which it is not, and were not fitted to real scores. Independent verifiers
    # leave a residual correlation below .05, correlated ones above .1, real ones (RewardMATH) .212. The slow tests of
    # `tests/forge_weaver/test_aggregators.py` check the selection over ten seeds of each scenario.
    class_balance: float | None = None
    one_right: bool = False
    labelled: int = 5
    gate: float = 0.05
    heaps: float = 2.0
    agreement: float = 0.45
    problem_effect: float = 0.25

    LEARNED: ClassVar[tuple[str, ...]] = ("chosen",)

    def learn(self, data: Data) -> None:
        """Select a method for the table, and fit it."""
        is_labelled = ~np.isnan(data.labels)
        labelled = len(np.unique(data.problem[is_labelled]))
        enough = labelled >= self.labelled
        if 0 < labelled < self.labelled:
            self.warn(f"labels of {labelled} problems are too few to be used: {self.labelled} are needed")
        if enough and np.ptp(data.labels[is_labelled]) == 0:
            self.warn("all labels are of one class: they are not used")
            enough = False

        # Without labels first: its report is needed in either case.
        normal = NormalScores.fit(data.x)(data.x)
        independent = BinnedDawidSkene(class_balance=self.class_balance).fit(data.table)
        rms, matrix = residual_correlation(normal, independent.posterior(data))
        self.chosen, warning = self._without_labels(data, normal, independent, rms)

        # With labels, if they predict held-out labels better than the selection above does.
        if enough:
            supervised = AnchoredLogistic().fit(data.table)
            labels = data.labels[is_labelled]
            judged = ~np.isnan(supervised.held_out)

            if len(np.unique(labels[judged])) < 2:
                self.warn("too few labelled problems have right responses, or wrong ones, to hold any out: not used")
            else:
                # Both losses on the same responses: problems differ in difficulty.
                name = type(self.chosen).__name__
                unsupervised = log_loss(self.chosen.posterior(data)[is_labelled][judged], labels[judged])
                losses = {"AnchoredLogistic": float(supervised.held_out[judged].mean()), name: unsupervised}
                self.report.details["log_loss_of_labels"] = losses
                if losses["AnchoredLogistic"] <= unsupervised:
                    self.chosen, warning = supervised, None
                else:
                    self.warn(f"labels of {labelled} problems are not used: {name} predicts them better without")

        if warning is not None:
            self.warn(warning)
        inner = self.chosen.report
        self.report = dataclasses.replace(
            inner,
            method=f"Auto: {inner.method}",
            details={**self.report.details, **inner.details},
            warnings=self.report.warnings + [text for text in inner.warnings if text not in self.report.warnings],
            residual_correlation=rms,
            correlated=data.names,
            correlation=matrix.tolist(),
        )

    def _without_labels(
        self, data: Data, normal: np.ndarray, independent: BinnedDawidSkene, rms: float
    ) -> tuple[Aggregator, str | None]:
        """Return the aggregator selected without labels, fitted, and a warning or None.

        Args:
            normal: [responses, verifiers] normal scores.
            independent: a fit to the data.
            rms: residual correlation of the verifiers after that fit.
        """
        # Too few verifiers, too few responses, or no sign of correlated errors.
        count = len(data.columns)
        if count < MIN_VERIFIERS:
            if self.one_right:
                return self._fit_mixture(data, normal)[0], None
            verifiers = f"{count} verifier{'s' * (count > 1)}"
            warning = f"of {verifiers} nothing can be inferred without labels: the rank mean is taken"
            return self._rank_mean(data, 0.5, warning)

        if np.isnan(rms):
            return independent, "too few responses to test conditional independence of the verifiers: it is assumed"
        if rms <= self.gate:
            return self._fit_mixture(data, normal)[0] if self.one_right else independent, None
        warning = f"the verifiers err together (residual correlation {rms:.2f}; independence is up to {self.gate:.2f})"

        # Correlated errors: the mixture, where nothing speaks against it.
        mixture, agreement = self._fit_mixture(data, normal)
        heaps = fitted_slope(unheap_scores(data, family_numbers(data)))
        effect = mixture.report.details["problem_effect"]
        self.report.details.update(agreement=agreement, heaps=heaps, problem_effect=effect)
        sound = agreement >= self.agreement
        if not self.one_right:
            # The effect is NaN, and passes, if each problem has one response.
            weak_effect = np.isnan(effect) or effect <= self.problem_effect
            sound &= count >= MIN_FOR_COVARIANCE and heaps <= self.heaps and weak_effect

        if sound:
            return mixture, f"{warning}: the correlated mixture is taken; labels of a few problems would be safer"
        return self._rank_mean(data, independent.report.class_balance, f"{warning}: the rank mean is taken", heaps)

    def _rank_mean(
        self, data: Data, guess: float | None, warning: str, slope: float | None = None
    ) -> tuple[Aggregator, str]:
        # `guess` is the class balance if neither `class_balance` nor `one_right` gives it.
        balance = self.class_balance
        if self.one_right:
            balance = len(data.table) / int(data.table.present.sum())
        elif balance is None:
            balance = guess
            warning = f"{warning}, and that {balance:.0%} are right is no more than a guess"
        assert balance is not None
        ranks = RankMean(balance, slope, by_family=data.table.families is not None).fit(data.table)
        return ranks, f"{warning}; labels of a few problems would help most"

    def _fit_mixture(self, data: Data, normal: np.ndarray) -> tuple[CorrelatedMixture, float]:
        """Return the fitted mixture, and the correlation of its evidence with the rank mean within problems.

        With many verifiers and few problems it may fit shared noise instead of the truth. With `one_right` it is then
        fitted again with more shrinkage of the covariance.
        """
        for shrink in (CorrelatedMixture.shrink, MORE_SHRINK):
            mixture = CorrelatedMixture(one_right=self.one_right, class_balance=self.class_balance, shrink=shrink)
            agreement = within_problems(mixture.fit(data.table).evidence(data), rank_means(normal), data.problem)
            if agreement >= self.agreement or not self.one_right:
                break
        return mixture, agreement

    def posterior(self, data: Data) -> np.ndarray:
        """Return each response's probability of being right, [responses], by the selected method."""
        return self.chosen.posterior(data)


METHODS: dict[str, type[Aggregator]] = {
    "auto": Auto,
    "anchored": AnchoredLogistic,
    "binned": BinnedDawidSkene,
    "correlated": CorrelatedMixture,
    "dawid_skene": DawidSkene,
    "naive_mean": NaiveMean,
    "online": Online,
    "rank_mean": RankMean,
    "weaver": PublishedWeaver,
}
USE_LABELS = ("auto", "anchored")


def check_one_right(table: ScoreTable) -> None:
    """Check that the labels allow exactly one right response for each problem.

    Raises:
        ValueError: a problem has several right responses, or labels for all and none is right.
    """
    if table.labels is None:
        return
    right = np.nansum(table.labels, axis=1)
    fully_labelled = ~(np.isnan(table.labels) & table.present).any(1)
    if wrong := int(((right > 1) | ((right == 0) & fully_labelled)).sum()):
        raise ValueError(f"{wrong} problems have none or several right responses by their labels, not one")


def make(method: str, class_balance: float | None = None, one_right: bool = False, labelled: int = 0) -> Aggregator:
    """Return an unfitted aggregator.

    Args:
        method: a key of METHODS.
        class_balance: the fraction of right responses, if known.
        one_right: exactly one response of each problem is right.
        labelled: number of problems whose labels the fit will see.

    Raises:
        ValueError: unknown method, or an argument that it does not use.
    """
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r}: take one of {', '.join(METHODS)}")
    if labelled and method not in USE_LABELS:
        raise ValueError(f"method {method} does not look at labels: omit labelled")
    wanted = {"one_right": one_right or None, "class_balance": class_balance}
    settings: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
    # A method without the setting is an error: ignoring it silently would hide that it has no effect.
    fields = {field.name for field in dataclasses.fields(METHODS[method])}  # type: ignore[arg-type]
    if unused := settings.keys() - fields:
        raise ValueError(f"method {method} does not use {min(unused)}: omit it")
    return METHODS[method](**settings)


def fit_table(
    table: ScoreTable,
    method: str = "auto",
    *,
    class_balance: float | None = None,
    one_right: bool = False,
    labelled: int = 0,
) -> Aggregator:
    """Fit the aggregator that `make` returns, with the labels of the first `labelled` problems only.

    Raises:
        ValueError: the table has none of these labels or contradicts `one_right`, or `make` or the fit fails.
    """
    aggregator = make(method, class_balance, one_right, labelled)
    if one_right:
        check_one_right(table)
    if not 0 <= labelled <= len(table):
        raise ValueError(f"labelled must be 0 to {len(table)}, the number of problems")
    visible = table if table.labels is None else table.with_labels_of(np.arange(labelled))
    if labelled and not len(visible.labelled_problems()):
        raise ValueError(f"labelled is {labelled}, and there are no labels of these problems")
    aggregator.fit(visible)

    if isinstance(aggregator, BinnedDawidSkene):
        # Report the dependence that `Auto` selects by, which these methods ignore.
        report = aggregator.report
        names = [name for name in aggregator.verifiers if name not in report.dropped]
        p, scores = aggregator.predict_proba(visible)[visible.present], visible.select(names).flat
        scored = ~np.isnan(p)
        rms, matrix = residual_correlation(NormalScores.fit(scores)(scores)[scored], p[scored])
        report.residual_correlation, report.correlated, report.correlation = rms, names, matrix.tolist()

        if rms > Auto.gate:
            aggregator.warn(
                f"the verifiers err together (residual correlation {rms:.2f}; independence is up to {Auto.gate:.2f}), "
                "but this method assumes independence: its probabilities are overconfident; use auto"
            )

    return aggregator
