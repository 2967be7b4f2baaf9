"""An ensemble made and trained with, as a user does it: both recipes and the command line, with small models."""

import json
import sys

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from forge.cli import main as forge
from forge.models import build_small_model
from forge_weaver import Distilled, ScoreTable, load_ensemble, read_problems
from tests.recipes.test_recipes import run_here

RULES = [f"apps.weaver.rules:{name}" for name in ("right_length", "first_letter", "known_letters")]
DATASET = {"task": "apps.toys.words:Reverse", "difficulty": [2, 4], "prompt_template": "{question}>"}


@pytest.fixture(scope="module")
def folder(processes, tmp_path_factory):
    """A policy and a reward model that know nothing, and the ensemble of `apps/weaver` with them."""
    folder = tmp_path_factory.mktemp("weaver")
    policy = build_small_model(
        folder / "policy",
        seed=0,
        alphabet="abcdefghijklmnopqrstuvwxyz>",
        hidden_size=32,
        layers=2,
        heads=2,
        kv_heads=1,
        max_positions=32,
    )
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1).save_pretrained(folder / "judge")
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder / "judge")
    config = {
        "model": policy,
        "run": {"name": "ensemble", "root": str(folder)},
        "dataset": DATASET,
        "collect": {"problems": 40, "n_samples": 4, "max_tokens": 6, "truth": "ExactMatch"},
        "verifiers": {"rules": RULES, "reward_models": [{"path": str(folder / "judge")}]},
        "distil": {"model": policy, "epochs": 1, "as_pair": False},
        "services": {"verifiers": {"num_replicas": 2}},
    }
    (folder / "weaver.yaml").write_text(yaml.safe_dump(config))
    run_here(sys.executable, "-m", "apps.weaver.main", "--config", str(folder / "weaver.yaml"))
    return folder


@pytest.mark.full
def test_weaver_recipe_writes_consistent_ensemble(folder):
    made = folder / "ensemble"
    table, problems = ScoreTable.load(made / "scores.npz"), read_problems(made / "responses.jsonl")
    assert table.scores.shape == (40, 4, 4)
    assert not np.isnan(table.scores).any()
    assert table.responses == [problem.responses for problem in problems]
    verifiers, aggregator = load_ensemble(made)
    assert verifiers.names == list(aggregator.verifiers) == ["right_length", "first_letter", "known_letters", "judge"]
    assert Distilled(str(made / "distilled")).setup().names == ("distilled",)


def grpo(folder, tmp_path, steps, replicas, **sections):
    """The configuration of a run in lock-step, in a file."""
    config = {
        "model": str(folder / "policy"),
        "run": {"name": "run", "root": str(tmp_path)},
        "dataset": DATASET,
        "training": {"batch_size": 4, "steps": steps, "learning_rate": 1e-3, "seq_len": 256},
        "grpo": {"n_samples": 4, "max_tokens": 6},
        "async": {"max_policy_age": 0},
        "services": {"reward": {"num_replicas": replicas, "share": None}},
    }
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump(config | sections))
    return str(path)


@pytest.mark.full
def test_grpo_trains_with_ensemble_and_distilled_verifier(folder, tmp_path):
    made = folder / "ensemble"
    reward = {
        "functions": [{"use": "forge_weaver:Ensemble", "path": str(made)}],
        "verifiers": {"plugins": [{"use": "forge_weaver:Distilled", "path": str(made / "distilled")}]},
        "accuracy": "ExactMatch",
    }
    config = grpo(folder, tmp_path, steps=2, replicas=2, reward=reward, eval={"problems": 8})
    run_here(sys.executable, "-m", "apps.grpo.main", "--config", config)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        parts = row["reward/Ensemble"], row["reward/Panel"]
        assert all(0 < part < 1 for part in parts)
        assert (row["reward"], row["accuracy"]) == (pytest.approx(sum(parts), rel=1e-3), 0)
        assert "reward/MathReward" not in row


@pytest.mark.full
def test_weaver_commands_build_ensemble_step_by_step(folder, tmp_path, capsys):
    made = folder / "ensemble"
    scores = tmp_path / "scores.npz"
    forge(["weaver", "score", f"{made}/responses.jsonl", "--verifiers", f"{made}/verifiers.yaml", "--out", str(scores)])
    assert f"written: {scores}" in capsys.readouterr().out
    again, before = ScoreTable.load(scores), ScoreTable.load(made / "scores.npz")
    np.testing.assert_allclose(again.scores, before.scores, atol=1e-5)

    fitted = tmp_path / "fitted.npz"
    forge(["weaver", "fit", str(scores), "--method", "binned", "--out", str(fitted)])
    assert "BinnedDawidSkene" in capsys.readouterr().out
    forge(["weaver", "predict", str(scores), "--aggregator", str(fitted), "--out", str(tmp_path / "p.npz")])
    p = ScoreTable.load(tmp_path / "p.npz")
    assert p.verifiers == (*before.verifiers, "weaver")
    assert (p.scores[:, :, -1] > 0).all()

    distilled = tmp_path / "distilled"
    model = ["--model", str(folder / "policy"), "--epochs", "1", "--joined"]
    forge(["weaver", "distil", str(scores), "--aggregator", str(fitted), *model, "--out", str(distilled)])
    assert Distilled(str(distilled)).setup().names == ("distilled",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "missing.npz", "--out", "x.npz"], "missing.npz"),
        (["fit", "{scores}", "--method", "magic", "--out", "x.npz"], "unknown method 'magic'"),
        (["fit", "{scores}", "--out", "x.json"], r"a \.npz file without"),
        (["fit", "{scores}", "--out", "nowhere/x.npz"], "the directory nowhere does not exist"),
        (["fit", "{scores}", "--labelled", "41", "--out", "x.npz"], "labelled must be 0 to 40"),
        (["fit", "{scores}", "--one-right", "--out", "x.npz"], "40 problems do not have exactly one"),
        (["predict", "{scores}", "--aggregator", "{scores}", "--out", "x.npz"], "is not a saved aggregator"),
        (["fit", "{scores}", "--method", "naive_mean", "--class-balance", "0.5", "--out", "x.npz"], "does not use"),
        (["score", "{config}", "--verifiers", "{config}", "--out", "x.npz"], "line 1"),
    ],
)
def test_invalid_weaver_recipe_raises_one_line_error(folder, words, message):
    known = {"scores": folder / "ensemble/scores.npz", "config": folder / "weaver.yaml"}
    with pytest.raises(SystemExit, match=message):
        forge(["weaver", *(word.format(**known) for word in words)])
