"""The default aggregator, which selects a method, and all methods by name."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from .aggregator import Aggregator, Data
from .anchored import PENALTIES, AnchoredLogistic
from .binned import BinnedDawidSkene, DawidSkene, Online
from .calibration import log_loss
from .correlated import CorrelatedMixture, class_evidence, within_problems
from .means import CalibratedMean, NaiveMean, RankMean
from .normalise import NormalScores
from .published import PublishedWeaver
from .table import ScoreTable

# With one or two verifiers more rates are unknown than their agreement determines (Dawid & Skene 1979).
MIN_VERIFIERS = 3
# Standard errors by which the mixture must explain other problems better than models without classes: by chance, 1 in
# 44. RewardMATH's verifiers gave -1.7 at most (100 subsets), scores without classes -0.7 (40), the scenario correlated
# 8 to 12.
MIN_EVIDENCE = 2.0
# Part of the way from chance to certainty that the mixture's own expected selection must go, with `one_right`. On 320
# subsets of RewardMATH's verifiers it knew nothing (0.06 at most) or something (from 0.17 on). The former lost 0.015 of
# the mean's selection on average, the latter gained 0.137 and lost 0.05 at most.
MIN_SKILL = 0.1
# Shrinkage of the second try with `one_right`, beyond the best one on RewardMATH (0.02): all 40 halves agreed with it.
MORE_SHRINK = 0.1


@dataclasses.dataclass
class Auto(Aggregator):
    """Aggregator that selects a method by the score table: a model where the scores support it, else the mean.

    Without labels:

    - if the verifiers look conditionally independent: `BinnedDawidSkene`;
    - else, with a warning, `CorrelatedMixture` if it explains other problems better than models without classes, in
      which verifiers err together and a problem may shift all its scores;
    - else, with a warning, the order of `NaiveMean`, with `class_balance`, known or estimated, as mean probability.

    With `one_right`, in every case: `CorrelatedMixture` if its order within problems is close to the mean's and it
    expects to select better than chance, else the mean.

    With labels of at least `labelled` problems, of both classes: `AnchoredLogistic`, if its held-out log loss on them
    is no worse than that of the method selected without labels. Otherwise `report.ask` names the ten problems whose
    labels would help most.

    Args:
        class_balance: the fraction of right responses, if known.
        one_right: exactly one response of each problem is right. Set it where it holds: it is worth many labels.
        labelled: fewest labelled problems for `AnchoredLogistic`.
        gate: largest residual correlation (root mean square, after the binned model's fit) that counts as independent.
        agreement: with `one_right`, smallest correlation of the mixture's evidence with the mean, within problems.
    """

    # Independent scores leave a residual correlation below 0.02, and one of 150 subsets of three to five verifiers of
    # RewardMATH less than 0.05 (it lost 0.012 of the mean's selection). With `one_right` no mixture of them that missed
    # the right class agreed with the mean by more than 0.42.
    class_balance: float | None = None
    one_right: bool = False
    labelled: int = 5
    gate: float = 0.05
    agreement: float = 0.45

    LEARNED: ClassVar[tuple[str, ...]] = ("chosen",)

    def learn(self, data: Data) -> None:
        """Select a method for the table, and fit it."""
        is_labelled = ~np.isnan(data.labels)
        labelled = len(np.unique(data.problem[is_labelled]))
        enough = labelled >= self.labelled
        if 0 < labelled < self.labelled:
            self.warn(f"labels of {labelled} problems are too few to be used: {self.labelled} are needed")
        if enough and np.ptp(data.labels[is_labelled]) == 0:
            self.warn("all labels are of one class, so they are not used")
            enough = False

        # Without labels first: its report is needed in either case.
        independent = BinnedDawidSkene(class_balance=self.class_balance).fit(data.table)
        self.chosen, warning = self._without_labels(data, independent)
        unlabelled = self.chosen

        # With labels, if they predict held-out labels better than the selection above does.
        if enough:
            supervised = AnchoredLogistic().fit(data.table)
            labels = data.labels[is_labelled]
            judged = ~np.isnan(supervised.held_out)

            if len(np.unique(labels[judged])) < 2:
                self.warn(
                    "labels are not used, because too few labelled problems have right or wrong responses to hold "
                    "some out"
                )
            else:
                # Both losses on the same responses: problems differ in difficulty.
                name = type(unlabelled).__name__
                unsupervised = log_loss(unlabelled.posterior(data)[is_labelled][judged], labels[judged])
                losses = self.report.details["log_loss_of_labels"] = {
                    "AnchoredLogistic": float(supervised.held_out[judged].mean()),
                    name: unsupervised,
                }
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
            residual_correlation=independent.report.residual_correlation,
            correlated=independent.report.correlated,
            correlation=independent.report.correlation,
            ask=propose_labels(data) if self.chosen is unlabelled else [],
        )

    def _without_labels(self, data: Data, independent: BinnedDawidSkene) -> tuple[Aggregator, str | None]:
        """Return the aggregator selected without labels, fitted, and a warning or None.

        Args:
            independent: a fit to the data.
        """
        # What speaks against independence.
        count, doubt, rms = len(data.columns), None, independent.report.residual_correlation
        assert rms is not None
        if count < MIN_VERIFIERS:
            doubt = f"of {count} verifier{'s' * (count > 1)} nothing can be inferred without labels"
        elif np.isnan(rms):
            doubt = "too few responses to test whether the verifiers err independently"
        elif rms > self.gate:
            doubt = (
                f"the verifiers err together (residual correlation {rms:.2f}; independence is up to {self.gate:.2f})"
            )
        elif not self.one_right:
            return independent, None

        # A model, where something shows that its classes are right and wrong responses.
        mixture = self._fit_mixture(data, can_infer=count >= MIN_VERIFIERS and not np.isnan(rms))
        if mixture is not None:
            return mixture, (
                f"{doubt}: the correlated mixture is taken; labels of a few problems would be safer"
                if doubt is not None and count >= MIN_VERIFIERS
                else None
            )

        # The mean: its order needs no model, its probabilities need the share of right responses.
        warning = f"{doubt or 'the mixture does not find the right responses'}: the mean is taken"
        balance = len(data.table) / int(data.table.present.sum()) if self.one_right else self.class_balance
        if balance is None:
            guess = independent.report.class_balance if count >= MIN_VERIFIERS else None
            balance = 0.5 if guess is None else min(max(guess, 0.01), 0.99)
            warning = f"{warning}, and that {balance:.0%} are right is no more than a guess"
        return CalibratedMean(balance).fit(data.table), f"{warning}; labels of a few problems would help most"

    def _fit_mixture(self, data: Data, *, can_infer: bool) -> CorrelatedMixture | None:
        """Return the fitted mixture, or None if nothing shows that its classes are right and wrong responses.

        With many verifiers and few problems it may fit shared noise instead of the truth. With `one_right` it is then
        fitted again with more shrinkage of the covariance.

        Args:
            can_infer: the scores can tell without `one_right`.
        """
        if not self.one_right:
            evidence = class_evidence(data.table, self.class_balance) if can_infer else -np.inf
            self.report.details["class_evidence"] = evidence
            if evidence < MIN_EVIDENCE:
                return None
            return CorrelatedMixture(class_balance=self.class_balance).fit(data.table)

        mean = NaiveMean().fit(data.table).posterior(data)
        for shrink in (CorrelatedMixture.shrink, MORE_SHRINK):
            mixture = CorrelatedMixture(one_right=True, shrink=shrink).fit(data.table)
            agreement = within_problems(mixture.evidence(data), mean, data.problem)
            if agreement >= self.agreement:
                break

        chance = len(data.table) / data.table.present.sum()
        top = np.maximum.reduceat(mixture.posterior(data), np.flatnonzero(np.diff(data.problem, prepend=-1)))
        skill = float((top.mean() - chance) / (1 - chance))
        self.report.details.update(agreement=agreement, skill=skill)
        return mixture if agreement >= self.agreement and skill >= MIN_SKILL else None

    def posterior(self, data: Data) -> np.ndarray:
        """Return each response's probability of being right, [responses], by the selected method."""
        return self.chosen.posterior(data)


PROPOSED = 10  # problems to label: with so many, selection on RewardMATH is 0.42 where the mean's is 0.30
MOST_CANDIDATES = 2000  # problems to propose from: each takes the memory of one matrix


def propose_labels(data: Data) -> list[str]:
    """Return the problems whose labels would help `AnchoredLogistic` most, the first one most: by prompt, or by index.

    Each adds the most to the determinant of the information about the verifiers' weights (a greedy D-optimal design),
    with the middle one of the regression's penalties: no label is needed to know it.
    """
    x = np.nan_to_num(NormalScores.fit(data.x)(data.x))
    numbers = np.setdiff1d(data.problem, data.problem[~np.isnan(data.labels)])
    numbers = numbers[:: 1 + len(numbers) // MOST_CANDIDATES]
    products = [x[data.problem == number].T @ x[data.problem == number] for number in numbers]
    information, chosen = PENALTIES[len(PENALTIES) // 2] * np.eye(x.shape[1]), list[int]()

    for _ in range(min(PROPOSED, len(numbers))):
        gains = np.linalg.slogdet(information + np.stack(products))[1]
        gains[chosen] = -np.inf
        chosen.append(int(gains.argmax()))
        information = information + products[chosen[-1]]

    prompts = data.table.prompts or [""] * len(data.table)
    return [f"problem {i}{': ' * bool(prompts[i])}{' '.join(prompts[i].split())[:80]}" for i in numbers[chosen]]


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
        raise ValueError(f"{wrong} problems do not have exactly one right response by their labels, as one_right needs")


def make(method: str, class_balance: float | None = None, one_right: bool = False, labelled: int = 0) -> Aggregator:
    """Return an unfitted aggregator of the named method.

    Args:
        method: a key of METHODS.
        class_balance: the fraction of right responses, if known.
        one_right: exactly one response of each problem is right.
        labelled: number of problems whose labels the fit will see.

    Raises:
        ValueError: unknown method, or an argument that it does not use.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: use one of {', '.join(METHODS)}")
    if labelled and method not in ("auto", "anchored"):
        raise ValueError(f"method {method} does not use labels: omit labelled")
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
        raise ValueError(f"labelled is {labelled}, but these problems have no labels")
    aggregator.fit(visible)

    correlation = aggregator.report.residual_correlation
    if isinstance(aggregator, BinnedDawidSkene) and correlation is not None and correlation > Auto.gate:
        aggregator.warn(
            f"the verifiers err together (residual correlation {correlation:.2f}; independence is up to {Auto.gate}), "
            "but this method assumes independence: its probabilities are overconfident; use auto"
        )
    return aggregator
