"""Expectation maximisation (Dawid & Skene 1979) on binned scores with missing values."""

import dataclasses
from typing import Any, NamedTuple, Self

import numpy as np
from scipy.optimize import brentq, isotonic_regression
from scipy.special import expit as sigmoid, softmax

TOLERANCE = 1e-3  # expectation maximisation has converged when no probability moves by this much
# The grid of rates, finer at the ends, where a logit's step is larger.
RATES = np.array([0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])
MAX_EVIDENCE = 500.0  # nats: exp of twice this still is a double
PSEUDO_PROBLEMS = 0.01  # per rate: the weight of a rate never becomes 0, so it can grow again


@dataclasses.dataclass
class Prior:
    """Discrete prior on a problem's rate of right responses.

    The weights are a nonparametric maximum likelihood estimate (Kiefer & Wolfowitz 1956; Laird 1978) by expectation
    maximisation. The responses to one problem inform each other through its rate; within a problem, more evidence
    always gives a higher probability.

    Args:
        rates: [values] possible rates, between 0 and 1.
        weights: [values] probability of each rate.
        past: [values] expected number of earlier problems at each rate.
        counts: [values] the same, including the problems of the last `step`; empty before it.
    """

    rates: np.ndarray
    weights: np.ndarray
    past: np.ndarray | float = 0.0
    counts: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))

    @classmethod
    def start(cls, balance: float) -> Self:
        """Return a prior before any data: a grid of rates, with weights near equal whose mean rate is `balance`."""
        rates = RATES
        if not rates[0] <= balance <= rates[-1]:
            # The mean must lie within the range of the rates.
            rates = np.sort(np.append(rates, balance / 2 if balance < 0.5 else (1 + balance) / 2))
        return cls(rates, _tilt_weights(np.full(len(rates), 1 / len(rates)), rates, balance))

    @property
    def balance(self) -> float:
        """Return the mean rate of right responses under the prior."""
        return float(self.rates @ self.weights)

    def posterior(self, evidence: np.ndarray, problem: np.ndarray) -> np.ndarray:
        """Return each response's probability of being right, [responses].

        Args:
            evidence: [responses] log P(scores | right) / P(scores | wrong).
            problem: [responses] index of the problem, non-decreasing.
        """
        return self._infer_rates(evidence, problem)[0]

    def step(self, evidence: np.ndarray, problem: np.ndarray, balance: float | None) -> tuple[np.ndarray, "Prior"]:
        """Do one step of expectation maximisation; `evidence` and `problem` are as in `posterior`.

        Args:
            balance: the fraction of right responses, if known: the updated prior's mean rate.

        Returns:
            The posterior under this prior, [responses], and the updated prior.
        """
        r, expected, _ = self._infer_rates(evidence, problem)
        counts = self.past + expected
        weights = (counts + PSEUDO_PROBLEMS) / (counts + PSEUDO_PROBLEMS).sum()
        if balance is not None:
            weights = _tilt_weights(weights, self.rates, balance)
        return r, Prior(self.rates, weights, self.past, counts)

    def log_likelihood(self, evidence: np.ndarray, problem: np.ndarray) -> np.ndarray:
        """Return the log likelihood of each problem's scores, [problems], less what it is if all responses are wrong;
        arguments as above."""
        return self._infer_rates(evidence, problem)[2]

    def _infer_rates(self, evidence: np.ndarray, problem: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the values of `posterior`, the expected number of problems at each rate, and the values of
        `log_likelihood`."""
        evidence = np.clip(evidence, -MAX_EVIDENCE, MAX_EVIDENCE)
        # The larger of the two likelihoods is factored out, against overflow.
        if_right, if_wrong = np.exp(np.minimum(evidence, 0)), np.exp(-np.maximum(evidence, 0))
        right = if_right[:, None] * self.rates
        likelihoods = right + if_wrong[:, None] * (1 - self.rates)

        # The posterior of each problem's rate, [problems, rates].
        starts = np.flatnonzero(np.diff(problem, prepend=-1))
        with np.errstate(divide="ignore"):
            rate_posterior = np.add.reduceat(np.log(likelihoods), starts) + np.log(self.weights)
        top = rate_posterior.max(1, keepdims=True)
        rate_posterior = np.exp(rate_posterior - top)
        total = rate_posterior.sum(1, keepdims=True)
        likelihood = (top + np.log(total))[:, 0] + np.add.reduceat(np.maximum(evidence, 0), starts)
        rate_posterior /= total

        # The posterior of each response, given its problem's.
        per_response = np.repeat(rate_posterior, np.diff(np.append(starts, len(problem))), axis=0)
        r = np.einsum("ng,ng->n", right / likelihoods, per_response)
        return np.minimum(r, 1.0), rate_posterior.sum(0), likelihood


def _tilt_weights(weights: np.ndarray, rates: np.ndarray, balance: float) -> np.ndarray:
    """Return weights in proportion to weight times exp(c rate), with c such that the mean rate is `balance`."""
    logs = np.log(weights + 1e-12)
    c = brentq(lambda c: softmax(logs + c * rates) @ rates - balance, -1e5, 1e5)
    return softmax(logs + c * rates)


STARTS = (0.05, 0.5, 0.95)  # initial class balances
SAMPLE = 4000  # about that many responses select the best start: the full fit takes its time once, not three times


class Counts(NamedTuple):
    """Expected counts of each score bin among right and among wrong responses, both [verifiers, bins]."""

    right: np.ndarray
    wrong: np.ndarray


def count_bins(codes: np.ndarray, bins: int, r: np.ndarray) -> Counts:
    """Return how many right and wrong responses are expected in each bin.

    Args:
        codes: [verifiers, responses] bin of each score, from 0; `bins` for a missing one, which does not count.
        r: [responses] probability of being right.

    >>> count_bins(np.array([[0, 1, 1]]), 2, np.array([0.25, 1.0, 0.5]))
    Counts(right=array([[0.25, 1.5 ]]), wrong=array([[0.75, 0.5 ]]))
    """
    right = np.stack([np.bincount(code, r, bins + 1)[:bins] for code in codes])
    return Counts(right, np.stack([np.bincount(code, minlength=bins + 1)[:bins] for code in codes]) - right)


def log_ratios(counts: Counts, shrink: float, monotone: bool) -> np.ndarray:
    """Return log P(bin | right) / P(bin | wrong), [verifiers, bins + 1]; the last column is 0, for missing scores.

    Args:
        shrink: pseudo-responses per bin, distributed like the verifier's scores: they shrink its ratios towards 0.
        monotone: make the ratios non-decreasing in the bin (isotonic regression).
    """
    right, wrong = log_shares(counts, shrink)
    ratios = right - wrong
    if monotone:
        for v, weights in enumerate(counts.right + counts.wrong + 1e-3):
            ratios[v] = isotonic_regression(ratios[v], weights=weights).x
    return np.pad(ratios, ((0, 0), (0, 1)))


def log_shares(counts: Counts, shrink: float) -> tuple[np.ndarray, np.ndarray]:
    """Return log P(bin | right) and log P(bin | wrong), both [verifiers, bins]; `shrink` is as in `log_ratios`."""
    every = counts.right + counts.wrong + 1e-3
    used_bins = (counts.right + counts.wrong > 0).sum(1, keepdims=True)
    prior = shrink * used_bins * every / every.sum(1, keepdims=True)
    right, wrong = counts.right + prior + 1e-9, counts.wrong + prior + 1e-9
    return np.log(right / right.sum(1, keepdims=True)), np.log(wrong / wrong.sum(1, keepdims=True))


def sum_evidence(codes: np.ndarray, ratios: np.ndarray) -> np.ndarray:
    """Return the sum over verifiers of each score's log ratio, [responses].

    Args:
        codes: [verifiers, responses] bin of each score.
        ratios: [verifiers, bins + 1] log ratio of each bin, as `log_ratios` returns them.
    """
    return sum((ratio[code] for code, ratio in zip(codes, ratios, strict=True)), np.zeros(codes.shape[1]))


def first_guess(rank_mean: np.ndarray, balance: float) -> np.ndarray:
    """Return initial probabilities of being right, [responses]: above 1/2 for the fraction `balance` with the highest
    rank means."""
    return sigmoid(4 * (rank_mean - np.quantile(rank_mean, 1 - balance)) / (rank_mean.std() + 1e-9))


class Solution(NamedTuple):
    """Result of expectation maximisation: probabilities, log ratios of bins, and the fitted prior.

    Args:
        r: [responses] probability of being right.
        ratios: [verifiers, bins + 1] log ratios, as `log_ratios` returns them.
        counts: of the last step, earlier responses included.
        prior: on the problems' rates of right responses.
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
    """Fit by expectation maximisation: alternate between bin frequencies per class and class probabilities.

    Args:
        codes: [verifiers, responses] bin of each score, from 0; `bins` for a missing one.
        problem: [responses] index of the problem, non-decreasing.
        r: [responses] initial probability of being right.
        prior: initial prior on the problems' rates.
        shrink, monotone: as in `log_ratios`.
        balance: the fraction of right responses, if known.
        past: counts of earlier responses, added in each step.
        steps: maximum number.
    """
    step, moved = 0, np.inf
    while step < steps and moved >= TOLERANCE:
        step += 1

        # M step: the frequencies of bins in each class.
        counts = count_bins(codes, bins, r)
        if past is not None:
            counts = Counts(past.right + counts.right, past.wrong + counts.wrong)
        ratios = log_ratios(counts, shrink, monotone)

        # E step: the posterior.
        previous = r
        r, prior = prior.step(sum_evidence(codes, ratios), problem, balance)
        moved = np.abs(r - previous).max()

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
    """Fit as `solve_em` does, starting at the rank mean, and from several class balances if the balance is unknown.

    Each of STARTS is then tried on a sample of problems, since a single start can be far off under extreme balances;
    the most likely result initialises the full fit.

    Args:
        codes, bins, problem, shrink, monotone, balance, steps: as in `solve_em`.
        rank_mean: [responses] mean normal score of each response.
    """
    settings: dict[str, Any] = {"shrink": shrink, "monotone": monotone, "balance": balance, "steps": steps}

    def fit_subset(subset: np.ndarray, start_balance: float) -> Solution:
        guess, prior = first_guess(rank_mean[subset], start_balance), Prior.start(start_balance)
        return solve_em(codes[:, subset], bins, problem[subset], guess, prior, **settings)

    if balance is not None:
        return fit_subset(np.ones(len(problem), dtype=bool), balance)
    subset = thin_problems(problem)
    solutions = [fit_subset(subset, start_balance) for start_balance in STARTS]

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
    """Return a mask of the responses to every n-th problem, [responses] bool, about SAMPLE responses in total.

    Args:
        problem: [responses] index of each response's problem.
    """
    return np.unique(problem, return_inverse=True)[1] % max(1, round(len(problem) / SAMPLE)) == 0


def log_likelihood(codes: np.ndarray, solution: Solution, problem: np.ndarray, shrink: float) -> float:
    """Return the log likelihood of the bins `codes` under a solution; arguments as in `solve_em`."""
    # A column of 0 for missing scores, which carry no evidence.
    right, wrong = (np.pad(shares, ((0, 0), (0, 1))) for shares in log_shares(solution.counts, shrink))
    if_all_wrong = float(sum_evidence(codes, wrong).sum())
    return if_all_wrong + float(solution.prior.log_likelihood(sum_evidence(codes, right - wrong), problem).sum())
