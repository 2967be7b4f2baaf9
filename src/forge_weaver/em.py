"""Expectation maximisation (Dawid & Skene 1979) on binned scores with missing values."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq, isotonic_regression
from scipy.special import expit as sigmoid
from scipy.special import softmax

TOLERANCE = 1e-3  # movement of a probability at which expectation maximisation has converged
# The grid of rates, finer at the ends, where a logit's step is larger.
RATES = np.array([0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])
MAX_EVIDENCE = 500.0  # nats: exp of twice this still is a double
# Pseudo-problems per rate, so that a rate whose weight vanished can recover.
PSEUDO_PROBLEMS = 0.01


@dataclasses.dataclass
class Prior:
    """Discrete prior on each problem's rate of right responses.

    The weights are a nonparametric maximum likelihood estimate (Kiefer & Wolfowitz 1956; Laird 1978) by expectation
    maximisation. Responses to one problem inform each other; the order within a problem is that of the evidence.

    Args:
        rates, weights: [values]
        past: [values] earlier problems at each rate.
        counts: the same including the last step; empty before it.
    """

    rates: np.ndarray
    weights: np.ndarray
    past: np.ndarray | float = 0.0
    counts: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))

    @classmethod
    def start(cls, balance: float) -> Prior:
        """Before any data: a grid of rates that problems differ in."""
        rates = RATES
        if not rates[0] <= balance <= rates[-1]:
            # The mean must lie within the range of the rates.
            rates = np.sort(np.append(rates, balance / 2 if balance < 0.5 else (1 + balance) / 2))
        return cls(rates, _tilt_weights(np.full(len(rates), 1 / len(rates)), rates, balance))

    @property
    def balance(self) -> float:
        """Return the mean rate."""
        return float(self.rates @ self.weights)

    def posterior(self, evidence: np.ndarray, problem: np.ndarray) -> np.ndarray:
        """[responses] probability of being right.

        Args:
            evidence: [responses] log P(scores | right) / P(scores | wrong).
            problem: [responses] index, non-decreasing.
        """
        return self._infer_prior(evidence, problem)[0]

    def step(self, evidence: np.ndarray, problem: np.ndarray, balance: float | None) -> tuple[np.ndarray, Prior]:
        """Return the posterior and the updated prior, whose mean is held at `balance` if given."""
        r, expected, _ = self._infer_prior(evidence, problem)
        counts = self.past + expected
        weights = (counts + PSEUDO_PROBLEMS) / (counts + PSEUDO_PROBLEMS).sum()
        if balance is not None:
            weights = _tilt_weights(weights, self.rates, balance)
        return r, Prior(self.rates, weights, self.past, counts)

    def log_likelihood(self, evidence: np.ndarray, problem: np.ndarray) -> float:
        """Log likelihood of the scores, relative to all responses being wrong."""
        return self._infer_prior(evidence, problem)[2]

    def _infer_prior(self, evidence: np.ndarray, problem: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        evidence = np.clip(evidence, -MAX_EVIDENCE, MAX_EVIDENCE)
        # The larger of the two likelihoods is factored out, against overflow.
        up, down = np.exp(np.minimum(evidence, 0)), np.exp(-np.maximum(evidence, 0))
        right = up[:, None] * self.rates
        likelihoods = right + down[:, None] * (1 - self.rates)

        # The posterior of each problem's rate, then of each response given the rate.
        starts = np.flatnonzero(np.diff(problem, prepend=-1))
        with np.errstate(divide="ignore"):
            fit = np.add.reduceat(np.log(likelihoods), starts) + np.log(self.weights)
        top = fit.max(1, keepdims=True)
        fit = np.exp(fit - top)
        total = fit.sum(1, keepdims=True)
        likelihood = (top + np.log(total)).sum() + np.maximum(evidence, 0).sum()

        fit /= total
        per_response = np.repeat(fit, np.diff(np.append(starts, len(problem))), axis=0)
        return np.minimum(np.einsum("ng,ng->n", right / likelihoods, per_response), 1.0), fit.sum(0), float(likelihood)


def _tilt_weights(weights: np.ndarray, rates: np.ndarray, balance: float) -> np.ndarray:
    """Exponential tilting: weights times exp(c rate), with c such that the mean rate is `balance`."""
    logs = np.log(weights + 1e-12)
    return softmax(logs + brentq(lambda c: softmax(logs + c * rates) @ rates - balance, -1e5, 1e5) * rates)


STARTS = (0.05, 0.5, 0.95)  # initial class balances
SAMPLE = 4000  # about that many responses select the best of them: the full fit takes its time once, not three times


class Counts(NamedTuple):
    """Expected counts of each bin among right and among wrong responses, [verifiers, bins]."""

    right: np.ndarray
    wrong: np.ndarray


def count_bins(codes: np.ndarray, bins: int, r: np.ndarray) -> Counts:
    """Return counts from codes [verifiers, responses], `bins` for missing, and r [responses], the probabilities of
    being right."""
    right = np.stack([np.bincount(code, r, bins + 1)[:bins] for code in codes])
    every = np.stack([np.bincount(code, minlength=bins + 1)[:bins] for code in codes])
    return Counts(right, every - right)


def log_ratios(counts: Counts, shrink: float, monotone: bool) -> np.ndarray:
    """[verifiers, bins + 1] log P(bin | right) / P(bin | wrong); the last is 0, for missing.

    Args:
        shrink: pseudo-responses per bin, distributed like the verifier's scores: they shrink towards 0.
        monotone: non-decreasing in the bin (isotonic regression).
    """
    right, wrong = log_shares(counts, shrink)
    ratios = right - wrong
    if monotone:
        for v, weights in enumerate(counts.right + counts.wrong + 1e-3):
            ratios[v] = isotonic_regression(ratios[v], weights=weights).x
    return np.pad(ratios, ((0, 0), (0, 1)))


def log_shares(counts: Counts, shrink: float) -> tuple[np.ndarray, np.ndarray]:
    """[verifiers, bins] log P(bin | right) and log P(bin | wrong)."""
    every = counts.right + counts.wrong + 1e-3
    used = (counts.right + counts.wrong > 0).sum(1, keepdims=True)
    prior = shrink * used * every / every.sum(1, keepdims=True)
    right, wrong = counts.right + prior + 1e-9, counts.wrong + prior + 1e-9
    return np.log(right / right.sum(1, keepdims=True)), np.log(wrong / wrong.sum(1, keepdims=True))


def sum_evidence(codes: np.ndarray, ratios: np.ndarray) -> np.ndarray:
    """[responses] sum of the verifiers' log ratios."""
    return sum((ratio[code] for code, ratio in zip(codes, ratios, strict=True)), np.zeros(codes.shape[1]))


def first_guess(rank_mean: np.ndarray, balance: float) -> np.ndarray:
    """[responses] initial soft labels: above 1/2 for the fraction `balance` of highest rank means."""
    return sigmoid(4 * (rank_mean - np.quantile(rank_mean, 1 - balance)) / (rank_mean.std() + 1e-9))


class Solution(NamedTuple):
    """Result of expectation maximisation.

    Args:
        r: [responses] probability of being right.
        ratios: [verifiers, bins + 1]
        counts: of the last step, earlier responses included.
        prior: of being right.
        steps: number of steps.
        converged: whether no probability moved by TOLERANCE in the last step.
    """

    r: np.ndarray
    ratios: np.ndarray
    counts: Counts
    prior: Prior
    steps: int
    converged: bool


def solve_em(
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
    steps: int = 200,
) -> Solution:
    """Expectation maximisation: alternate between bin frequencies per class and class probabilities.

    Args:
        codes: [verifiers, responses], `bins` for missing.
        problem: [responses] index, non-decreasing.
        r: [responses] initial probabilities.
        balance: the fraction of right responses, if known.
        past: counts of earlier responses.
    """
    step, moved = 0, np.inf
    # M step: counts of bins in each class, earlier ones faded; E step: the posterior.
    while step < steps and moved >= TOLERANCE:
        step += 1
        counts = count_bins(codes, bins, r)
        if past is not None:
            counts = Counts(past.right + counts.right, past.wrong + counts.wrong)
        ratios = log_ratios(counts, shrink, monotone)
        last = r
        r, prior = prior.step(sum_evidence(codes, ratios), problem, balance)
        moved = np.abs(r - last).max()
    return Solution(r, ratios, counts, prior, step, bool(moved < TOLERANCE))


def search_em(
    codes: np.ndarray,
    bins: int,
    problem: np.ndarray,
    rank_mean: np.ndarray,
    *,
    shrink: float,
    monotone: bool,
    balance: float | None = None,
    steps: int = 200,
) -> Solution:
    """`solve` from the rank mean. Without a known balance it is run from each of STARTS on a sample of problems, since
    a single start can be far off under extreme balances; the most likely result initialises the full run.

    Args:
        codes, bins, problem, shrink, monotone, balance, steps: as in `solve`.
        rank_mean: [responses]
    """
    settings: dict[str, Any] = {"shrink": shrink, "monotone": monotone, "balance": balance, "steps": steps}

    def from_balance(subset: np.ndarray, share: float) -> Solution:
        guess = first_guess(rank_mean[subset], share)
        return solve_em(codes[:, subset], bins, problem[subset], guess, Prior.start(share), **settings)

    everything = np.ones(len(problem), dtype=bool)
    if balance is not None:
        return from_balance(everything, balance)
    subset = thin_problems(problem)
    solutions = [from_balance(subset, share) for share in STARTS]

    # Solutions with swapped classes are equally likely: prefer those that agree with the rank mean.
    centred = rank_mean[subset] - rank_mean[subset].mean()
    solutions = [solution for solution in solutions if solution.r @ centred > 0] or solutions
    likelihoods = [log_likelihood(codes[:, subset], solution, problem[subset], shrink) for solution in solutions]
    best = solutions[int(np.argmax(likelihoods))]
    if subset.all():
        return best
    r = best.prior.posterior(sum_evidence(codes, best.ratios), problem)

    return solve_em(codes, bins, problem, r, Prior(best.prior.rates, best.prior.weights), **settings)


def thin_problems(problem: np.ndarray) -> np.ndarray:
    """[responses] mask of every n-th problem, about SAMPLE responses in total."""
    number = np.unique(problem, return_inverse=True)[1]
    return number % max(1, round(len(problem) / SAMPLE)) == 0


def log_likelihood(codes: np.ndarray, solution: Solution, problem: np.ndarray, shrink: float) -> float:
    """Log likelihood of the bins under a solution."""
    right, wrong = (np.pad(side, ((0, 0), (0, 1))) for side in log_shares(solution.counts, shrink))
    return float(sum_evidence(codes, wrong).sum()) + solution.prior.log_likelihood(
        sum_evidence(codes, right - wrong), problem
    )
