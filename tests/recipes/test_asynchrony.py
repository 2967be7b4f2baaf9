"""Asynchronous runs keep what they promise: ages, importance ratios, and where the time went."""

from __future__ import annotations

import pytest

from tests.recipes.test_recipes import CONFIG, command, finish, rows

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


@pytest.mark.parametrize("on_update", ["continue", pytest.param("finish", marks=pytest.mark.slow), "recompute"])
def test_50_steps_without_learning_leave_the_ratio_at_1(tmp_path, on_update):
    overrides = ["--async.max_policy_age", "2", "--generator.on_update", on_update]
    code, output = finish(*command(tmp_path, *overrides, config=STILL))
    assert code == 0, output
    history = rows(tmp_path)[1:]
    assert len(history) == STEPS
    assert max(row["train/ratio_max_deviation"] for row in history) < 1e-4
    assert 1 <= max(row["policy_age/max"] for row in history) <= 2
    # Sequences that one version sampled whole are apart from those that an update fell into; a step may lack either.
    names = ("train/engine_difference", "train/engine_difference_across_updates")
    for row in history:
        differences = [row[name] for name in names if name in row]
        assert bool(differences) == (row["train/on_policy"] > 0)
        assert all(difference < 1e-4 for difference in differences)
    if on_update != "finish":  # some tokens are of the version that trains, though their sequence began before it
        assert any("train/engine_difference_across_updates" in row for row in history)
    spent = sum(row["wall/accounted"] * row["seconds/step"] for row in history)
    assert spent >= 0.99 * sum(row["seconds/step"] for row in history)


def test_the_phases_of_a_lock_step_step_add_up_to_the_wall(tmp_path):
    config = CONFIG | {"training": CONFIG["training"] | {"steps": 10, "batch_size": 16}}
    overrides = ["--async.max_policy_age", "0", "--grpo.correction", "truncate"]
    code, output = finish(*command(tmp_path, *overrides, config=config))
    assert code == 0, output
    history = rows(tmp_path)[1:]
    spent = sum(row["wall/accounted"] * row["seconds/step"] for row in history)
    assert 0.99 <= spent / sum(row["seconds/step"] for row in history) <= 1.0001
    assert {"wall/replay_buffer.sample", "wall/trainer.train_step", "wall/generator.update_weights"} <= set(history[3])
    assert "train/correction_fraction" in history[0]
    assert all(row["train/engine_difference"] < 1e-4 for row in history)
