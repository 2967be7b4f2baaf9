"""Selection among the responses to a problem.

Arrays are [problems, responses]. A response without a probability (NaN) ranks below all others; ties are broken at
random, and accuracies are expectations over them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import comb

import numpy as np

from .table import ScoreTable, check_labels


def best_of(p: np.ndarray) -> np.ndarray:
    """[problems] index of the most probable response, the first of equals; -1 if none has a probability."""
    filled = np.where(np.isnan(p), -np.inf, p)
    return np.where(np.isnan(p).all(1), -1, filled.argmax(1))


def selection_accuracy(p: np.ndarray, labels: np.ndarray) -> float:
    """Fraction of problems whose most probable response is right; label NaN for absent or unknown.

    Raises:
        ValueError: the shapes differ, or no problem has labels.
    """
    right = selected_right(p, labels)
    if np.isnan(right).all():
        raise ValueError("no problem has labels: selection accuracy is undefined")
    return float(np.nanmean(right))


def selected_right(p: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """[problems] probability that the selected response is right; NaN for a problem without labels."""
    if np.shape(p) != np.shape(labels):
        raise ValueError(f"probabilities are {np.shape(p)} and labels {np.shape(labels)}")
    check_labels(np.asarray(labels))
    filled = np.where(np.isnan(p), -1.0, p)
    top = np.where(np.isnan(labels), -2.0, filled).max(1, keepdims=True)
    ties = (filled == top) & ~np.isnan(labels)
    with np.errstate(invalid="ignore"):
        return np.where(ties, np.nan_to_num(labels), 0.0).sum(1) / ties.sum(1)


@dataclasses.dataclass
class Curve:
    """Accuracy against the number of responses, [ks] each: by probability, by chance, by an oracle (pass@k)."""

    ks: np.ndarray
    selected: np.ndarray
    chance: np.ndarray
    oracle: np.ndarray


def accuracy_against_k(p: np.ndarray, labels: np.ndarray, ks: Sequence[int] | None = None) -> Curve:
    """Mean accuracy over all subsets of k responses, in closed form (unbiased, as pass@k of Chen et al. 2021).

    Args:
        ks: by default powers of two up to the fewest labelled responses of a problem, and that number.

    Raises:
        ValueError: a k exceeds the labelled responses of some problem.
    """
    check_labels(labels)
    is_labelled = ~np.isnan(labels)
    rows = [(np.where(np.isnan(p[i, m]), -1.0, p[i, m]), labels[i, m]) for i, m in enumerate(is_labelled) if m.any()]
    fewest = min((len(label) for _, label in rows), default=0)
    if ks is None:
        ks = sorted({*(2**e for e in range(fewest.bit_length()) if 2**e <= fewest), fewest} - {0})
    if not rows or not ks or max(ks) > fewest or min(ks) < 1:
        raise ValueError(f"k must lie between 1 and {fewest}, the fewest labelled responses of a problem: {list(ks)}")
    selected = np.zeros((len(rows), len(ks)))
    oracle = np.zeros_like(selected)
    for i, (probability, label) in enumerate(rows):
        # In closed form: each rank's chance to be the best of a random subset of k.
        order = np.argsort(-probability, kind="stable")
        _, group = np.unique(-probability[order], return_inverse=True)
        # Ties are in arbitrary order: each counts as their mean.
        ranked = (np.bincount(group, label[order]) / np.bincount(group))[group]
        n, right = len(label), int(label.sum())
        for column, k in enumerate(ks):
            # The probability that the response of each rank is the first of a random subset of k.
            first = np.array([comb(n - 1 - rank, k - 1) for rank in range(n)], dtype=object) / comb(n, k)
            selected[i, column] = float((ranked * first.astype(float)).sum())
            oracle[i, column] = 1 - comb(n - right, k) / comb(n, k)
    chance = np.full(len(ks), np.mean([label.mean() for _, label in rows]))
    return Curve(np.array(ks), selected.mean(0), chance, oracle.mean(0))


def weighted_vote(p: np.ndarray, table: ScoreTable) -> list[str]:
    """Per problem, the answer with the largest sum of probabilities; "" if no answer has one.

    Raises:
        ValueError: the table has no answers.
    """
    if table.answers is None:
        raise ValueError("the table has no answers to vote on")
    winners = []
    for answers, weights in zip(table.answers, p, strict=True):
        votes: dict[str, float] = {}
        for answer, weight in zip(answers, weights, strict=False):
            if answer and not np.isnan(weight):
                votes[answer] = votes.get(answer, 0.0) + float(weight)
        winners.append(max(votes, key=votes.__getitem__) if votes else "")
    return winners


def vote_accuracy(winners: Sequence[str], table: ScoreTable) -> float:
    """Fraction of the problems with labels where a response with the winning answer is labelled right."""
    if table.answers is None or table.labels is None:
        raise ValueError("the accuracy of a vote needs answers and labels")
    right = []
    for winner, answers, labels in zip(winners, table.answers, table.labels, strict=True):
        labelled = [(answer, label) for answer, label in zip(answers, labels, strict=False) if not np.isnan(label)]
        if labelled:
            right.append(any(answer == winner != "" and label == 1 for answer, label in labelled))
    return float(np.mean(right))


@dataclasses.dataclass
class Abstention:
    """Selective prediction, [thresholds] each, from the most confident problem down.

    Args:
        threshold: answer if the selected response's probability is at least this.
        coverage: fraction of problems answered.
        accuracy: of the answered ones.
    """

    threshold: np.ndarray
    coverage: np.ndarray
    accuracy: np.ndarray


def abstention(p: np.ndarray, labels: np.ndarray) -> Abstention:
    """Coverage and accuracy at every threshold, selecting among labelled responses.

    Problems without labels are left out; those without a probability are never answered.
    """
    right = selected_right(p, labels)
    confidence = np.where(np.isnan(p) | np.isnan(labels), -np.inf, p).max(1)
    answerable = np.isfinite(confidence)
    order = np.argsort(-confidence[answerable], kind="stable")
    threshold, hits = confidence[answerable][order], np.cumsum(right[answerable][order])
    answered = np.arange(1, len(order) + 1)
    last = np.append(np.diff(threshold) != 0, True)[: len(order)]  # of each run of ties
    labelled = max((~np.isnan(right)).sum(), 1)
    return Abstention(threshold[last], (answered / labelled)[last], (hits / answered)[last])


def threshold_for(p: np.ndarray, labels: np.ndarray, accuracy: float) -> float:
    """The threshold that answers most problems with at least this accuracy; infinite if none does."""
    curve = abstention(p, labels)
    good = np.flatnonzero(curve.accuracy >= accuracy)
    return float(curve.threshold[good[-1]]) if len(good) else float("inf")
