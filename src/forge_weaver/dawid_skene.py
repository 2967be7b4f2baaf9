"""Dawid and Skene's model over verdicts."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from .aggregator import Data
from .binned import BinnedDawidSkene
from .normalise import thresholds


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
