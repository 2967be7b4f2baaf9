"""Algorithms by name in the real recipe: those that need more processes than others, and one of the user's own."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForTokenClassification

from forge.config import ConfigError, load
from forge.recipes.rl_config import RLConfig
from tests.recipes.test_recipes import CONFIG, ROOT, command, rows, run_here
from tests.training.cases import TOKENIZER, tiny_model

pytestmark = [pytest.mark.processes, pytest.mark.full]

PAGE = (ROOT / "docs/own_loop.md").read_text()


def run(folder: Path, *overrides: str, path: Path | None = None) -> list[dict]:
    """Three steps; the rows that were logged."""
    environment = os.environ | (
        {} if path is None else {"PYTHONPATH": f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    )
    config = CONFIG | {"grpo": {"n_samples": 4, "max_tokens": 8}}
    done = subprocess.run(
        command(folder, *overrides, config=config),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return rows(folder)


def test_documented_custom_algorithm_example_trains(tmp_path):
    (code,) = re.findall(r"```python\n([^`]*class TOPRLoss.*?)```", PAGE, re.DOTALL)
    assert len(code.splitlines()) <= 60
    (tmp_path / "topr.py").write_text(code)
    history = run(tmp_path, "--algorithm", "topr:TOPRLoss", "--grpo.loss", "{baseline: 0.4}", path=tmp_path)
    assert all({"train/loss", "train/grad_norm", "train/clip_fraction"} <= row.keys() for row in history[1:])
    assert history[-1]["train/grad_norm"] > 0


@pytest.mark.slow
def test_resumed_ppo_run_with_critic_repeats_metrics(tmp_path):
    """In lock-step, from the checkpoint of the second of four steps: the same numbers and the same weights."""
    overrides = ["--algorithm", "ppo", "--async.max_policy_age", "0", "--training.mini_batches", "2"]
    overrides += ["--grpo.beta", "0.05", "--services.ref_model", "{}", "--critic.learning_rate", "1e-2"]
    overrides += ["--training.steps", "4", "--checkpoint.every", "2", "--eval.problems", "0"]
    history = run(tmp_path, *overrides)
    assert history[1]["critic/value"] == pytest.approx(0.0, abs=0.2)
    assert "critic/explained_variance" in history[-1]
    assert history[-1]["train/updates"] == history[-1]["critic/updates"] == 2.0
    folder = tmp_path / "runs/test"
    trained = (folder / "model/model.safetensors").read_bytes()
    # As if it had ended during its last step.
    (folder / "finished").unlink()
    for path in (folder / "model", folder / "checkpoints/step_000004"):
        shutil.rmtree(path)
    again = run(tmp_path, *overrides, "--resume", "auto")
    assert [row["step"] for row in again] == [0, 1, 2, 3, 4]
    for name in ("train/loss", "critic/loss", "critic/value_error"):
        assert [row[name] for row in again[1:]] == [row[name] for row in history[1:]]
    assert (folder / "model/model.safetensors").read_bytes() == trained


def test_distillation_teacher_with_other_tokenizer_raises(tmp_path):
    from forge.models import build_small_model

    shape = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 2, "max_positions": 128}
    common = ["--algorithm", "distill"]
    teacher = build_small_model(tmp_path / "teacher", seed=1, alphabet="abcdefghijklmnopqrstuvwxyz>", **shape)
    run_here(*command(tmp_path, *common, "--grpo.reference", teacher, "--lora", "{rank: 4, alpha: 8}"))
    assert rows(tmp_path)[-1]["train/reverse_kl"] > 0
    other = build_small_model(tmp_path / "other", seed=1, alphabet="abc>", **shape)
    with pytest.raises(SystemExit, match=r"error: grpo.reference: the tokenizer of .*other has other tokens than"):
        run_here(*command(tmp_path, *common, "--grpo.reference", other))


@pytest.mark.slow
def test_per_step_rewards_train_with_ppo_and_raise_with_grpo(tmp_path):
    """A process reward model's reward of each step reaches PPO's critic; GRPO, which would sum them up, is an error."""
    tiny_model(kind=AutoModelForTokenClassification).save_pretrained(tmp_path / "prm")
    TOKENIZER.save_pretrained(tmp_path / "prm")
    model = {"path": str(tmp_path / "prm"), "marker": "z", "separator": "b"}
    steps = {"use": "forge_verifiers:StepRewards", "model": model, "weight": 0.5}
    rewards = ["--reward.functions", json.dumps(["CharacterMatch", steps]), "--training.steps", "2"]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"dataset": {"task": "apps.toys.words:Reverse"}, "from_scratch": {}}))
    with pytest.raises(ConfigError, match="rewards steps, and grpo sees only their sum: use algorithm ppo"):
        load(RLConfig, ["--config", str(config), *rewards])
    history = run(tmp_path, "--algorithm", "ppo", *rewards)
    assert history[-1]["reward/StepRewards"] > 0
    assert history[-1]["critic/grad_norm"] > 0
