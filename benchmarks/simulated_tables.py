"""Published pairs of a synchronous and an asynchronous run: the second one's speed from the first one's phases alone.

The columns are source, model, setting, gpus, mode, split, step_s, gen_s, old_logprob_s and update_s. Rows without the
seconds of phases, or without an asynchronous counterpart, say nothing here.

Each pair is simulated twice: from the synchronous run alone, and with the seconds that the asynchronous run itself took
for an update (or to send weights), which the first cannot know. The second says how far the schedule is right.
published_pairs.tsv has 13.
"""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import NamedTuple

from forge.recipes.simulate import SimulationSettings, simulate
from forge.recipes.simulate.traces import decode_steps

Row = dict[str, str]
Table = list[Row]
# Lengths were not published: a long tail up to the stated limit is assumed.
LIMIT = 28_000
MEAN = 3000 / LIMIT  # of the limit
PROMPTS = 512
MINI_BATCH = 32  # prompts, of which four are trained at once unless a setting says otherwise
SAMPLES = 16


class Pair(NamedTuple):
    """Factors from the synchronous to the asynchronous step: published, simulated, and with the latter's seconds."""

    name: str
    published: float
    simulated: float
    informed: float

    def __str__(self) -> str:
        figures = [f"{factor:9.2f} {factor / self.published - 1:+6.0%}" for factor in (self.simulated, self.informed)]
        return f"{self.name:72} {self.published:9.2f} {' '.join(figures)}"


def published(path: Path) -> str:
    """A line for each pair, and how many are near."""
    with path.open() as file:
        lines = [line for line in file if not line.startswith("#")]
    table = list(csv.DictReader(lines, delimiter="\t"))
    pairs = [*fully_async(table), draw(table)]
    head = f"{'asynchronous run':72} {'published':>9} {'simulated':>9} {'error':>6} {'informed':>9} {'error':>6}"
    near = sum(abs(pair.simulated / pair.published - 1) <= 0.15 for pair in pairs)
    informed = sum(abs(pair.informed / pair.published - 1) <= 0.15 for pair in pairs)
    end = f"within 15 %: {near} of {len(pairs)}; with the seconds of the asynchronous run {informed}"
    return "\n".join([head, *map(str, pairs), end])


def fully_async(table: Table) -> list[Pair]:
    """Runs whose GPUs are divided between generation and training, each from the synchronous run on as many in all."""
    pairs = []
    for line in [row for row in table if row["mode"] == "fully async"]:
        for whole in table:
            if whole["mode"] != "colocate sync" or (whole["model"], gpus_of(whole)) != (line["model"], gpus_of(line)):
                continue
            real = float(whole["step_s"])
            simulated, informed = (asynchronous(line, whole, float(row["update_s"])) for row in (whole, line))
            name = f"{line['model']}, {line['split_train:rollout']}, {line['setting']}"
            pairs.append(Pair(name, real / float(line["step_s"]), real / simulated, real / informed))
    return pairs


def asynchronous(line: Row, whole: Row, update: float) -> float:
    """Simulated seconds for all prompts of a synchronous step.

    Args:
        line: the asynchronous run.
        whole: the synchronous one.
        update: seconds of an update. Mini-batches of 32 prompts are too few to divide: of the 11 asynchronous trainers
            here that have half of the GPUs, nine take .8 to 1.2 of the synchronous update on all.
    """
    _, generators = map(int, line["split_train:rollout"].split(":"))
    limit = limit_of([whole, line])
    # One run has one pair of seconds and rows: its longest answers decide, so that all is of the decode step.
    step = float(whole["gen_s"]) / decode_steps(shape(gpus_of(whole), 1, limit))
    # What is trained at once is a step here, and weights go out after all prompts of a synchronous step. Asynchronous
    # runs take log-probabilities from the sampler.
    interval = PROMPTS // (MINI_BATCH * round(stated("require_batches", line, 4)))
    ahead = math.ceil(stated("staleness", line, 0.5) * interval)
    settings = shape(generators, interval, limit)
    values = settings.model_copy(
        update={
            "max_policy_age": interval - 1 + ahead,
            "generators": settings.generators.model_copy(update={"step_seconds": step}),
            "trainer": settings.trainer.model_copy(
                update={"step_seconds": update / interval, "push_seconds": rest_of(whole)}
            ),
        }
    )
    return simulate(values).step_seconds * interval


def rest_of(row: Row) -> float:
    """Seconds of a synchronous step beside its phases: sending weights, above all."""
    reference = re.search(r"ref ([\d.]+) s", row["setting"])
    phases = sum(float(row[name]) for name in ("gen_s", "old_logprob_s", "update_s"))
    return max(0.0, float(row["step_s"]) - phases - (float(reference[1]) if reference else 0.0))


def stated(name: str, row: Row, default: float) -> float:
    """A number that a row's setting gives after a name."""
    match = re.search(rf"{name} ([\d.]+)", row["setting"])
    return float(match[1]) if match else default


def gpus_of(row: Row) -> int:
    """The number of GPUs of a run."""
    return int(row["gpus"].split()[0])


def limit_of(rows: list[Row]) -> int:
    """The longest response, where a row states it."""
    limits = [re.search(r"(\d+)k response", row["setting"]) for row in rows]
    return next((1000 * int(limit[1]) for limit in limits if limit), LIMIT)


def shape(gpus: int, interval: int, limit: int) -> SimulationSettings:
    """The run on so many generators, in steps of a part of the batch."""
    return SimulationSettings(
        steps=6 * interval,
        batch_size=PROMPTS // interval,
        n_samples=SAMPLES,
        sync_interval=interval,
        max_policy_age=interval,
        lengths={"mean": MEAN * limit, "spread": 1.0, "max_tokens": limit},
        generators={"replicas": gpus, "slots": 1024, "grain": 16},
    )


def draw(table: Table) -> Pair:
    """A pair in which asynchrony gained nothing: updates waited until what was running had ended."""
    rows = [row for row in table if row["source"].startswith("marin")]
    sync, ahead = (float(row["step_s"].removeprefix("core ") or row["gen_s"].removeprefix("core ")) for row in rows)
    updates = 25
    # Of twenty updates: "weight sync 48.79 s in all, generation 35.87"; training is of all 25.
    generate = 35.87 / 20
    update = 48.79 / 20
    train = sync / updates - generate - update
    sent = re.search(r"weight sync ([\d.]+) s", " ".join(map(str, rows[1].values())))
    assert sent is not None
    factors = []
    for push in (update, float(sent[1]) / updates):
        settings = SimulationSettings(
            steps=updates,
            batch_size=64,
            n_samples=4,
            max_policy_age=1,
            lengths={"mean": 350.0, "spread": 0.6, "max_tokens": 1024},
            generators={"replicas": 8, "on_update": "finish"},
            trainer={"step_seconds": train, "push_seconds": push},
        )
        generators = settings.generators.model_copy(update={"step_seconds": generate / decode_steps(settings)})
        seconds = simulate(settings.model_copy(update={"generators": generators})).step_seconds
        factors.append(sync / updates / seconds)
    return Pair("marin, one version ahead, drained before an update", sync / ahead, *factors)
