"""Expectation maximisation of Dawid and Skene (1979) over binned scores with gaps."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from .prior import Prior, sigmoid

TOLERANCE = 1e-3
# Shares of right responses to start from, and on how many responses, about, the best start is chosen.
STARTS = (0.05, 0.5, 0.95)
SAMPLE = 4000


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
    right, wrong = log_shares(counts, shrink)
    found = right - wrong
    if monotone:
        for v, weights in enumerate(counts.right + counts.wrong + 1e-3):
            found[v] = isotonic(found[v], weights)
    return np.pad(found, ((0, 0), (0, 1)))


def log_shares(counts: Counts, shrink: float) -> tuple[np.ndarray, np.ndarray]:
    """[verifiers, bins] log P(bin | right) and log P(bin | wrong)."""
    every = counts.right + counts.wrong + 1e-3
    used = (counts.right + counts.wrong > 0).sum(1, keepdims=True)
    prior = shrink * used * every / every.sum(1, keepdims=True)
    right, wrong = counts.right + prior + 1e-9, counts.wrong + prior + 1e-9
    return np.log(right / right.sum(1, keepdims=True)), np.log(wrong / wrong.sum(1, keepdims=True))


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
    converged: whether it was the former.
    """

    r: np.ndarray
    ratios: np.ndarray
    counts: Counts
    prior: Prior
    steps: int
    converged: bool


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
    steps: int = 200,
) -> Solution:
    """Alternate between the bins' frequencies in each class and each response's class.

    Args:
        codes: [verifiers, responses], `bins` where missing.
        problem: [responses] its number, rising.
        r: [responses] where to start.
        balance: the share of right responses where it is given.
        past: counts of earlier responses, that count `decay` each.
    """
    step, moved = 0, np.inf
    while step < steps and moved >= TOLERANCE:
        step += 1
        counts = Counts.of(codes, bins, r)
        if past is not None:
            counts = past.plus(counts, decay)
        ratios = log_ratios(counts, shrink, monotone)
        last = r
        r, prior = prior.step(evidence(codes, ratios), problem, balance)
        moved = np.abs(r - last).max()
    return Solution(r, ratios, counts, prior, step, bool(moved < TOLERANCE))


def search(
    codes: np.ndarray,
    bins: int,
    problem: np.ndarray,
    rank_mean: np.ndarray,
    *,
    shrink: float,
    monotone: bool,
    balance: float | None = None,
    by_problem: bool = True,
    steps: int = 200,
) -> Solution:
    """`solve` from the rank mean. Where the balance is not given, from each of STARTS on some problems: one start may
    end far from the truth where nearly all responses are wrong or right. The whole begins at the likeliest result.

    Args:
        codes, bins, problem, shrink, monotone, balance, steps: as of `solve`.
        rank_mean: [responses]
        by_problem: each problem has its own rate of right responses.
    """
    settings: dict[str, Any] = {"shrink": shrink, "monotone": monotone, "balance": balance, "steps": steps}

    def begun(some: np.ndarray, share: float) -> Solution:
        guess = first_guess(rank_mean[some], share)
        return solve(codes[:, some], bins, problem[some], guess, Prior.start(share, by_problem), **settings)

    everything = np.ones(len(problem), dtype=bool)
    if balance is not None:
        return begun(everything, balance)
    some = thinned(problem)
    found = [begun(some, share) for share in STARTS]
    # A start may end with the classes swapped, which is just as likely: what goes with the rank mean comes first.
    found = [one for one in found if one.r @ (rank_mean[some] - rank_mean[some].mean()) > 0] or found
    best = found[int(np.argmax([log_likelihood(codes[:, some], one, problem[some], shrink) for one in found]))]
    if some.all():
        return best
    r = best.prior.posterior(evidence(codes, best.ratios), problem)
    return solve(codes, bins, problem, r, Prior(best.prior.rates, best.prior.weights), **settings)


def thinned(problem: np.ndarray) -> np.ndarray:
    """[responses] those of every so manieth problem, about SAMPLE in all."""
    number = np.unique(problem, return_inverse=True)[1]
    return number % max(1, round(len(problem) / SAMPLE)) == 0


def log_likelihood(codes: np.ndarray, found: Solution, problem: np.ndarray, shrink: float) -> float:
    """How likely the bins are under a solution."""
    right, wrong = (np.pad(side, ((0, 0), (0, 1))) for side in log_shares(found.counts, shrink))
    return float(evidence(codes, wrong).sum()) + found.prior.log_likelihood(evidence(codes, right - wrong), problem)
