"""Aggregators by the names that configurations and command lines give them."""

from __future__ import annotations

import dataclasses

import numpy as np

from .aggregator import Aggregator, check_balance
from .anchored import AnchoredLogistic
from .auto import Auto
from .binned import BinnedDawidSkene
from .correlated import CorrelatedMixture
from .dawid_skene import DawidSkene
from .dependence import residual_correlation
from .majority import Majority
from .naive_mean import NaiveMean
from .normalise import NormalScores
from .online import Online
from .published import PublishedWeaver
from .rank_mean import RankMean
from .table import ScoreTable
from .triplets import MedianTriplets

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
