"""Sweeps: several runs of one configuration with other settings and seeds, and one table of their results."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from forge.observability.lines import read_rows
from forge.system.files import escape_controls


def list_variants(sweeps: Sequence[str], seeds: int | None) -> list[tuple[str, list[str]]]:
    """Return the name and the overrides of each run: every combination of the swept values, with every seed.

    Args:
        sweeps: `section.key=value,value`.
        seeds: number of seeds, from 0; None uses the configuration's seed.

    Raises:
        ValueError: one of them is not of this form.
    """
    axes: list[list[tuple[str, str]]] = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        if not equals or not key or not all(values.split(",")):
            raise ValueError(f"--sweep {sweep}: write section.key=value,value")
        axes.append([(key, value) for value in values.split(",")])

    # The seed is the last axis, so that runs of the same values stand together.
    if seeds is not None:
        axes.append([("seed", str(seed)) for seed in range(seeds)])
    runs = []
    for combination in itertools.product(*axes):
        # The name also names a folder.
        parts = [re.sub(r"[^A-Za-z0-9._+-]", "_", key.rpartition(".")[2] + value) for key, value in combination]
        overrides = [word for key, value in combination for word in (f"--{key}", value)]
        runs.append(("-".join(parts), overrides))

    return runs


def format_table(folders: Sequence[Path], metric: str = "eval/accuracy") -> str:
    """Format one row for each run as Markdown: its state, steps, and the first, last and best value of a metric. Runs
    that differ only in their seeds have a row of their mean."""
    rows: list[list[str]] = []
    groups: dict[str, list[float]] = {}
    for folder in folders:
        steps = read_rows(folder / "metrics.jsonl")
        values = [row[metric] for row in steps if metric in row]
        last_step = max((row.get("step", 0) for row in steps), default=0)
        state = "finished" if (folder / "finished").exists() else "unfinished"
        numbers = [f"{value:.3f}" for value in (values[0], values[-1], max(values))] if values else ["", "", ""]
        rows.append([escape_controls(folder.name).replace("|", "\\|"), state, f"{last_step:g}", *numbers])
        if values:
            # Without the seed, runs of the same settings have the same name.
            groups.setdefault(re.sub(r"-?seed\d+", "", rows[-1][0]), []).append(values[-1])

    for name, last in groups.items():
        if len(last) > 1:
            spread = f"{statistics.mean(last):.3f} ± {statistics.stdev(last):.3f}"
            rows.append([f"{name}: {len(last)} seeds", "", "", "", spread, ""])

    head = ["run", "state", "step", f"{metric} first", "last", "best"]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
