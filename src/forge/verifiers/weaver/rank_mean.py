"""The mean of the verifiers' normal scores, made a probability."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from .aggregator import Aggregator, Data
from .normalise import NormalScores, family_means
from .prior import sigmoid


def rank_means(normal: np.ndarray, families: np.ndarray | None = None) -> np.ndarray:
    """[responses] mean of normal scores [responses, verifiers] over those not missing; 0, the middle, if all are."""
    if families is not None:
        normal = family_means(normal, families)
    known = ~np.isnan(normal)
    return np.where(known, normal, 0.0).sum(1) / np.maximum(known.sum(1), 1)


def intercept(slope_times_u: np.ndarray, balance: float) -> float:
    """The b with mean sigmoid(s u + b) = balance, by bisection."""
    low, high = -60.0, 60.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sigmoid(slope_times_u + middle).mean() < balance else (low, middle)
    return (low + high) / 2


def family_numbers(data: Data) -> np.ndarray | None:
    """[verifiers] the number of each one's family; None where the table names none."""
    if data.table.families is None:
        return None
    return np.unique([data.table.families[c] for c in data.columns], return_inverse=True)[1]


@dataclasses.dataclass
class RankMean(Aggregator):
    """Every verifier counts alike, by rank: sigmoid(slope * mean normal score + b), b such that the mean is pi.

    Args:
        class_balance: the share pi of right responses.
        slope: logits per standard deviation of the mean.
        by_family: verifiers of one family count as one.
    """

    class_balance: float = 0.5
    slope: float = 1.0
    by_family: bool = False

    LEARNED: ClassVar[tuple[str, ...]] = ("values", "heights", "families", "line")

    def learn(self, data: Data) -> None:
        normal = NormalScores.fit(data.x)
        self.values, self.heights = normal.values, normal.heights
        self.families = family_numbers(data) if self.by_family else None
        u = rank_means(normal(data.x), self.families)
        a = self.slope / (u.std() + 1e-9)
        self.line = np.array([a, intercept(a * u, self.class_balance)])
        self.report.class_balance = self.class_balance
        sizes = np.ones(len(data.columns)) if self.families is None else np.bincount(self.families)[self.families]
        for name, weight in zip(data.names, 1 / sizes, strict=True):
            self.report.verifiers[name]["weight"] = float(weight / (1 / sizes).sum())

    def update(self, data: Data) -> None:
        """Nothing: its scales are frozen, and it has nothing else."""

    def posterior(self, data: Data) -> np.ndarray:
        u = rank_means(NormalScores(self.values, self.heights)(data.x), self.families)
        return sigmoid(self.line[0] * u + self.line[1])
