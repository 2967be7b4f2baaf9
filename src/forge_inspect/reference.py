"""References: the curves of several seeds of a recipe, and the test whether a run stays within their bands."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forge.system.files import write_atomic

from .runs import read_metric_rows, read_settings

# The metrics of a reference, with the usual causes of a departure. The first ones explain those after them.
CAUSES = {
    "train/learning_rate": "training.learning_rate, warmup_steps, schedule or steps",
    "policy_age": "stale weights: training.sync_interval, async.max_policy_age, or weights that are not published",
    "train/on_policy": "stale weights, or several updates a step",
    "train/updates": "training.mini_batches or training.epochs",
    "train/tokens": "training.batch_size, grpo.n_samples, dropped groups or rows, or the mask of trained tokens",
    "generation/special_tokens": "the chat template, the tokenizer, or a model that was not warmed up",
    "generation/completion_length": "the prompt or its template, grpo.max_tokens, stop tokens, or sampling",
    "generation/truncated": "grpo.max_tokens, stop tokens, or the prompt or its template",
    "accuracy": "the prompt or its template, the targets, sampling, or the sign or scale of the reward",
    "reward": "the reward function, its sign or scale, the targets, or the prompt or its template",
    "reward/std": "the scale of the reward, the sampling temperature, or grpo.n_samples",
    "groups_without_signal": "a coarse reward, grpo.n_samples, or the sampling temperature",
    "train/engine_difference": "engine and trainer compute different models: run `forge mismatch`",
    "train/ratio_deviation": "stale weights, the learning rate, or engine and trainer that differ",
    "train/clip_fraction": "the learning rate, the bounds of the ratio, or stale weights",
    "train/kl": "the learning rate, grpo.beta, or the reference model",
    "train/loss": "the data, the mask of trained tokens, the loss or its scale, or the learning rate",
    "train/grad_norm": "the loss or its scale, the advantages, the mask of trained tokens, or the batch size",
    "train/entropy": "the sampling temperature, the learning rate, an entropy or KL term, or the sign of the reward",
    "eval/accuracy": "all of the above, or the held-out problems",
    "eval/loss": "all of the above, or the held-out rows",
}
IGNORED = ("run.", "seed", "metrics.", "checkpoint.", "services.")  # settings that leave the curves as they are
FEWEST_SEEDS = 3
MAX_DIFFERENCES = 8  # in settings: beyond these a run is of another recipe
# The chance that a healthy run departs at any look at any metric.
FALSE_ALARM = 0.01
# Added to the spread of the seeds, as they may all have one value: 0.005 of a share or, of a logarithm, half a percent.
ROUNDING = 0.005
LOGARITHMIC = ("train/learning_rate", "train/tokens", "train/grad_norm")

Rows = Sequence[Mapping[str, float]]


class Departure(NamedTuple):
    """First departure of a metric from the band of the reference seeds.

    step: the last one of the look. low, high: of the seeds at this look. chance: of so large a deviation at any look.
    """

    metric: str
    step: int
    value: float
    low: float
    high: float
    chance: float

    def __str__(self) -> str:
        return (
            f"{self.metric} left the band at step {self.step}: {self.value:.3g}, where the recipe's seeds have "
            f"{self.low:.3g} to {self.high:.3g}"
        )


@dataclass(frozen=True)
class Reference:
    """The curves of several seeds of one recipe.

    settings: by dotted keys, without those that leave the curves as they are. provenance: versions, machine and costs.
    curves: for each metric and seed a value for each step from 1 on, None where a step has none.
    """

    name: str
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    curves: Mapping[str, Sequence[Sequence[float | None]]]

    @property
    def steps(self) -> int:
        """Return the number of steps that all seeds have."""
        return len(next(iter(self.curves.values()))[0])

    @property
    def seeds(self) -> int:
        """Return the number of seeds of the reference."""
        return len(next(iter(self.curves.values())))

    def bands(self) -> dict[str, list[list[float | None]]]:
        """Return the lowest and the highest value of the seeds at each step, by metric."""
        known = {
            metric: [[value for value in values if value is not None] for values in zip(*curves, strict=True)]
            for metric, curves in self.curves.items()
        }
        return {
            metric: [[choose(values, default=None) for values in steps] for choose in (min, max)]
            for metric, steps in known.items()
        }

    def list_differences(self, settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the settings in which a run differs: by dotted key, its value and the reference's."""
        run_settings = comparable_settings(settings)
        keys = sorted(run_settings.keys() | self.settings.keys())
        pairs = {key: (run_settings.get(key), self.settings.get(key)) for key in keys}
        return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}

    def list_departures(self, rows: Rows) -> list[Departure]:
        """Return the metrics that left the band, ordered by their first look outside the band.

        A look is the mean of a metric over the steps since the last look. It is compared with the seeds' by itself and
        as the change since the first look, as the starting models of seeds differ. The deviation has a t distribution;
        the seeds' variance at this look is moderated by that of all looks (Smyth 2004, with a prior of as many degrees
        of freedom as there are seeds, and one more). All looks share the chance `FALSE_ALARM`.
        """
        steps = int(min(rows[-1]["step"] if rows else 0, self.steps))
        ends, departures = look_ends(steps), list[Departure]()
        run = curves_of_rows(rows, self.curves, steps)
        tests = 2 * len(look_ends(self.steps)) * len(self.curves)

        for name, curves in self.curves.items():
            scale = (lambda values: np.log(values + 1e-12)) if name in LOGARITHMIC else np.asarray
            looks = average_looks(np.array([*(seed[:steps] for seed in curves), run[name]], float), ends)
            scaled = scale(looks)
            levels, changes = self.score_looks(scaled), self.score_looks(scaled[:, 1:] - scaled[:, :1])
            for look, chance in enumerate(tests * np.minimum(levels, [1.0, *changes])):
                if chance < FALSE_ALARM:
                    low, high = looks[:-1, look].min(), looks[:-1, look].max()
                    departures.append(Departure(name, ends[look], float(looks[-1, look]), low, high, chance))
                    break

        return sorted(departures, key=lambda departure: departure.step)  # of one step in the order of the causes

    def score_looks(self, looks: np.ndarray) -> list[float]:
        """Return the probability of each look of a run, the last row of [seeds and run, looks], under the seeds'
        distribution."""
        seeds, run = looks[:-1], looks[-1]
        variance = seeds.var(axis=0, ddof=1) + 1e-24
        prior = np.exp(np.log(variance[~np.isnan(variance)]).sum() / max(1, (~np.isnan(variance)).sum()))
        degrees = 2 * self.seeds
        moderated = ((self.seeds + 1) * prior + (self.seeds - 1) * variance) / degrees
        spread = np.sqrt(moderated * (1 + 1 / self.seeds) + ROUNDING**2)
        return [student_tail(score, degrees) for score in np.abs(run - seeds.mean(axis=0)) / spread]


def look_ends(steps: int) -> list[int]:
    """Return the last step of each look: few, as each look costs power, and close together at the start.

    >>> look_ends(40)
    [1, 2, 4, 7, 12, 20, 33, 40]
    """
    ends, end = [], 1
    while end < steps:
        ends.append(end)
        end = math.ceil(1.65 * end)
    return [*ends, steps]


def average_looks(curves: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """Return the means [seeds, looks] of curves [seeds, steps] between looks; NaN where a look has no value.

    >>> average_looks(np.array([[1.0, 2.0, np.nan, 4.0]]), [1, 4])
    array([[1., 3.]])
    """
    parts = np.split(curves, ends[:-1], axis=1)
    counts = np.stack([(~np.isnan(part)).sum(axis=1) for part in parts], axis=1)
    sums = np.stack([np.nansum(part, axis=1) for part in parts], axis=1)
    return np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)


def student_tail(t: float, degrees: int) -> float:
    """Return the two-sided tail probability at t of Student's t distribution with an even number of degrees of freedom.

    Abramowitz and Stegun, 26.7.4. NaN is certain.

    >>> round(student_tail(2.228, 10), 4)
    0.05
    """
    if math.isnan(t):
        return 1.0
    cosine = degrees / (degrees + t * t)  # squared
    term = total = 1.0
    for index in range(1, degrees // 2):
        term *= (2 * index - 1) / (2 * index) * cosine
        total += term
    return max(0.0, 1.0 - math.sqrt(1 - cosine) * total)


def comparable_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that its curves depend on; of a path the last two parts."""
    kept = {key: value for key, value in settings.items() if not key.startswith(IGNORED)}
    return kept | {"model": "/".join(Path(str(kept.get("model"))).parts[-2:])}


def curves_of_rows(rows: Rows, metrics: Any, steps: int) -> dict[str, list[float]]:
    """Return for each metric its value at the steps from 1 on, NaN where a row has none."""
    by_step = {int(row["step"]): row for row in rows}
    return {name: [by_step.get(step, {}).get(name, math.nan) for step in range(1, steps + 1)] for name in metrics}


def make_reference(folders: Sequence[Path], name: str) -> Reference:
    """Return the reference that finished runs of one recipe with several seeds make.

    Raises:
        ValueError: too few runs, or runs that differ in more than their seed.
    """
    if len(folders) < FEWEST_SEEDS:
        raise ValueError(f"a reference needs at least {FEWEST_SEEDS} runs, got {len(folders)}")
    settings = [comparable_settings(read_settings(folder)) for folder in folders]
    for folder, other in zip(folders, settings, strict=True):
        if differing := [key for key in {*other, *settings[0]} if other.get(key) != settings[0].get(key)]:
            raise ValueError(
                f"{folder} differs from {folders[0]} in more than its seed: {', '.join(sorted(differing))}"
            )

    runs = [read_metric_rows(folder) for folder in folders]
    steps = int(min(rows[-1]["step"] if rows else 0 for rows in runs))
    if steps < 1:
        raise ValueError("each run of a reference must have at least one step, and one of these has none")
    metrics = [metric for metric in CAUSES if all(any(metric in row for row in rows) for rows in runs)]
    curves = [curves_of_rows(rows, metrics, steps) for rows in runs]
    by_metric = {
        metric: [[None if math.isnan(value) else float(f"{value:.4g}") for value in seed[metric]] for seed in curves]
        for metric in metrics
    }
    costs = {cost: [round(rows[-1].get(cost, math.nan), 1) for rows in runs] for cost in ("seconds", "cpu_seconds")}
    versions = {package: version(package) for package in ("torchforge-rl", "torch", "transformers")}
    return Reference(name, settings[0], {**versions, **costs}, by_metric)


def write_reference(reference: Reference, path: Path) -> None:
    """Write a reference (the curves of several seeds) to a file."""
    write_atomic(path, json.dumps(asdict(reference), separators=(",", ":")) + "\n")


def read_reference(path: Path) -> Reference:
    """Read a reference from a file. ValueError: the file is not a reference."""
    try:
        reference = Reference(**json.loads(path.read_text()))
        shapes = {np.array(curves, float).shape for curves in reference.curves.values()}
        if len(shapes) != 1 or len(shapes.pop()) != 2 or reference.seeds < FEWEST_SEEDS:
            raise ValueError(f"every metric needs the curves of the same {FEWEST_SEEDS} or more seeds, of one length")
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a reference, which `forge compare --save` writes: {error}") from error
    return reference


@cache
def shipped_references() -> list[Reference]:
    """Return the references of the recipes in apps/."""
    return [read_reference(path) for path in sorted(Path(__file__).with_name("references").glob("*.json"))]


def find_reference(settings: Mapping[str, Any], most: int = MAX_DIFFERENCES) -> Reference | None:
    """Return the shipped reference from which a run's settings differ least, None if in more than `most`."""
    counted = [(len(reference.list_differences(settings)), reference) for reference in shipped_references()]
    differences, nearest = min(counted, key=lambda pair: pair[0], default=(most + 1, None))
    return nearest if differences <= most else None


def log_reference(folder: Path) -> None:
    """Log whether a run of a shipped recipe is within the bands of its reference."""
    from forge.observability.console import log

    if (reference := find_reference(read_settings(folder), 0)) is None:
        return
    departures = reference.list_departures(read_metric_rows(folder))
    state = f"{departures[0]}: {CAUSES[departures[0].metric]}" if departures else "within the bands"
    log.info("compared with %d seeds of %s: %s (`forge compare %s`)", reference.seeds, reference.name, state, folder)
