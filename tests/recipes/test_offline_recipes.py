"""DPO, reward models and distillation end to end: real processes, small models, a few steps."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from forge.data.load import load_data
from forge.models import build_small_model
from forge.recipes.dpo import DPOConfig
from forge.recipes.launch import launch
from forge.recipes.reward_model import RewardModelConfig
from forge.recipes.rl_config import RLConfig
from tests.recipes.test_recipes import CONFIG, command, rows, run_here, small_model

CONFIGS: dict[str, Any] = {"dpo": DPOConfig, "reward_model": RewardModelConfig, "distill": RLConfig}


def config(recipe: str, folder: Path, **sections: Any) -> dict:
    common = {name: CONFIG[name] for name in ("from_scratch", "dataset", "training", "checkpoint", "eval")}
    common["eval"] = {"problems": 8, "every": 2}
    if recipe == "distill":
        common |= {name: CONFIG[name] for name in ("reward", "generator")}
        common |= {"algorithm": "distill", "async": {"max_policy_age": 0}}
        common["grpo"] = {"reference": str(folder / "teacher"), "n_samples": 2, "max_tokens": 8}
    return common | sections


def ran(recipe: str, folder: Path, *overrides: str, **sections: Any) -> Path:
    """A run that ended well: its folder."""
    run_here(*command(folder, *overrides, recipe=recipe, config=config(recipe, folder, **sections)))
    return folder / "runs/test"


def teacher(folder: Path) -> None:
    """One that knows what it wants, unlike a model fresh from its seed."""
    model = AutoModelForCausalLM.from_pretrained(small_model(folder / "teacher"))
    model.model.norm.weight.data *= 5.0
    model.save_pretrained(folder / "teacher")
    (folder / "teacher" / "checksums.txt").unlink()


def held_out_pairs(folder: Path) -> list:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return load_data(tokenizer, kind="preferences", seed=0, **CONFIG["dataset"]).held_out(8)


def sum_of_logprobs(model: Any, episode: Any) -> torch.Tensor:
    tokens = torch.tensor([episode.tokens])
    with torch.no_grad():
        logprobs = model(tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    return logprobs[torch.tensor(episode.mask[1:])].double().sum()


@pytest.mark.processes
def test_dpo_run_margins_match_saved_model(tmp_path):
    folder = ran("dpo", tmp_path, "--trainer.procs", "2", "--dpo.beta", "0.5")
    history = rows(tmp_path)
    assert [row["step"] for row in history] == [0, 1, 2, 3]
    assert [row["step"] for row in history if "eval/accuracy" in row] == [0, 2, 3]
    for row, at in ((history[0], "eval"), (history[1], "train")):  # the policy is its own reference
        assert row[f"{at}/margin"] == pytest.approx(0.0, abs=1e-5)
        assert row[f"{at}/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert {path.name for path in (folder / "checkpoints").glob("step_*")} == {"step_000002", "step_000003"}
    assert (folder / "report.html").exists()

    policy = AutoModelForCausalLM.from_pretrained(folder / "model")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/test-initial")
    ratios = [
        [sum_of_logprobs(policy, answer) - sum_of_logprobs(reference, answer) for answer in pair]
        for pair in held_out_pairs(folder / "model")
    ]
    margins = [0.5 * float(chosen - rejected) for chosen, rejected in ratios]
    assert any(margins)
    assert history[-1]["eval/margin"] == pytest.approx(sum(margins) / 8, abs=1e-5)
    assert history[-1]["eval/accuracy"] == sum(margin > 0 for margin in margins) / 8


@pytest.mark.full
@pytest.mark.processes
def test_exported_reward_model_reproduces_eval_metrics(tmp_path):
    folder = ran("reward_model", tmp_path, "--lora", "{rank: 4, alpha: 8}", "--reward_model.center", "0.1")
    history = rows(tmp_path)
    assert [row["step"] for row in history if "eval/accuracy" in row] == [0, 2, 3]
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    assert model.config.architectures == ["Qwen3ForSequenceClassification"]
    assert model.config.num_labels == 1
    margins, penalty = [], 0.0
    for pair in held_out_pairs(folder / "model"):
        with torch.no_grad():
            chosen, rejected = (float(model(torch.tensor([answer.tokens])).logits) for answer in pair)
        margins.append(chosen - rejected)
        penalty += 0.1 * (chosen + rejected) ** 2
    loss = (sum(math.log1p(math.exp(-margin)) for margin in margins) + penalty) / 8
    assert history[-1]["eval/margin"] == pytest.approx(sum(margins) / 8, abs=1e-4)
    assert history[-1]["eval/accuracy"] == sum(margin > 0 for margin in margins) / 8
    assert history[-1]["eval/loss"] == pytest.approx(loss, abs=1e-4)
    assert history[-1]["eval/loss"] != pytest.approx(history[0]["eval/loss"], abs=1e-4)


@pytest.fixture(scope="module")
def distilled(processes, tmp_path_factory):
    """The folder of a run of distillation, in the folder of its teacher."""
    folder = tmp_path_factory.mktemp("distilled")
    teacher(folder)
    return ran("distill", folder)


@pytest.mark.full
def test_distillation_run_trains_and_exports_model(distilled):
    history = rows(distilled.parents[1])
    assert [row["step"] for row in history if "eval/accuracy" in row] == [0, 2, 3]
    for row in history[1:]:
        assert row["train/on_policy"] == 1.0
        assert row["train/ratio_max_deviation"] < 1e-4
    assert history[1]["train/reverse_kl"] > 0.1
    model = AutoModelForCausalLM.from_pretrained(distilled / "model")
    start = AutoModelForCausalLM.from_pretrained(distilled.parent / "test-initial")
    assert not torch.equal(model.lm_head.weight, start.lm_head.weight)


BAD = [
    ("dpo", ["--dpo.beta", "0"], "dpo.beta must be above 0"),
    ("dpo", ["--dpo.label_smoothing", "0.5"], "dpo.label_smoothing must be below 0.5, got 0.5"),
    ("dpo", ["--dataset.max_tokens", "129"], "must not exceed half of training.seq_len, 128"),
    ("dpo", ["--training.seq_len", "8"], "pairs are longer than max_tokens=4"),
    ("dpo", ["--training.seq_len", "1"], "max_tokens must be at least 1, got 0"),
    ("dpo", ["--dataset.chosen_field", "good"], "dataset.task generates both answers"),
    ("dpo", ["--dataset.target_field", "answer"], "unknown key 'dataset.target_field'"),
    (
        "dpo",
        [
            "--ref_model.procs",
            "3",
            "--parallelism",
            "{data_parallel_replicate_degree: 1, data_parallel_shard_degree: 1}",
        ],
        "does not make services.ref_model.procs = 3",
    ),
    ("dpo", ["--reward.functions", "[ExactMatch]"], "unknown key 'reward'"),
    ("reward_model", ["--reward_model.center", "-1"], "reward_model.center must be at least 0"),
    ("reward_model", ["--training.seq_len", "8"], "pairs are longer than max_tokens=4"),
    ("reward_model", ["--dataset.as_scores", "false"], "unknown key 'dataset.as_scores'"),
    ("distill", ["--grpo", "{n_samples: 2, max_tokens: 8}"], "algorithm distill needs grpo.reference"),
    (
        "distill",
        ["--grpo.reference", "{folder}/other"],
        "grpo.reference: the tokenizer of .*other has other tokens than",
    ),
    ("distill", ["--grpo.reference", "{folder}/nowhere"], "nowhere does not exist"),
    ("distill", ["--dataset.max_prompt_tokens", "249"], "together exceed training.seq_len: at most 248"),
]


@pytest.mark.parametrize(("recipe", "overrides", "message"), BAD, ids=lambda value: str(value)[:40])
def test_invalid_offline_recipe_starts_no_process(tmp_path, recipe, overrides, message):
    def never(*_):
        raise AssertionError("started")

    small_model(tmp_path / "teacher")
    size = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 2, "max_positions": 64}
    build_small_model(tmp_path / "other", seed=0, alphabet="ab>", **size)
    run = {"name": "test", "root": str(tmp_path / "runs")}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config(recipe, tmp_path, run=run)))
    words = [word.replace("{folder}", str(tmp_path)) for word in overrides]
    with pytest.raises(SystemExit, match=f"^error: .*{message}") as caught:
        launch(never, CONFIGS[recipe], ["--config", str(path), *words])
    assert "\n" not in str(caught.value)
