"""How far two computations of a batch are from one another, and when that is more than rounding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Nats, mean over the tokens of the sequence that differs most. Between engine, trainer and transformers in float32 tiny
# models of seven families differ by at most 2.5e-6 on a CPU; larger ones add up more terms, and are not measured.
FLOAT32 = 1e-4
# Several times the noise of half precision, measured on the same batch: two kernels round differently.
HALF_TIMES = 3.0
# A share of the tokens of a mixture of experts may flip between experts that are almost tied.
FLIPPED = 0.02


@dataclass(frozen=True)
class Tolerance:
    """The largest difference that is rounding: nats, and the share of tokens that is left aside."""

    nats: float = FLOAT32
    flipped: float = 0.0

    def at_least(self, nats: float) -> Tolerance:
        """The tolerance, or this one if that is wider."""
        return Tolerance(max(self.nats, nats), self.flipped)


def distance(first: np.ndarray, second: np.ndarray, owners: np.ndarray, flipped: float = 0.0) -> float:
    """Mean absolute difference, in nats, of the sequence in which it is largest.

    Args:
        first, second: [compared] log-probabilities; tokens with NaN in one of them are left aside.
        owners: [compared] number of the sequence.
        flipped: share of the tokens, those that differ most, that does not count.
    """
    gaps = np.abs(first.astype(np.float64) - second)
    usable = ~np.isnan(gaps)
    if flipped:
        usable &= ~(gaps > np.quantile(gaps[usable], 1 - flipped)) if usable.any() else usable
    if not usable.any():
        return 0.0
    sums = np.bincount(owners[usable], gaps[usable])
    counts = np.bincount(owners[usable])
    return float((sums / np.maximum(counts, 1)).max())


def mean_gap(first: np.ndarray, second: np.ndarray) -> float:
    """Mean absolute difference of all tokens, in nats, as `train/engine_difference` has it."""
    return float(np.nanmean(np.abs(first.astype(np.float64) - second)))
