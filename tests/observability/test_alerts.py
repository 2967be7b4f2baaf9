"""Alerts: one for each thing that goes wrong, none for a run that goes well."""

import pytest

from forge_inspect.alerts import WINDOW, list_alerts

FLAT = {"reward/std": 0.0, "accuracy": 0.0}
SETTINGS = {"async.max_policy_age": 1, "training.batch_size": 8}


def a_run(steps: int = 3 * WINDOW, **last: float) -> list[dict[str, float]]:
    """Rows of a run that learns; the last third has these values instead."""
    rows = []
    for step in range(steps + 1):
        share = step / steps
        row = {"step": float(step), "reward": share, "reward/std": 0.3, "groups_without_signal": 0.4, "accuracy": share}
        row |= {"train/entropy": 2.0 - share, "generation/truncated": 0.01, "train/engine_difference": 1e-3}
        row |= {"train/clip_fraction": 0.02, "policy_age": 0.9, "dropped/too_old": 0.0, "eval/accuracy": share}
        rows.append(row | (last if share > 0.66 else {}))
    return rows


def test_healthy_run_has_no_alerts():
    assert list_alerts(a_run(), SETTINGS) == []


@pytest.mark.parametrize(
    ("last", "found", "advice"),
    [
        (FLAT | {"reward": 0.0}, "every sample of the last 20 steps had the reward 0", "another format"),
        (FLAT | {"reward": 0.0, "generation/truncated": 0.9}, "every sample", "cut at max_tokens"),
        (FLAT | {"reward": 1.0, "accuracy": 1.0}, "every sample of the last 20 steps had the reward 1", "are solved"),
        (FLAT | {"reward": 0.5}, "every sample of the last 20 steps had the reward 0.5", "too coarse"),
        ({"groups_without_signal": 0.9, "accuracy": 0.15}, "90% of the groups had equal rewards", "easier prompts"),
        ({"groups_without_signal": 0.9, "accuracy": 0.95}, "90% of the groups", "prompts are solved"),
        ({"accuracy": 0.02}, "the reward rose from 0.17 to 0.84, and accuracy fell from 0.17 to 0.02", "doctor reward"),
        ({"eval/accuracy": 0.2}, "held-out accuracy fell from 0.650 at step 39 to 0.200", "checkpoint from there"),
        (
            {"train/entropy": 0.02, "reward": 0.3, "accuracy": 0.3},
            "entropy fell to 0.02 nats, 1% of",
            "clip_high",
        ),
        ({"train/engine_difference": 0.2}, "log-probabilities of engine and trainer differ by 0.2 nats", "same dtype"),
        ({"train/clip_fraction": 0.5}, "50% of the tokens were clipped", "Lower the learning rate"),
        ({"generation/truncated": 0.5}, "50% of the completions were cut", "Raise it"),
        ({"generation/special_tokens": 0.22}, "22% of the sampled tokens are special ones such as <pad>", "forge.sft"),
        (
            {"generation/special_tokens": 0.22, "generation/truncated": 0.97},
            "22% of the sampled tokens are special ones",
            "max_tokens makes more of them",
        ),
        ({"dropped/too_old": 2.0}, "40 groups of the last 20 steps were older than async.max_policy_age = 1", "Raise"),
        ({"dropped/unscored": 1.0}, "21 groups or responses were left out", "reasons"),
        ({"restarts/generator": 1.0}, "components were lost and replaced: generator 21 times", "log"),
    ],
)
def test_each_abnormal_metric_raises_one_alert(last: dict[str, float], found: str, advice: str):
    only = list_alerts(a_run(**last), SETTINGS)
    assert len(only) == 1, only
    assert only[0].finding.startswith(found)
    assert advice in only[0].advice


@pytest.mark.parametrize(
    ("steps", "last", "found"),
    [
        (1, {"generation/truncated": 0.9}, ["90% of the completions were cut at max_tokens"]),
        (2, {"train/engine_difference": 0.4}, ["log-probabilities of engine and trainer differ by 0.4 nats"]),
        (5, FLAT | {"reward": 0.0}, ["every sample of the last 5 steps had the reward 0"]),
        (2, FLAT | {"reward": 0.0}, []),
        (5, {"dropped/unscored": 1.0}, ["5 groups or responses were left out"]),
        (0, {"machine/disk_free_gb": 0.5, "restarts/generator": 1.0}, ["0.5 GB on the disk", "components were lost"]),
    ],
)
def test_alerts_needing_few_steps_are_raised_in_short_runs(steps: int, last: dict[str, float], found: list[str]):
    alerts = list_alerts([row | last for row in a_run()[: steps + 1]], SETTINGS)
    assert [alert.finding[: len(text)] for alert, text in zip(alerts, found, strict=True)] == found
