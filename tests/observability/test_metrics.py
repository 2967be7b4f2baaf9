"""Metrics merge exactly across processes, and a run's folder holds what was logged."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from forge.observability import Reduce, Run, phase, record_metric
from forge.observability.metrics import Snapshot, drain
from forge.observability.rollouts import read_batches, texts_by_group
from forge.types import Episode, Group


@pytest.fixture(autouse=True)
def empty():
    drain()


@given(st.lists(st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=8), min_size=1, max_size=5))
def test_metrics_merged_from_processes_equal_statistics_of_all_values(parts):
    drain()
    merged = Snapshot()
    for part in parts:
        for value in part:
            for how in Reduce:
                record_metric("x" if how is not Reduce.SUM else "total", value, how)
        merged.merge(drain())
    everything = np.concatenate([np.array(part) for part in parts])
    values = merged.values()
    assert values["x"] == pytest.approx(everything.mean(), abs=1e-6)
    assert values["x/std"] == pytest.approx(everything.std(), rel=1e-6, abs=1e-3)
    assert values["total"] == pytest.approx(everything.sum(), abs=1e-5)
    assert (values["x/max"], values["x/min"]) == (everything.max(), everything.min())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_metric_raises(value):
    with pytest.raises(ValueError, match="metric 'x' got"):
        record_metric("x", value)


def test_duration_of_failed_phase_is_recorded():
    with pytest.raises(KeyError), phase("work"):
        raise KeyError
    snapshot = drain()
    assert snapshot.values()["seconds/work"] >= 0
    assert [span.name for span in snapshot.spans] == ["work"]


def test_run_directory_has_metrics_rollouts_and_report(tmp_path, capsys):
    run = Run("one", {"seed": 3}, steps=2, root=str(tmp_path))
    run.record(1, 1e6, str)
    with phase("train"):
        record_metric("reward", 0.25)
    run.log(0, Snapshot(), **{"eval/accuracy": 0.1})
    run.log(1, drain(), **{"train/tokens": 10.0})
    group = Group(
        [Episode(prompt_ids=[1], response_ids=[2], reward=r, versions=[4]) for r in (1.0, 0.0)], 7, "t", "<b>"
    )
    run.log_rollouts(1, [group])
    run.log(2, Snapshot(), **{"eval/accuracy": 0.9})
    run.close()
    rows = [json.loads(line) for line in (tmp_path / "one/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1]["reward"] == 0.25
    assert rows[1]["train/tokens_per_second"] > 0
    assert rows[1]["seconds/step"] >= rows[1]["seconds/train"]
    ((_, batch),) = read_batches(tmp_path / "one/rollouts.arrow")
    (rollout,) = texts_by_group(batch)
    assert (rollout["step"], rollout["index"], rollout["version"]) == (1, 7, 4)
    assert (rollout["prompt"], rollout["rewards"]) == ("<b>", [1.0, 0.0])
    page = (tmp_path / "one/report.html").read_text()
    assert '"prompt":"\\u003cb>"' in page
    assert '"seed":3' in page
    events = json.loads((tmp_path / "one/trace.json").read_text())
    assert {"name", "ph", "pid"} <= set(events[0])
    assert "held-out accuracy 0.100 at step 0, 0.900 at step 2" in capsys.readouterr().out


def test_existing_run_directory_raises_without_overwrite(tmp_path):
    Run("one", {}, steps=1, root=str(tmp_path)).log(1, Snapshot())
    with pytest.raises(FileExistsError, match=r"set run.overwrite to true"):
        Run("one", {}, steps=1, root=str(tmp_path))
    Run("one", {}, steps=1, root=str(tmp_path), overwrite=True)
    assert (tmp_path / "one/metrics.jsonl").read_text() == ""


@pytest.mark.parametrize(("truncated", "cause"), [(0.1, "expect another format"), (0.9, "90% of the completions")])
def test_reward_0_for_20_steps_warns_once_with_likely_cause(tmp_path, capsys, truncated, cause):
    run = Run("one", {}, steps=50, root=str(tmp_path))
    printed = ""
    for step in range(1, 46):
        reward = 1.0 if step == 15 else 0.0
        run.log(step, Snapshot(), **{"reward": reward, "reward/std": 0.0, "generation/truncated": truncated})
        captured = capsys.readouterr()
        printed += captured.out + captured.err
        assert printed.count("of every sample of the last 20 steps was 0") == (step >= 35)
    run.close()
    assert cause in printed
