"""The share of a problem's responses that give the same answer. No verifier is asked."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from .aggregator import Aggregator, Data
from .table import answer_shares


@dataclasses.dataclass
class Majority(Aggregator):
    """The frequency of a response's answer among its problem's (self-consistency, Wang et al. 2022); it learns nothing.

    A response without an answer has no probability. ValueError where the table has no answers at all.
    """

    SCORES: ClassVar = False

    def learn(self, data: Data) -> None:
        """Nothing to learn."""

    def update(self, data: Data) -> None:
        """Nothing to learn."""

    def posterior(self, data: Data) -> np.ndarray:
        return np.concatenate(answer_shares(data.table))[data.rows]

    def scored(self, data: Data) -> np.ndarray:
        return ~np.isnan(self.posterior(data))
