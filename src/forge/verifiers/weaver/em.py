"""Expectation maximisation of Dawid and Skene (1979) over binned scores with gaps."""

from __future__ import annotations

import dataclasses

import numpy as np

from .prior import Prior, sigmoid

TOLERANCE = 1e-3


@dataclasses.dataclass
class Counts:
    """How often each bin was seen among right and among wrong responses, in expectation.

    Args:
        right, wrong: [verifiers, bins]
        balance: [2] right and wrong responses in all.
    """

    right: np.ndarray
    wrong: np.ndarray
    balance: np.ndarray

    @classmethod
    def of(cls, codes: np.ndarray, bins: int, r: np.ndarray) -> Counts:
        """Args: codes [verifiers, responses], `bins` where missing; r [responses] probability of being right."""
        right = np.stack([np.bincount(code, r, bins + 1)[:bins] for code in codes])
        every = np.stack([np.bincount(code, minlength=bins + 1)[:bins] for code in codes])
        return cls(right, every - right, np.array([r.sum(), len(r) - r.sum()]))

    def plus(self, other: Counts, decay: float = 1.0) -> Counts:
        """These, fading by `decay`, and others."""
        return Counts(
            decay * self.right + other.right, decay * self.wrong + other.wrong, decay * self.balance + other.balance
        )


def log_ratios(counts: Counts, shrink: float, monotone: bool) -> np.ndarray:
    """[verifiers, bins + 1] log P(bin | right) / P(bin | wrong); the last is 0, for missing.

    Args:
        shrink: pseudo-responses a bin, spread as the verifier's scores are over both classes: they pull towards 0.
        monotone: a higher bin never speaks against a response more than a lower one does (isotonic regression).
    """
    every = counts.right + counts.wrong + 1e-3
    used = (counts.right + counts.wrong > 0).sum(1, keepdims=True)
    prior = shrink * used * every / every.sum(1, keepdims=True)
    right, wrong = counts.right + prior + 1e-9, counts.wrong + prior + 1e-9
    found = np.log(right / right.sum(1, keepdims=True)) - np.log(wrong / wrong.sum(1, keepdims=True))
    if monotone:
        for v, weights in enumerate(every):
            found[v] = isotonic(found[v], weights)
    return np.pad(found, ((0, 0), (0, 1)))


def isotonic(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The nearest rising sequence in weighted squares: neighbours that fall are pooled until none do."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            (a, u, n), (b, w, k) = blocks[-2:]
            blocks[-2:] = [((a * u + b * w) / (u + w), u + w, n + k)]
    return np.repeat([value for value, _, _ in blocks], [count for _, _, count in blocks])


def evidence(codes: np.ndarray, ratios: np.ndarray) -> np.ndarray:
    """[responses] the sum of the verifiers' log ratios."""
    total = np.zeros(codes.shape[1])
    for code, ratio in zip(codes, ratios, strict=True):
        total += ratio[code]
    return total


def first_guess(rank_mean: np.ndarray, balance: float) -> np.ndarray:
    """[responses] soft labels to start from: the share `balance` of highest rank means is likelier right than not."""
    return sigmoid(4 * (rank_mean - np.quantile(rank_mean, 1 - balance)) / (rank_mean.std() + 1e-9))


@dataclasses.dataclass
class Solution:
    """Args:
    r: [responses] probability of being right.
    ratios: [verifiers, bins + 1]
    counts: those of the last step, with the past's.
    prior: of being right.
    steps: until no probability moved by TOLERANCE, or all that were allowed.
    """

    r: np.ndarray
    ratios: np.ndarray
    counts: Counts
    prior: Prior
    steps: int


def solve(
    codes: np.ndarray,
    bins: int,
    problem: np.ndarray,
    r: np.ndarray,
    prior: Prior,
    *,
    shrink: float,
    monotone: bool,
    balance: float | None = None,
    past: Counts | None = None,
    decay: float = 1.0,
    steps: int = 60,
) -> Solution:
    """Alternate between the bins' frequencies in each class and each response's class.

    Args:
        codes: [verifiers, responses], `bins` where missing.
        problem: [responses] its number, rising.
        r: [responses] where to start.
        balance: the share of right responses where it is given.
        past: counts of earlier responses, that count `decay` each.
    """
    for step in range(1, steps + 1):  # noqa: B007
        counts = Counts.of(codes, bins, r)
        if past is not None:
            counts = past.plus(counts, decay)
        ratios = log_ratios(counts, shrink, monotone)
        last = r
        r, prior = prior.step(evidence(codes, ratios), problem, balance)
        if np.abs(r - last).max() < TOLERANCE:
            break
    return Solution(r, ratios, counts, prior, step)
