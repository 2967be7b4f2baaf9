"""Durations from the folders of real runs: what their steps took, in metrics.jsonl, and how long their completions
were, in rollouts.arrow.

A decode step takes a + b * rows seconds, and a training step c + d * tokens. One run has only one pair of either, so
that two terms take runs of different `generator.slots` or batches; of one run decoding is all a, and training all d.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from ...observability.folder import CONFIG
from ...observability.lines import Row
from ...observability.rollouts import batches
from ...observability.run import ROLLOUTS
from ...observability.runs import rows, settings
from .run import simulate
from .settings import SimulationSettings

WARM_UP = 3  # steps that are left out: files are opened, and kernels prepared
MIN_LENGTHS = 32  # recorded completions from which their distribution is taken
# Phases of a step that have a separate setting, and those that have none: waiting and evaluating.
SEPARATE = ("replay_buffer.sample", "trainer.train_step", "trainer.push_weights", "generator.update_weights")
LEFT_OUT = ("replay_buffer.advance", "evaluate", "checkpoint", "accounted")
# Phases after new weights are served.
AFTER = ("log", "replay_buffer.handled", "dataset_actor.forget", "drain_metrics")


class Measured(NamedTuple):
    """Medians over the steps of a run.

    Attributes:
        shape: its settings, with the lengths of its completions.
        generate, steps, tokens: seconds of decoding, decode steps and completion tokens of a training step; seconds are
            None where engines work while the trainer does, whose spans are not of a step.
        train, pack: seconds.
    """

    shape: SimulationSettings
    generate: float | None
    steps: float
    tokens: float
    train: float
    pack: float
    push: float
    load: float
    log: float
    rewards: float

    @property
    def samples(self) -> int:
        """Episodes of a training step."""
        return self.shape.batch_size * self.shape.n_samples


def settings_of_runs(folders: Sequence[Path]) -> SimulationSettings:
    """The settings of the first run, with durations measured in all of them.

    Raises:
        ValueError: a folder is not a finished step of a run with rollouts.
        OSError: a file cannot be read.
    """
    runs = [measure(folder) for folder in folders]
    first = runs[0].shape
    lock_step = [run for run in runs if run.generate is not None]
    if not lock_step:
        raise ValueError(
            f"none of {', '.join(map(str, folders))} is in lock-step: give a run with async.max_policy_age 0, where "
            "generation is timed by itself"
        )
    # Each duration is a fixed part and a part that grows with the work: several runs tell the two apart.
    seconds = [run.generate for run in lock_step if run.generate is not None]
    decode = fit([(run.steps, run.tokens) for run in lock_step], seconds)
    train_tokens = [run.tokens + run.samples * run.shape.lengths.prompt for run in runs]
    train = fit([(tokens, 1.0) for tokens in train_tokens], [run.train for run in runs])
    pack = fit([(float(run.samples), 1.0) for run in runs], [run.pack for run in runs])
    generators = {
        "step_seconds": decode[0],
        "row_seconds": decode[1],
        "load_seconds": mean(run.load for run in runs),
    }
    trainer = {
        "step_seconds": train[1],
        "token_gpu_seconds": train[0] * first.trainer.gpus,
        "push_seconds": mean(run.push for run in runs),
        "pack_seconds": pack[1],
        "pack_sample_seconds": pack[0],
        "log_seconds": mean(run.log for run in runs),
    }
    return first.model_copy(
        update={
            "generators": first.generators.model_copy(update=generators),
            "trainer": first.trainer.model_copy(update=trainer),
            "rewards": first.rewards.model_copy(update={"seconds": max(0.0, mean(run.rewards for run in lock_step))}),
        }
    )


def measure(folder: Path) -> Measured:
    """What the steps of a run took.

    Raises:
        ValueError: it has too few steps, or none of reinforcement learning.
        OSError: a file cannot be read.
    """
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is not a run: it has no {CONFIG}")
    steps = [row for row in rows(folder) if row["step"] > WARM_UP]
    if len(steps) < WARM_UP or "wall/replay_buffer.sample" not in steps[0]:
        raise ValueError(f"{folder} has no {WARM_UP} steps of forge train after the first {WARM_UP}: let it run longer")
    shape = shape_of(folder, steps)
    # Lock-step: what is decoded between two steps is the batch of the second one.
    alone = shape.max_policy_age == 0
    generate = _median(steps, "seconds/generate") / shape.generators.replicas if alone else None
    # The trainer waits for the slower of generation and rewards: what generation does not explain is the rewards'.
    waiting = _median(steps, "wall/replay_buffer.sample")
    names = {name for row in steps for name in row if name.startswith("wall/")}
    before = names - {f"wall/{name}" for name in (*SEPARATE, *LEFT_OUT, *AFTER)}
    return Measured(
        shape,
        generate,
        decode_steps(shape),
        _median(steps, "generation/tokens"),
        _median(steps, "wall/trainer.train_step"),
        sum(_median(steps, name) for name in before),
        _median(steps, "wall/trainer.push_weights"),
        _median(steps, "wall/generator.update_weights"),
        sum(_median(steps, f"wall/{name}") for name in AFTER),
        waiting - generate if generate is not None else 0.0,
    )


def shape_of(folder: Path, steps: Sequence[Row]) -> SimulationSettings:
    """The settings of a run that a simulation has too, and the lengths of its completions; no durations."""
    config = settings(folder)
    contexts: list[int] = []
    values: list[int] = []
    for _, batch in batches(folder / ROLLOUTS, ("mask",)):
        for mask in batch.column("mask").to_pylist():
            values.append(sum(mask))
            contexts.append(len(mask) - values[-1])
    # Of many rollouts the lengths themselves, of few their mean: a tail cannot be seen in a handful.
    limit = config["grpo.max_tokens"]
    mean_length = _median(steps, "generation/completion_length")
    has_lengths = len(values) >= MIN_LENGTHS
    lengths = {"values": [value for value in values if value]} if has_lengths else {"mean": mean_length, "spread": 0.0}
    generator_gpus = config["services.generator.procs"] if config["services.generator.with_gpus"] else 1
    return SimulationSettings(
        steps=config["training.steps"],
        batch_size=config["training.batch_size"],
        n_samples=config["grpo.n_samples"],
        max_policy_age=config["async.max_policy_age"],
        sync_interval=config["training.sync_interval"],
        order=config["async.order"],
        seed=config["seed"],
        lengths={"prompt": round(mean(contexts)) if contexts else 0, "max_tokens": limit, **lengths},
        generators={
            "replicas": config["services.generator.num_replicas"],
            "gpus": generator_gpus,
            "slots": config["generator.slots"],
            "on_update": config["generator.on_update"],
        },
        trainer={"gpus": config["services.trainer.procs"]},
        checkpoint={"every": config["checkpoint.every"]},
    )


def decode_steps(shape: SimulationSettings) -> float:
    """Decode steps of a training step in lock-step: virtual seconds of an engine whose decode step takes one."""
    # Rows end at different steps: the simulation itself says how many steps a batch takes with these slots.
    generators = shape.generators.model_copy(update={"step_seconds": 1.0, "row_seconds": 0.0, "load_seconds": 0.0})
    updates = {"generators": generators, "steps": 12, "max_policy_age": 0, "sync_interval": 1}
    return simulate(shape.model_copy(update=updates)).step_seconds


def fit(features: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """Two factors, neither negative, whose weighted sum comes nearest to `seconds` in relative terms.

    Where the features do not tell the two apart, as of a single run, all is the first one's.
    """
    # Rows are divided by the seconds that they should give, so that a large run counts no more than a small one.
    pairs = [(x / total, y / total) for (x, y), total in zip(features, seconds, strict=True) if total > 0]
    if not pairs:
        return 0.0, 0.0
    xx = sum(x * x for x, _ in pairs)
    yy = sum(y * y for _, y in pairs)
    xy = sum(x * y for x, y in pairs)
    sum_x = sum(x for x, _ in pairs)
    sum_y = sum(y for _, y in pairs)
    determinant = xx * yy - xy * xy
    # A negative factor means that one feature explains nothing: the other one is fitted alone.
    if determinant > 1e-6 * xx * yy:
        first = (sum_x * yy - sum_y * xy) / determinant
        second = (sum_y * xx - sum_x * xy) / determinant
        if first >= 0 and second >= 0:
            return first, second
        if first < 0:
            return 0.0, sum_y / yy
    return sum_x / xx, 0.0


def _median(steps: Sequence[Row], name: str) -> float:
    values = [row[name] for row in steps if name in row]
    return median(values) if values else 0.0
