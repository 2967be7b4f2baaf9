"""The mean of scores brought to [0, 1]."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from .aggregator import Aggregator, Data
from .normalise import min_max


@dataclasses.dataclass
class NaiveMean(Aggregator):
    """The mean of min-max scores, of those not missing. Scores beyond the range of the fit count as its ends."""

    LEARNED: ClassVar[tuple[str, ...]] = ("low", "high")

    def learn(self, data: Data) -> None:
        self.low, self.high = min_max(data.x)
        for name in data.names:
            self.report.verifiers[name]["weight"] = 1 / len(data.columns)

    def update(self, data: Data) -> None:
        """Nothing: its scales are frozen, and it has nothing else."""

    def posterior(self, data: Data) -> np.ndarray:
        scaled = np.clip((data.x - self.low) / (self.high - self.low), 0, 1)
        known = ~np.isnan(scaled)
        return np.where(known, scaled, 0).sum(1) / np.maximum(known.sum(1), 1)
