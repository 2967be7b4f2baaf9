"""What real verifiers allow without labels, and what few labels add: selection accuracy on RewardMATH's scores.

    python benchmarks/real_verifiers.py PATH_TO_NPZ --splits 40

The file holds `scores` [problems, candidates, verifiers], `correct` [problems, candidates] and `verifiers`. Settings of
a method are chosen by the labels of one half of the problems, which are drawn at random, and judged on the other half;
the fit itself sees no label. What learns from labelled problems is judged on all others.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from forge_weaver import (
    Aggregator,
    AnchoredLogistic,
    Auto,
    NaiveMean,
    PublishedWeaver,
    RankMean,
    ScoreTable,
    TopAgreement,
    families_by_name,
)
from forge_weaver.calibration import auc
from forge_weaver.selection import selected_right, selection_accuracy

Make = Callable[[], Aggregator]
LABELLED = (10, 24, 50)

# Each method by its settings, of which one half of the data chooses.
METHODS: dict[str, dict[str, Make]] = {
    "naive mean, min-max": {"": NaiveMean},
    "rank mean": {"each": lambda: RankMean(0.1), "families": lambda: RankMean(0.1, by_family=True)},
    "published Weaver, share given": {
        f"start {seed}": lambda seed=seed: PublishedWeaver(class_balance=0.1, seed=seed)  # type: ignore[misc]
        for seed in range(3)
    },
    "top agreement": {
        f"sharpness {sharpness}, power {power}": lambda s=sharpness, p=power: TopAgreement(0.1, s, p)  # type: ignore[misc]
        for sharpness in (1.0, 2.0, 3.0)
        for power in (1.0, 2.0, 4.0)
    },
    "auto, told that one is right": {"": lambda: Auto(one_right=True)},
}


def read(path: Path) -> ScoreTable:
    """Read the scores with their labels."""
    with np.load(path, allow_pickle=False) as file:
        names = tuple(str(name) for name in file["verifiers"])
        return ScoreTable(file["scores"], names, labels=file["correct"], families=families_by_name(names))


def labels(table: ScoreTable) -> np.ndarray:
    """[problems, candidates] the labels of a table that has them."""
    assert table.labels is not None
    return table.labels


def unlabelled(make: Make, seen: ScoreTable, judged: ScoreTable) -> np.ndarray:
    """[problems, candidates] probabilities after a fit without labels."""
    hidden = seen.with_labels_of(np.array([], dtype=int))
    return make().fit(hidden).predict_proba(judged.with_labels_of(np.array([], dtype=int)))


def choose(settings: Mapping[str, Make], table: ScoreTable) -> str:
    """The settings with the highest selection accuracy on a table's labels."""
    if len(settings) == 1:
        return next(iter(settings))
    accuracies = {
        name: selection_accuracy(unlabelled(make, table, table), labels(table)) for name, make in settings.items()
    }
    return max(accuracies, key=lambda name: accuracies[name])


def interval(values: np.ndarray) -> str:
    """Mean of values, with the range of the middle 95 %."""
    low, high = np.quantile(values, (0.025, 0.975))
    return (
        f"{values.mean():.3f} ({low:+.3f} to {high:+.3f})"
        if low < 0
        else f"{values.mean():.3f} ({low:.3f} to {high:.3f})"
    )


def paired(first: np.ndarray, second: np.ndarray, draws: int = 10_000) -> np.ndarray:
    """[draws] difference of two accuracies over problems drawn with replacement; the same problems for both."""
    difference = first - second
    rows = np.random.default_rng(0).integers(len(difference), size=(draws, len(difference)))
    return difference[rows].mean(1)


def halves(table: ScoreTable, splits: int) -> None:
    """Print each method on the halves that did not choose its settings."""
    accuracy: dict[str, list[float]] = {name: [] for name in METHODS}
    areas: dict[str, list[float]] = {name: [] for name in METHODS}
    for seed in range(splits):
        order = np.random.default_rng(seed).permutation(len(table))
        first = table.take(order[::2])
        second = table.take(order[1::2])
        for name, settings in METHODS.items():
            p = unlabelled(settings[choose(settings, first)], first, second)
            accuracy[name].append(selection_accuracy(p, labels(second)))
            areas[name].append(auc(p, labels(second)))
    naive = np.array(accuracy["naive mean, min-max"])
    print("| method, without labels | selection | less the naive mean's | better in | AUC |\n|---|---|---|---|---|")
    for name, values in accuracy.items():
        gain = np.array(values) - naive
        print(
            f"| {name} | {interval(np.array(values))} | {interval(gain)} | {(gain > 0).mean():.0%} | "
            f"{np.mean(areas[name]):.3f} |"
        )


def whole(table: ScoreTable, draws: int = 1000) -> None:
    """Print top agreement, with its default settings, against the naive mean on all problems."""
    truth = labels(table)
    naive = unlabelled(NaiveMean, table, table)
    agreed = unlabelled(lambda: TopAgreement(0.1), table, table)
    gain = paired(selected_right(agreed, truth), selected_right(naive, truth))
    rows = np.random.default_rng(0).integers(len(truth), size=(draws, len(truth)))
    areas = np.array([auc(agreed[row], truth[row]) - auc(naive[row], truth[row]) for row in rows])
    print("\nTop agreement less naive mean on all problems, with 95 % intervals over problems:")
    print(f"selection {interval(gain)}, AUC {interval(areas)}.")


def few(table: ScoreTable, splits: int) -> None:
    """Print what labels of few problems add, on the problems without."""
    print("\n| labelled problems | selection | less the naive mean's | better in |\n|---|---|---|---|")
    for count in LABELLED:
        values, gains = [], []
        for seed in range(splits):
            order = np.random.default_rng(seed).permutation(len(table))
            others = table.take(order[count:])
            p = AnchoredLogistic().fit(table.with_labels_of(order[:count])).predict_proba(others)
            values.append(selection_accuracy(p, labels(others)))
            gains.append(values[-1] - selection_accuracy(unlabelled(NaiveMean, table, others), labels(others)))
        better = (np.array(gains) > 0).mean()
        print(f"| {count} | {interval(np.array(values))} | {interval(np.array(gains))} | {better:.0%} |")
    oracle = AnchoredLogistic().fit(table).predict_proba(table)
    print(f"| all, in sample | {selection_accuracy(oracle, labels(table)):.3f} | | |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--splits", type=int, default=40)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    table = read(args.file)
    candidates = labels(table).shape[1]
    print(f"{len(table)} problems, {candidates} candidates, {len(table.verifiers)} verifiers; {args.splits} splits.\n")
    halves(table, args.splits)
    whole(table)
    few(table, args.splits)


if __name__ == "__main__":
    main()
