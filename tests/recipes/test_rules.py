"""Every rule of `forge.recipes.rules`, by a configuration that breaks it and the line that says so."""

from typing import Any

import pytest

from forge.config import ConfigError, build
from forge.recipes.dpo import DPOConfig
from forge.recipes.rl_config import RLConfig
from forge.recipes.schema import TrainingRecipe
from forge.recipes.sft import SFTConfig

ROWS = {"path": "rows.jsonl"}
TASK = {"task": "apps.toys.words:Reverse", "prompt_template": "{question}>"}
STEPS = {"use": "forge_verifiers:StepRewards", "model": {"path": "a model", "marker": "<step>"}}
COLOCATED = {"colocated": True, "async": {"max_policy_age": 0}}
REMOTE = {"trainer": {"backend": "tinker"}, "lora": {}}
ENVIRONMENT = {"environment": "apps.tools.main:environment"}

# Each breaks one rule: the recipe, its settings, and a part of the message.
CASES: list[tuple[type[TrainingRecipe], dict[str, Any], str]] = [
    (RLConfig, {"from_scratch": {}}, "set either model (a folder or hub id) or from_scratch"),
    (RLConfig, {"metrics": {"profile": {"steps": [1], "services": ["critics"]}}}, "choose from trainer, generator"),
    (RLConfig, {"run": {"name": "x", "save_before": 60.0}}, "run.save_before needs checkpoints: set checkpoint.every"),
    (RLConfig, {"trainer": {"backend": "titan"}, "lora": {"rank": 2}}, "trainer.backend titan trains all weights"),
    (SFTConfig, {"parallelism": {"expert_parallel_degree": 2}}, "needs trainer.backend titan"),
    (RLConfig, {"trainer": {"backend": "tinker"}}, "trainer.backend tinker trains adapters, not all weights: set lora"),
    (RLConfig, {**REMOTE, "lora": {"alpha": 16}}, "lora.alpha is not for trainer.backend tinker: omit it"),
    (SFTConfig, {**REMOTE, "training": {"dtype": "bfloat16"}}, "training.dtype is not for trainer.backend tinker"),
    (DPOConfig, {**REMOTE, "services": {"trainer": {"procs": 2}}}, "services.trainer.procs is not for trainer.backend"),
    (
        RLConfig,
        {**REMOTE, "generator": {"on_update": "finish"}},
        "generator.on_update is not supported by generator.engine tinker",
    ),
    (RLConfig, {**REMOTE, "generator": {"engine": "vllm"}}, "trains and samples at one server: omit generator.engine"),
    (RLConfig, {"generator": {"engine": "tinker"}}, "trains and samples at one server: omit generator.engine"),
    (RLConfig, {**REMOTE, "algorithm": "ppo"}, "needs a critic, which trainer.backend tinker does not have"),
    (RLConfig, {**REMOTE, "grpo": {"temperature": 0.8}}, "set grpo.temperature to 1, and omit top_p"),
    (RLConfig, {**REMOTE, "grpo": {"stop": ["."]}}, "grpo.stop is not for trainer.backend tinker"),
    (RLConfig, {**REMOTE, "eval": {"sampling": {"stop": ["."]}}}, "has neither stop nor repetition_penalty"),
    (RLConfig, {**REMOTE, "grpo": {"loss": {"entropy_coef": 0.1}}}, "gets no gradient of the entropy"),
    (
        RLConfig,
        {"training": {"exact": True}, "services": {"trainer": {"with_gpus": True}}},
        "training.exact is for CPUs",
    ),
    (
        RLConfig,
        {"training": {"exact": True, "dtype": "bfloat16"}},
        "the same value of generator.dtype and training.dtype",
    ),
    (
        SFTConfig,
        {"training": {"exact": True, "dtype": "bfloat16"}, "lora": {"rank": 2}},
        "training.exact trains adapters in float32 only",
    ),
    (SFTConfig, {"services": {"dataset": {"procs": 2}}}, "services.dataset.procs must be 1"),
    (DPOConfig, {"services": {"trainer": {"num_replicas": 2}}}, "its state cannot be split"),
    (RLConfig, {**COLOCATED, "services": {"generator": {"threads": 2}}}, "threads must be the trainer's"),
    (RLConfig, {**COLOCATED, "services": {"generator": {"share": "x", "procs": 1}}}, "omit share and hosts"),
    (RLConfig, {**COLOCATED, "services": {"generator": {"num_replicas": 2}}}, "a device has room for one generator"),
    (RLConfig, {"grpo": {"n_samples": 1}}, "grpo.n_samples must be at least 2: grpo compares the samples"),
    (RLConfig, {"colocated": True, "async": {"max_policy_age": 1}}, "async.max_policy_age must be 0"),
    (RLConfig, {"grpo": {"max_tokens": 8}, "training": {"seq_len": 8}}, "training.seq_len must exceed grpo.max_tokens"),
    (RLConfig, {"training": {"sync_interval": 4}, "async": {"max_policy_age": 1}}, "raise it to at least 3"),
    (RLConfig, {"algorithm": "reinforce", "training": {"mini_batches": 2}}, "takes every sample as the policy's own"),
    (RLConfig, {"reward": {"functions": [STEPS], "accuracy": "ExactMatch"}}, "use algorithm ppo"),
    (RLConfig, {"grpo": {"overlong_buffer": 512}}, "grpo.overlong_buffer must be below grpo.max_tokens"),
    (RLConfig, {"grpo": {"beta": 0.1}, "async": {"max_policy_age": 0}}, "set services.ref_model to {}"),
    (RLConfig, {"algorithm": "distill"}, "algorithm distill needs grpo.reference"),
    (RLConfig, {**ENVIRONMENT, "episode": {"max_tokens": 9000}}, "must be at most training.seq_len = 4096"),
    (RLConfig, {**ENVIRONMENT, "dataset": {**TASK, "chat_template": True}}, "episode.template makes the tokens"),
    (SFTConfig, {"training": {"aggregation": "fixed_horizon"}}, "is for sampled completions: use one of the means"),
]

# Settings that nothing reads: the keys that the warning lists.
UNUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"critic": {"learning_rate": 1e-4}, "grpo": {"horizon": 5}}, ["critic", "grpo.horizon"]),
    ({**ENVIRONMENT, "reward": {"functions": ["ExactMatch"]}}, ["reward"]),
    ({"episode": {"max_turns": 3}, "services": {"ref_model": {}}}, ["services.ref_model", "episode"]),
    (
        {"checkpoint": {"async_write": True}, "grpo": {"correction_high": 3.0}},
        ["checkpoint.async_write", "grpo.correction_high"],
    ),
]


@pytest.mark.parametrize(("recipe", "settings", "message"), CASES)
def test_violated_config_rules_raise_one_line_error(
    recipe: type[TrainingRecipe], settings: dict[str, Any], message: str
):
    needed = {"dataset": TASK if recipe is RLConfig else ROWS}
    with pytest.raises(ConfigError) as error:
        build(recipe, {"model": "a model", **needed, **settings})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("settings", "keys"), UNUSED)
def test_unused_config_settings_are_listed_in_warning(settings: dict[str, Any], keys: list[str]):
    assert build(RLConfig, {"model": "a model", "dataset": TASK, **settings}).unused() == keys
