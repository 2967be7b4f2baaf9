"""How well the aggregators of forge_weaver do, as Markdown tables.

    python -m benchmarks.weaver recovery|scenarios|drift|speed|all [--seeds 5]
    python -m benchmarks.weaver rewardmath --rewardmath PATH_TO_NPZ

recovery    error of the estimated true-positive rates on verdicts whose truth is known, 500 x 100 x 33
scenarios   selection, area under the ROC curve and calibration on made-up verifiers, 300 x 32 x 24
drift       a policy that gets better while three of twelve verifiers are gamed
speed       CPU-seconds of a fit of 500 x 100 x 33, and responses a second of a prediction
rewardmath  real scores of 30 verifiers, 10 candidates a problem of which one is right: `scores`, `correct`, `verifiers`
            in a file; also paired differences of `auto` and the means, by halves of problems, subsets of verifiers
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import ndtri

from forge_weaver import (
    Aggregator,
    AnchoredLogistic,
    Auto,
    BinnedDawidSkene,
    CorrelatedMixture,
    DawidSkene,
    NaiveMean,
    Online,
    PublishedWeaver,
    RankMean,
    ScoreTable,
    families_by_name,
)
from forge_weaver.calibration import auc, brier_score, ece
from forge_weaver.selection import selection_accuracy
from tests.forge_weaver.synthetic import SCENARIOS, generate, scenario

Make = Callable[[float], Aggregator]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "rewardmath", "all"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rewardmath", help="rewardmath_dev.npz")
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    for name, part in PARTS.items():
        if args.part in (name, "all"):
            print(f"\n## {name}\n")
            part(args.seeds)
    if args.part in ("rewardmath", "all"):
        print("\n## rewardmath\n")
        if args.rewardmath:
            rewardmath(args.rewardmath, args.seeds)
        else:
            print("Not run: it needs --rewardmath PATH, the .npz of real verifier scores.")


def recovery(seeds: int) -> None:
    makers: dict[str, Make] = {
        "Dawid-Skene": lambda pi: DawidSkene(),
        "published Weaver, pi given": lambda pi: PublishedWeaver(class_balance=pi),
        "the same, converged": lambda pi: PublishedWeaver(class_balance=pi, converged=True),
    }
    cases: dict[str, dict[str, float]] = {
        "independent": {},
        "20 % missing": {"missing": 0.2},
        "correlation .5": {"correlation": 0.5},
    }
    print(f"Mean |TPR error| over 33 verifiers, at pi = .1 / .3 / .6: mean (largest) of {seeds} seeds. Where a method")
    print("drops verifiers, [n] is how many it kept, in the mean: the error is of those.\n")
    rows = []
    found: dict[tuple[str, str], list[str]] = {}
    for case, settings in cases.items():
        for pi in (0.1, 0.3, 0.6):
            errors: dict[str, list[float]] = {name: [] for name in makers}
            kept: dict[str, list[int]] = {name: [] for name in makers}
            for seed in range(seeds):
                table = generate(500, 100, 33, balance=pi, verdicts=True, seed=seed, **settings).table  # type: ignore[arg-type]
                truth = np.nanmean(np.where(labels(table)[..., None] == 1, table.scores, np.nan), axis=(0, 1))
                for name, make in makers.items():
                    fitted = make(labels(table).mean()).fit(table.with_labels_of([]))
                    rates = [fitted.report.verifiers[v].get("tpr", np.nan) for v in table.verifiers]
                    errors[name].append(float(np.nanmean(np.abs(np.array(rates) - truth))))
                    kept[name].append(int((~np.isnan(rates)).sum()))
            for name, values in errors.items():
                some = "" if min(kept[name]) == 33 else f" [{np.mean(kept[name]):.0f}]"
                found.setdefault((name, case), []).append(f"{np.mean(values):.3f} ({max(values):.3f}){some}")
    for name in makers:
        rows.append([name, *(" / ".join(found[name, case]) for case in cases)])
    markdown(["method", *cases], rows)


UNSUPERVISED: dict[str, Make] = {
    "naive min-max mean": lambda pi: NaiveMean(),
    "rank mean, pi given": lambda pi: RankMean(pi),
    "published Weaver, pi given": lambda pi: PublishedWeaver(class_balance=pi),
    "the same, converged": lambda pi: PublishedWeaver(class_balance=pi, converged=True),
    "Dawid-Skene": lambda pi: DawidSkene(),
    "binned Dawid-Skene": lambda pi: BinnedDawidSkene(),
    "correlated mixture": lambda pi: CorrelatedMixture(),
    "auto": lambda pi: Auto(),
}


def scenarios(seeds: int) -> None:
    print(f"Selection / AUC / ECE on 300 problems of 32 responses by 24 verifiers, pi = .3; means of {seeds} seeds.\n")
    cells: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for case in SCENARIOS:
        for seed in range(seeds):
            table = scenario(case, seed).table
            hidden = table.with_labels_of([])
            for name, make in UNSUPERVISED.items():
                p = make(labels(table).mean()).fit(hidden).predict_proba(hidden)
                cells.setdefault((name, case), []).append(judged(p, labels(table)))
            order = np.random.default_rng(seed).permutation(len(table))
            for count in (5, 10):
                fitted = AnchoredLogistic().fit(table.with_labels_of(order[:count]))
                rest = table.take(order[count:])
                found = judged(fitted.predict_proba(rest), labels(rest))
                cells.setdefault((f"logistic regression, {count} labelled problems", case), []).append(found)
                found = judged(Auto().fit(table.with_labels_of(order[:count])).predict_proba(rest), labels(rest))
                cells.setdefault((f"auto, {count} labelled problems", case), []).append(found)
            half = len(table) // 2
            fitted = AnchoredLogistic().fit(table.with_labels_of(order[:half]))
            rest = table.take(order[half:])
            found = judged(fitted.predict_proba(rest), labels(rest))
            cells.setdefault(("logistic regression, half of the problems", case), []).append(found)
    names = dict.fromkeys(name for name, _ in cells)
    markdown(["method", *SCENARIOS], [[n, *(triple(cells[n, c]) for c in SCENARIOS)] for n in names])


def drift(
    batches: int = 40,
    problems: int = 32,
    responses: int = 8,
    verifiers: int = 12,
    *,
    hacked: int = 3,
    balance: tuple[float, float] = (0.2, 0.7),
    first: int = 125,
    seed: int = 0,
) -> list[ScoreTable]:
    """Tables of a policy that improves over `balance` and games the first `hacked` verifiers.

    Those lose their discrimination linearly over the batches, and their scores rise for all responses.

    Args:
        first: problems of the first table, before the drift.
    """
    rng = np.random.default_rng(seed)
    distance = np.sqrt(2) * ndtri(rng.uniform(0.6, 0.8, verifiers))
    judges = np.arange(verifiers) % 3 == 2
    cuts = rng.normal(0.3, 0.5, verifiers)
    names = tuple(f"{'judge' if judges[v] else 'model'}_{v}" for v in range(verifiers))
    tables = []
    for batch in range(batches + 1):
        t = batch / batches
        rate = balance[0] + t * (balance[1] - balance[0])
        shape = (problems if batch else first, responses)
        right = rng.random(shape) < rng.beta(3 * rate, 3 * (1 - rate), shape[0])[:, None]
        spoilt = t * (np.arange(verifiers) < hacked)
        latent = distance * (1 - spoilt) * right[..., None] + 2 * spoilt + rng.normal(size=(*shape, verifiers))
        tables.append(ScoreTable(np.where(judges, latent > cuts, latent), names, labels=right.astype(float)))
    return tables


def drifting(seeds: int) -> None:
    print(f"Brier / ECE over 40 batches of 32 problems x 8 responses, pi .2 -> .7; {seeds} seeds.\n")
    rows = []
    for hacked in (3, 0):
        for seed in range(seeds):
            first, *rest = drift(seed=seed, hacked=hacked)
            online, static = Online().fit(first), BinnedDawidSkene().fit(first)
            fixed = PublishedWeaver(class_balance=labels(first).mean()).fit(first)
            begin = time.process_time()
            followed = [online.partial_fit(table).predict_proba(table) for table in rest]
            each = (time.process_time() - begin) / len(rest)
            truth = np.concatenate([labels(table) for table in rest])
            cells = [followed, *([one.predict_proba(table) for table in rest] for one in (static, fixed))]
            both = [np.concatenate(cell) for cell in cells]
            alarms = {alarm.split(":")[0] for alarm in online.report.alarms}
            right = len(alarms & set(first.verifiers[:hacked]))
            rows.append(
                [
                    f"{hacked} gamed, seed {seed}",
                    *(f"{brier_score(p, truth):.3f} / {ece(p, truth):.3f}" for p in both),
                    f"{right} of {hacked}, {len(alarms) - right} false",
                    f"{1e3 * each:.0f}",
                ]
            )
    markdown(["", "online", "static binned", "static published", "alarms", "CPU-ms a batch"], rows)


def speed(seeds: int) -> None:
    del seeds
    print("500 problems x 100 responses x 33 verifiers, a third of them verdicts.\n")
    rows = []
    for case in ("independent", "correlated"):
        table = generate(500, 100, 33, **{k: v for k, v in SCENARIOS[case].items()}).table  # type: ignore[arg-type]
        hidden = table.with_labels_of([])
        makers = {**UNSUPERVISED, "online": lambda pi: Online()}
        for name, make in makers.items():
            begin = time.process_time()
            fitted = make(0.3).fit(hidden)
            fit = time.process_time() - begin
            begin = time.process_time()
            fitted.predict_proba(hidden)
            rows.append([name, case, f"{fit:.2f}", f"{50_000 / (time.process_time() - begin):,.0f}"])
        begin = time.process_time()
        fitted = AnchoredLogistic().fit(table.with_labels_of(range(10)))
        fit = time.process_time() - begin
        begin = time.process_time()
        fitted.predict_proba(hidden)
        each = 50_000 / (time.process_time() - begin)
        rows.append(["logistic regression, 10 labelled", case, f"{fit:.2f}", f"{each:,.0f}"])
    markdown(["method", "scores", "fit, CPU-seconds", "predicted responses per CPU-second"], rows)


def bootstrap(statistic: Callable[[np.ndarray], float], problems: int, draws: int = 1000) -> tuple[float, float]:
    """95 % interval by drawing whole problems, since responses to one are not independent."""
    rng = np.random.default_rng(0)
    low, high = np.nanquantile([statistic(rng.integers(0, problems, problems)) for _ in range(draws)], [0.025, 0.975])
    return float(low), float(high)


def rewardmath(path: str, seeds: int) -> None:
    with np.load(path, allow_pickle=False) as file:
        names = tuple(str(name) for name in file["verifiers"])
        table = ScoreTable(file["scores"], names, labels=file["correct"], families=families_by_name(names))
    hidden, truth = table.with_labels_of([]), labels(table)
    pi = float(truth.mean())
    print(f"{len(table)} problems, {truth.shape[1]} candidates, {len(names)} verifiers. 95 % intervals: problems drawn")
    print("whole. What needs labels, or halves, is judged on the other problems, over 20 random splits.\n")
    rows: list[list[str]] = []

    def judge(name: str, p: np.ndarray) -> None:
        low, high = bootstrap(lambda drawn: selection_accuracy(p[drawn], truth[drawn]), len(p))
        half = np.arange(len(p)) < len(p) // 2
        halves = [selection_accuracy(p[h], truth[h]) for h in (half, ~half)]
        found = judged(p, truth)
        cells = [f"{found[0]:.3f} ({low:.3f} to {high:.3f})", *(f"{x:.3f}" for x in (*halves, *found[1:]))]
        rows.append([name, *cells])

    makers: dict[str, Make] = {
        **UNSUPERVISED,
        "correlated mixture, one right": lambda pi: CorrelatedMixture(one_right=True),
        "auto, one right": lambda pi: Auto(one_right=True),
    }
    for shrink in (0.0, 0.005, 0.01, 0.03, 0.05, 0.1, 0.3):
        makers[f"the mixture, shrink {shrink}"] = lambda pi, s=shrink: CorrelatedMixture(one_right=True, shrink=s)  # type: ignore[misc]
    for name, make in makers.items():
        fitted = make(pi).fit(hidden)
        judge(name, fitted.predict_proba(hidden))
    for seed in range(1, seeds):
        judge(
            f"published Weaver, start {seed}",
            PublishedWeaver(class_balance=pi, seed=seed).fit(hidden).predict_proba(hidden),
        )
    ranks = [RankMean(pi).fit(hidden.select([name])).predict_proba(hidden.select([name])) for name in names]
    best = int(np.argmax([selection_accuracy(p, truth) for p in ranks]))
    judge(f"best single verifier, by oracle ({names[best]})", ranks[best])

    for name in ("correlated mixture, one right", "auto, one right"):
        halves = []
        for seed in range(20):
            order = np.random.default_rng(seed).permutation(len(table))
            first, second = order[::2], order[1::2]
            fitted = makers[name](pi).fit(hidden.take(first))
            halves.append(judged(fitted.predict_proba(hidden.take(second)), truth[second]))
        rows.append([f"{name}, fitted on the other half", *averaged(halves)])

    few: dict[str, Callable[[], Aggregator]] = {
        "logistic regression": AnchoredLogistic,
        "auto": Auto,
        "auto, one right": lambda: Auto(one_right=True),
    }
    for name, small in few.items():
        for count in (5, 10, 24, 160) if name == "logistic regression" else (5, 10):
            splits = []
            for seed in range(20):
                order = np.random.default_rng(seed).permutation(len(table))
                fitted = small().fit(table.with_labels_of(order[:count]))
                rest = table.take(order[count:])
                splits.append(judged(fitted.predict_proba(rest), labels(rest)))
            rows.append([f"{name}, {count} labelled problems", *averaged(splits)])
    judge("logistic regression on all labels, in sample", AnchoredLogistic().fit(table).predict_proba(table))
    markdown(["method", "selection", "first half", "second half", "AUC", "ECE"], rows)
    report = Auto().fit(hidden).report
    print(f"\nResidual correlation {report.residual_correlation:.3f}; auto says: {'; '.join(report.warnings)}.")
    compare_pairs(table)


def compare_pairs(table: ScoreTable, halves: int = 20, subsets: int = 100, most_asked: int = 40) -> None:
    """Fit on a random half of the problems and measure on the other, by all verifiers or by three to ten of them."""
    print("\nDifferences of selection on the other half, paired: mean (standard error), smallest, below 0.\n")
    found: dict[tuple[str, str], list[float]] = {}
    for draw in range(halves + subsets):
        rng = np.random.default_rng(1000 + draw)
        order, kind = rng.permutation(len(table)), "all verifiers" if draw < halves else "3 to 10 verifiers"
        names = rng.permutation(table.verifiers)[: rng.integers(3, 11)] if draw >= halves else table.verifiers
        part = table.select([str(name) for name in names])
        known, rest = part.take(order[::2]), part.take(order[1::2])
        hidden = known.with_labels_of([])

        def select(aggregator: Aggregator, seen: ScoreTable = hidden, rest: ScoreTable = rest) -> float:
            return selection_accuracy(aggregator.fit(seen).predict_proba(rest), labels(rest))

        naive, rank, auto = NaiveMean(), RankMean(), Auto()
        selected, mean, by_rank = select(auto), select(naive), select(rank)
        found.setdefault((kind, "auto less naive mean"), []).append(selected - mean)
        found.setdefault((kind, "auto less rank mean"), []).append(selected - by_rank)
        found.setdefault((kind, "auto, one right, less naive mean"), []).append(select(Auto(one_right=True)) - mean)
        if draw >= halves + most_asked:
            continue

        asked = [int(text.split()[1].rstrip(":")) for text in auto.report.ask]
        drawn = [rng.choice(len(known), len(asked), replace=False) for _ in range(3)]
        labelled, *randomly = (select(Auto(), known.with_labels_of(problems)) for problems in (asked, *drawn))
        found.setdefault((kind, "ten labels asked for less ten random"), []).append(labelled - float(np.mean(randomly)))
        found.setdefault((kind, "ten labels asked for less naive mean"), []).append(labelled - mean)
    rows = []
    for (kind, name), gains in found.items():
        error = np.std(gains, ddof=1) / np.sqrt(len(gains))
        below = f"{sum(gain < -1e-9 for gain in gains)} of {len(gains)}"
        rows.append([kind, name, f"{np.mean(gains):+.4f} ({error:.4f})", f"{min(gains):+.3f}", below])
    markdown(["", "", "mean", "smallest", "below 0"], rows)


PARTS: dict[str, Callable[[int], None]] = {
    "recovery": recovery,
    "scenarios": scenarios,
    "drift": drifting,
    "speed": speed,
}


def labels(table: ScoreTable) -> np.ndarray:
    assert table.labels is not None
    return table.labels


def judged(p: np.ndarray, truth: np.ndarray) -> tuple[float, float, float]:
    return selection_accuracy(p, truth), auc(p, truth), ece(p, truth)


def averaged(splits: Sequence[tuple[float, float, float]]) -> list[str]:
    mean, spread = np.mean(splits, axis=0), np.std(splits, axis=0)
    return [f"{mean[0]:.3f} (sd {spread[0]:.3f})", "", "", f"{mean[1]:.3f}", f"{mean[2]:.3f}"]


def triple(values: Sequence[tuple[float, float, float]]) -> str:
    return " / ".join(f"{x:.3f}" for x in np.mean(values, axis=0))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
