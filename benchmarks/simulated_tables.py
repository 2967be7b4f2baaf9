"""Published pairs of a synchronous and an asynchronous run: the second one's speed from the first one's phases alone.

The columns are source, model, setting, gpus, mode, split, step_s, gen_s, old_logprob_s and update_s. Rows without the
seconds of phases, or without an asynchronous counterpart, say nothing here.
"""

from __future__ import annotations

import csv
from pathlib import Path

from forge.recipes.simulate import SimulationSettings, simulate
from forge.recipes.simulate.traces import decode_steps, fit

Table = list[dict[str, str]]
# Lengths were not published: a long tail up to the stated limit is assumed.
LENGTHS = {"mean": 3000.0, "spread": 1.0, "max_tokens": 28_000}
PROMPTS = 512
SAMPLES = 16


def published(path: Path) -> str:
    """A line for each pair: the factor from the synchronous to the asynchronous step, published and simulated."""
    with path.open() as file:
        lines = [line for line in file if not line.startswith("#")]
    table = list(csv.DictReader(lines, delimiter="\t"))
    pairs = [*fully_async(table), draw(table)]
    text = [f"{'asynchronous run':58} {'published':>9} {'simulated':>9} {'error':>6}"]
    text += [f"{name:58} {real:9.2f} {factor:9.2f} {factor / real - 1:+6.0%}" for name, real, factor in pairs]
    near = sum(abs(factor / real - 1) <= 0.15 for _, real, factor in pairs)
    return "\n".join([*text, f"within 15 %: {near} of {len(pairs)}"])


def fully_async(table: Table) -> list[tuple[str, float, float]]:
    """Three runs of Qwen2.5-Math-7B on 64 + 64 GPUs, from the synchronous ones on 32, 64 and 128."""
    rows = [row for row in table if row["model"] == "Qwen2.5-Math-7B" and row["gpus"].endswith("H20")]
    synchronous = {int(row["gpus"].split()[0]): row for row in rows if row["old_logprob_s"] not in ("", "0")}
    whole = synchronous[128]
    half = synchronous[64]
    shapes = {gpus: shape(gpus, 1) for gpus in (32, 64, 128)}
    tokens = simulate(shapes[64].model_copy(update={"steps": 4, "max_policy_age": 0})).generated_tokens / 4
    # Generation on three numbers of GPUs says how much of a decode step depends on its rows.
    features = [(decode_steps(settings), tokens / gpus) for gpus, settings in shapes.items()]
    step, row = fit(features, [float(synchronous[gpus]["gen_s"]) for gpus in shapes])
    # The three do not lie on one line; the asynchronous runs generate on 64.
    steps_of_half, tokens_of_half = features[list(shapes).index(64)]
    scale = float(half["gen_s"]) / (step * steps_of_half + row * tokens_of_half)
    phases = sum(float(half[name]) for name in ("gen_s", "old_logprob_s", "update_s"))
    pairs = []
    for line in rows:
        if line["mode"] != "fully async":
            continue
        # Mini-batches of a weight update are steps here. These runs take log-probabilities from the sampler.
        interval = 2 if "require_batches 2" in line["setting"] else 4
        ahead = 0 if "staleness 0" in line["setting"] else 1
        settings = shape(64, interval)
        values = settings.model_copy(
            update={
                "max_policy_age": interval - 1 + ahead,
                "generators": settings.generators.model_copy(
                    update={"step_seconds": step * scale, "row_seconds": row * scale}
                ),
                "trainer": settings.trainer.model_copy(
                    update={
                        "step_seconds": float(half["update_s"]) / interval,
                        "push_seconds": float(half["step_s"]) - phases,
                    }
                ),
            }
        )
        seconds = simulate(values).step_seconds * interval
        real = float(whole["step_s"])
        pairs.append((f"{line['model']}, {line['setting']}", real / float(line["step_s"]), real / seconds))
    return pairs


def shape(gpus: int, interval: int) -> SimulationSettings:
    """The run on so many generators, in steps of a part of the batch."""
    return SimulationSettings(
        steps=6 * interval,
        batch_size=PROMPTS // interval,
        n_samples=SAMPLES,
        sync_interval=interval,
        max_policy_age=interval,
        lengths=LENGTHS,
        generators={"replicas": gpus, "slots": 1024, "grain": 16},
    )


def draw(table: Table) -> tuple[str, float, float]:
    """A pair in which asynchrony gained nothing: updates waited until what was running had ended."""
    rows = [row for row in table if row["source"].startswith("marin")]
    sync, ahead = (float(row["step_s"].removeprefix("core ") or row["gen_s"].removeprefix("core ")) for row in rows)
    updates = 25
    # Of twenty updates: "weight sync 48.79 s in all, generation 35.87"; training is of all 25.
    generate = 35.87 / 20
    update = 48.79 / 20
    train = sync / updates - generate - update
    settings = SimulationSettings(
        steps=updates,
        batch_size=64,
        n_samples=4,
        max_policy_age=1,
        lengths={"mean": 350.0, "spread": 0.6, "max_tokens": 1024},
        generators={"replicas": 8, "on_update": "finish"},
        trainer={"step_seconds": train, "push_seconds": update},
    )
    generators = settings.generators.model_copy(update={"step_seconds": generate / decode_steps(settings)})
    seconds = simulate(settings.model_copy(update={"generators": generators})).step_seconds
    return "marin, one version ahead, drained before an update", sync / ahead, sync / updates / seconds
