"""Pictures of simulated runs: a file by matplotlib, or bars of text where that is not installed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from .results import SimulatedRun

WIDTH = 40  # characters of the longest bar
Line = tuple[Mapping[str, object], Sequence[SimulatedRun]]


def label(swept: Mapping[str, object]) -> str:
    """A short name of a setting, `max_policy_age 1`."""
    return ", ".join(f"{name} {value}" for name, value in swept.items()) or "the run"


def bars(lines: Sequence[Line]) -> str:
    """Step seconds as bars of text."""
    names = [label(swept) for swept, _ in lines]
    seconds = [mean(run.step_seconds for run in runs) for _, runs in lines]
    longest = max((value for value in seconds if value < float("inf")), default=1.0) or 1.0
    width = max(map(len, names))
    return "\n".join(
        f"{name.ljust(width)}  {'#' * round(WIDTH * min(value / longest, 1.0))} {value:.4g} s"
        for name, value in zip(names, seconds, strict=True)
    )


def write_plot(lines: Sequence[Line], path: Path) -> None:
    """Write a picture of a sweep, with the seconds of a step and how busy all is; of one setting, over its steps.

    Args:
        path: its suffix decides the format: .svg, .png, .pdf.

    Raises:
        ImportError: matplotlib is not installed; names the remedy.
        ValueError: a format that matplotlib does not have.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{path} needs matplotlib: pip install matplotlib, or leave --plot out") from error
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    if len(lines) > 1:
        _plot_sweep(lines, left, right)
    else:
        _plot_steps(lines[0][1][0], left, right)
    # From zero: halves and doubles look like what they are.
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(path)


def _plot_sweep(lines: Sequence[Line], left: Any, right: Any) -> None:
    names = ["\n".join(map(str, swept.values())) for swept, _ in lines]
    title = ", ".join(lines[0][0])
    left.bar(names, [mean(run.step_seconds for run in runs) for _, runs in lines], color="#4c78a8")
    left.set(xlabel=title, ylabel="seconds a step")
    for name, text in (
        ("generator_utilisation", "generators"),
        ("trainer_utilisation", "trainer"),
        ("utilisation", "all GPUs"),
        ("waste", "wasted tokens"),
    ):
        right.plot(names, [100 * mean(getattr(run, name) for run in runs) for _, runs in lines], "o-", label=text)
    right.set(xlabel=title, ylabel="%")
    right.legend(fontsize="small")


def _plot_steps(run: SimulatedRun, left: Any, right: Any) -> None:
    times = [counters.seconds for counters in run.steps]
    seconds = [later - earlier for earlier, later in itertools.pairwise(times)]
    steps = range(1, len(times))
    left.plot(steps, seconds)
    left.set(xlabel="step", ylabel="seconds")
    right.plot(steps, [average for average, _ in run.ages], label="mean")
    right.plot(steps, [most for _, most in run.ages], label="max")
    right.set(xlabel="step", ylabel="policy age")
    right.legend(fontsize="small")
