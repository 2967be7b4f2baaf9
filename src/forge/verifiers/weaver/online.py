"""The binned model that follows a policy as it changes, and watches its verifiers."""

from __future__ import annotations

import dataclasses
import warnings
from typing import ClassVar

import numpy as np

from .aggregator import Data
from .binned import BinnedDawidSkene
from .normalise import NormalScores, to_bins
from .prior import logit, sigmoid

SMOOTH = 0.8


@dataclasses.dataclass
class Online(BinnedDawidSkene):
    """`BinnedDawidSkene` whose counts fade with every batch, and whose share of right responses is the last batch's.

    Call `partial_fit` with each batch, then `predict_proba`. An alarm, once a verifier, in `report.alarms` and as a
    warning, says that it is being gamed: against what it did at the fit, and by what the other verifiers say of the
    batch's responses,

    - its scores run away: their mean is above what the share of right responses explains;
    - it no longer agrees: its separation of right from wrong responses has fallen.

    Both are means over the last batches, a new one counting a fifth. From then on the verifier is not listened to,
    unless `mute` is False: its rising scores and the policy's rising skill would look like one thing.

    Args:
        decay: what a response counts after one more batch.
        runaway: standard deviations above the expected mean that raise an alarm.
        fallen: the part of the separation that, when lost, raises an alarm.
        mute: stop listening to a verifier with an alarm.
    """

    decay: float = 0.97
    runaway: float = 0.35
    fallen: float = 0.5
    mute: bool = True

    LEARNED: ClassVar[tuple[str, ...]] = (
        *BinnedDawidSkene.LEARNED,
        "levels",
        "expected",
        "separation",
        "watch",
        "muted",
    )

    @property
    def fading(self) -> float:
        return self.decay

    def learn(self, data: Data) -> None:
        self.muted = np.zeros(len(data.columns), dtype=bool)
        super().learn(data)
        normal = NormalScores.fit(data.x)(data.x)
        codes = to_bins(data.x, self.edges)
        # Each bin stands for the mean normal score in it, so that a verifier's scale does not matter.
        self.levels = np.full((len(codes), self.bins + 1), np.nan)
        for v, code in enumerate(codes):
            for found in np.unique(code[code < self.bins]):
                self.levels[v, found] = normal[code == found, v].mean()
        means = np.nan_to_num(self.levels[:, :-1])
        self.expected = np.stack(
            [(counts * means).sum(1) / counts.sum(1) for counts in (self.wrong + 1e-9, self.right + 1e-9)]
        )
        self.separation = self._look(data)[1]
        self.watch = np.stack([np.zeros(len(codes)), self.separation])

    def update(self, data: Data) -> None:
        super().update(data)
        new = np.stack(self._look(data))
        self.watch = np.where(np.isnan(new), self.watch, SMOOTH * self.watch + (1 - SMOOTH) * new)
        self._raise_alarms(data.names)

    def codes(self, data: Data) -> np.ndarray:
        codes = super().codes(data)
        codes[self.muted] = self.bins
        return codes

    def _look(self, data: Data) -> tuple[np.ndarray, np.ndarray]:
        """[verifiers] excess of the mean score, and separation, by what the other verifiers say; NaN where unknown."""
        codes = to_bins(data.x, self.edges)
        total = self.evidence(data) + logit(float(self.rates @ self.weights))
        excess, separation = np.full((2, len(codes)), np.nan)
        for v, code in enumerate(codes):
            x = self.levels[v, code]
            known = ~np.isnan(x)
            if known.sum() < 2:
                continue
            own = 0.0 if self.muted[v] else self.ratios[v, code]
            q = sigmoid(total - own)[known]
            excess[v] = x[known].mean() - (self.expected[0, v] + q.mean() * (self.expected[1, v] - self.expected[0, v]))
            # The regression on a calibrated probability has the slope that one on the truth has.
            separation[v] = np.cov(x[known], q)[0, 1] / (q.var() + 1e-3)
        return excess, separation

    def _raise_alarms(self, names: list[str]) -> None:
        for v, name in enumerate(names):
            excess, separation = self.watch[:, v]
            if any(alarm.startswith(f"{name}: ") for alarm in self.report.alarms):
                continue
            if excess > self.runaway:
                said = f"its scores are {excess:.2f} standard deviations above what the other verifiers explain"
            elif self.separation[v] > 0.25 and separation < (1 - self.fallen) * self.separation[v]:
                fall = f"from {self.separation[v]:.2f} to {separation:.2f} standard deviations"
                said = f"it agrees less with the others: its separation of right from wrong fell {fall}"
            else:
                continue
            self.muted[v] = self.mute
            self.report.alarms.append(f"{name}: {said}")
            warnings.warn(f"a verifier may be gamed: {name}: {said}", stacklevel=5)
