"""Aggregators that estimate nothing of the verifiers: the mean score, the majority of answers, the mean rank."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit as sigmoid
from scipy.special import logit

from .aggregator import Aggregator, Data
from .normalise import NormalScores, family_means, min_max, scattered
from .table import answer_shares


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


# Logits per standard deviation of the mean: it is always taken to tell something, and never to be certain.
LEAST, MOST = 0.5, 10.0
# Responses that this can be learned from, and about as many as it is.
FEWEST, SAMPLE = 30, 10_000


def rank_means(normal: np.ndarray, families: np.ndarray | None = None) -> np.ndarray:
    """[responses] mean of normal scores [responses, verifiers] over those not missing; 0, the middle, if all are."""
    if families is not None:
        normal = family_means(normal, families)
    known = ~np.isnan(normal)
    return np.where(known, normal, 0.0).sum(1) / np.maximum(known.sum(1), 1)


def intercept(slope_times_u: np.ndarray, balance: float) -> float:
    """The b with mean sigmoid(s u + b) = balance."""
    return float(brentq(lambda b: sigmoid(slope_times_u + b).mean() - balance, -500.0, 500.0))


def unheaped(data: Data, families: np.ndarray | None = None) -> np.ndarray:
    """Rank means of some SAMPLE responses, ties broken by chance: the lumps of few verdicts are no classes."""
    return rank_means(scattered(data.x[:: 1 + len(data.x) // SAMPLE], data.names, 0), families)


def likeliest_slope(u: np.ndarray, steps: int = 200) -> float:
    """Logits per standard deviation of u, between LEAST and MOST, under two Gaussians of one variance that explain
    [responses] best; by expectation maximisation from halves.

    Nothing is assumed of the verifiers behind u. Where two do not explain it better than one by more than their two
    further parameters are worth (Schwarz 1978), u is one heap, and the slope at most 1; so is that of few responses.
    """
    if len(u) < FEWEST:
        return 1.0
    z = (u - u.mean()) / (u.std() + 1e-9)
    high = (z > np.median(z)).astype(np.float64)
    for _ in range(steps):
        share = np.clip(high.mean(), 0.01, 0.99)
        upper, lower = high @ z / (high.sum() + 1e-9), (1 - high) @ z / ((1 - high).sum() + 1e-9)
        variance = (high @ (z - upper) ** 2 + (1 - high) @ (z - lower) ** 2) / len(z) + 1e-9
        slope, last = (upper - lower) / variance, high
        odds = slope * (z - (upper + lower) / 2) + logit(share)
        high = sigmoid(odds)
        if np.abs(high - last).max() < 1e-4:
            break
    below = np.log1p(-share) - (z - lower) ** 2 / (2 * variance) - np.log(variance) / 2
    gain = (np.logaddexp(0.0, odds) + below + z**2 / 2).sum()
    return float(np.clip(slope if gain > np.log(len(z)) else min(slope, 1.0), LEAST, MOST))


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
        slope: logits per standard deviation of the mean; None takes what the spread of the means makes likeliest.
        by_family: verifiers of one family count as one.
    """

    class_balance: float = 0.5
    slope: float | None = None
    by_family: bool = False

    LEARNED: ClassVar[tuple[str, ...]] = ("values", "heights", "families", "line")

    def learn(self, data: Data) -> None:
        normal = NormalScores.fit(data.x)
        self.values, self.heights = normal.values, normal.heights
        self.families = family_numbers(data) if self.by_family else None
        u = rank_means(normal(data.x), self.families)
        slope = self.slope
        if slope is None:
            slope = likeliest_slope(unheaped(data, self.families))
        a = slope / (u.std() + 1e-9)
        self.line = np.array([a, intercept(a * u, self.class_balance)])
        self.report.class_balance = self.class_balance
        self.report.details["slope"] = slope
        sizes = np.ones(len(data.columns)) if self.families is None else np.bincount(self.families)[self.families]
        for name, weight in zip(data.names, 1 / sizes, strict=True):
            self.report.verifiers[name]["weight"] = float(weight / (1 / sizes).sum())

    def update(self, data: Data) -> None:
        """Nothing: its scales are frozen, and it has nothing else."""

    def posterior(self, data: Data) -> np.ndarray:
        u = rank_means(NormalScores(self.values, self.heights)(data.x), self.families)
        return sigmoid(self.line[0] * u + self.line[1])
