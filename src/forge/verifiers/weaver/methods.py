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
from .majority import Majority
from .naive_mean import NaiveMean
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
