"""Asynchronous runs keep what they promise: ages, importance ratios, and where the time went."""

from pathlib import Path

import pytest

from forge.observability.rollouts import read_batches
from tests.recipes.test_recipes import CONFIG, command, rows, run_here

pytestmark = [pytest.mark.processes, pytest.mark.full]

STEPS = 50
# Long sequences and a quick trainer: versions change in the middle of most of them.
STILL = CONFIG | {
    "from_scratch": CONFIG["from_scratch"] | {"max_positions": 128},
    "training": CONFIG["training"] | {"steps": STEPS, "learning_rate": 0.0, "seq_len": 512},
    "grpo": {"n_samples": 4, "max_tokens": 80},
    "checkpoint": {"every": 0},
    "eval": {"problems": 0},
}


def difference_names(path: Path) -> dict[int, set[str]]:
    """The metrics of engine against trainer that each step must have, by the versions of its recorded tokens."""
    names: dict[int, set[str]] = {step: set() for step in range(1, STEPS + 1)}
    for _, batch in read_batches(path):
        for row in batch.select(["step", "dropped", "mask", "versions"]).to_pylist():
            versions = {version for version, sampled in zip(row["versions"], row["mask"], strict=True) if sampled}
            trains = row["step"] - 1
            if row["dropped"] is None and trains in versions:
                suffix = "" if versions == {trains} else "_across_updates"
                names[row["step"]].add("train/engine_difference" + suffix)
    return names


@pytest.mark.parametrize(
    "on_update", ["continue", *(pytest.param(name, marks=pytest.mark.slow) for name in ("finish", "recompute"))]
)
def test_async_policy_ratio_stays_1_at_learning_rate_0(tmp_path, on_update):
    overrides = ["--async.max_policy_age", "2", "--generator.on_update", on_update, "--metrics.rollouts", "all"]
    run_here(*command(tmp_path, *overrides, config=STILL))
    history = rows(tmp_path)[1:]
    assert len(history) == STEPS
    assert max(row["train/ratio_max_deviation"] for row in history) < 1e-4
    assert 1 <= max(row["policy_age/max"] for row in history) <= 2
    # Sequences that one version sampled whole are apart from those that an update fell into. Which of them a step has
    # depends on the schedule, so the recorded tokens say what to expect: on a slow machine no step may have the second.
    expected_names = difference_names(tmp_path / "runs/test/rollouts.arrow")
    for row in history:
        differences = {name: value for name, value in row.items() if name.startswith("train/engine_difference")}
        assert differences.keys() == expected_names[row["step"]]
        assert bool(differences) == (row["train/on_policy"] > 0)
        assert all(difference < 1e-4 for difference in differences.values())
    spent = sum(row["wall/accounted"] * row["seconds/step"] for row in history)
    assert spent >= 0.99 * sum(row["seconds/step"] for row in history)
