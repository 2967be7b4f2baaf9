"""Every rule of `forge.recipes.preflight`, by a configuration that breaks it and the line that says so."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import transformers

from forge.config import ConfigError, build
from forge.models import build_small_model
from forge.recipes import preflight
from forge.recipes.distill import DistillConfig
from forge.recipes.dpo import DPOConfig
from forge.recipes.prepare import prepare
from forge.recipes.resume import Start
from forge.recipes.reward_model import RewardModelConfig
from forge.recipes.rl_config import RLConfig
from forge.recipes.schema import TrainingRecipe
from forge.recipes.sft import SFTConfig

ROWS = {"path": "rows.jsonl"}
TASK = {"task": "apps.toys.words:Reverse", "prompt_template": "{question}>"}
STEPS = {"use": "forge.rewards:StepRewards", "model": {"path": "a model", "marker": "<step>"}}
COLOCATED = {"colocated": True, "async": {"max_policy_age": 0}}
ENVIRONMENT = {"environment": "apps.tools.main:environment"}
AGENT = {"function": "apps.agent.main:play"}

# Each breaks one rule: the recipe, its settings, and the message.
CASES: list[tuple[type[TrainingRecipe], dict[str, Any], str]] = [
    (
        RLConfig,
        {"cluster": {"store": "torchstore", "hosts": ["node1:7070"]}},
        "cluster.store torchstore serves the processes of one machine: omit it, or cluster.hosts",
    ),
    (RLConfig, {"from_scratch": {}}, "set either model (a folder or hub id) or from_scratch (a small model"),
    (
        RLConfig,
        {"metrics": {"profile": {"steps": [1], "services": ["critics"]}}},
        "metrics.profile.services: 'critics' is none of trainer, generator",
    ),
    (RLConfig, {"run": {"name": "x", "save_before": 60.0}}, "run.save_before needs checkpoints: set checkpoint.every"),
    (
        RLConfig,
        {"trainer": {"backend": "titan"}, "lora": {"rank": 2}},
        "trainer.backend titan trains all weights, in float32: omit lora and training.weights_dtype, or set "
        "trainer.backend to fsdp",
    ),
    (
        SFTConfig,
        {"parallelism": {"expert_parallel_degree": 2}},
        "parallelism.expert_parallel_degree does nothing with trainer.backend fsdp: set titan",
    ),
    (
        DPOConfig,
        {"parallelism": {"tensor_parallel_degree": 2}, "training": {"optimizer": "adamw8bit"}},
        "training.optimizer adamw8bit does not support parallelism.tensor_parallel_degree",
    ),
    (
        SFTConfig,
        {"training": {"deterministic": True}},
        "training.deterministic does nothing: services.trainer has no GPUs (with_gpus), and a CPU repeats its bits: "
        "omit it",
    ),
    (
        SFTConfig,
        {"services": {"dataset": {"procs": 2}}},
        "services.dataset.procs must be 1: scale it with num_replicas",
    ),
    (
        DPOConfig,
        {"services": {"trainer": {"num_replicas": 2}}},
        "services.trainer.num_replicas must be 1: its state cannot be split",
    ),
    (
        RewardModelConfig,
        {"training": {"cpu_offload": True}},
        "training.cpu_offload does nothing: services.trainer has no GPUs (with_gpus)",
    ),
    (
        RLConfig,
        {"generator": {"cuda_graphs": True}},
        "generator.cuda_graphs does nothing: services.generator has no GPUs (with_gpus): omit it",
    ),
    (
        RLConfig,
        {**COLOCATED, "services": {"generator": {"threads": 2}}},
        "colocated: services.generator.threads = 2, and it lives in the trainer's processes, with 1",
    ),
    (
        RLConfig,
        {**COLOCATED, "services": {"generator": {"procs": 2}}, "generator": {"engine": "vllm"}},
        "colocated: a generator has one process: set services.generator.procs to 1",
    ),
    (
        RLConfig,
        {**COLOCATED, "services": {"generator": {"share": "x"}}},
        "colocated: services.generator lives in the trainer's processes: omit share, hosts and per_process",
    ),
    (
        DPOConfig,
        {"training": {"sync_interval": 2}},
        "training.sync_interval and training.entropy_coef do nothing in this recipe",
    ),
    (
        SFTConfig,
        {"training": {"aggregation": "fixed_horizon"}},
        "training.aggregation fixed_horizon is for sampled completions: use one of the means",
    ),
    (
        SFTConfig,
        {"reward": {"verifiers": {"math": True}}},
        "nothing decides which answers of an evaluation are right: set reward.accuracy, or eval.problems to 0",
    ),
    (
        RLConfig,
        {**COLOCATED, "services": {"generator": {"num_replicas": 2}}},
        "colocated: services.generator.num_replicas = 2 is more than the trainer's procs = 1: a device has room for",
    ),
    (
        RLConfig,
        {**COLOCATED, "grpo": {"beta": 0.1}, "services": {"ref_model": {"procs": 2}, "trainer": {"procs": 2}}},
        "colocated: a reference model has one process: set services.ref_model.procs to 1",
    ),
    (
        RLConfig,
        {**COLOCATED, "algorithm": "ppo", "services": {"critic": {"procs": 2}, "trainer": {"procs": 2}}},
        "colocated: a critic of several ranks cannot live in the trainer's processes",
    ),
    (
        RLConfig,
        {
            **COLOCATED,
            "training": {"cpu_offload": True},
            "services": {"trainer": {"with_gpus": True}, "generator": {"with_gpus": True}},
        },
        "colocated: between steps everything is in host memory already: omit training.cpu_offload",
    ),
    (
        RLConfig,
        {**COLOCATED, "generator": {"engine": "vllm"}, "services": {"trainer": {"procs": 2}}},
        "colocated: generator.engine vllm takes one device: set services.trainer.procs to 1, or choose embedded",
    ),
    (
        RLConfig,
        {"grpo": {"n_samples": 1}},
        "grpo.n_samples must be at least 2: grpo compares the samples of a prompt with one another",
    ),
    (
        RLConfig,
        {**COLOCATED, "async": {"max_policy_age": 1}},
        "colocated: trainer and generator take turns, so async.max_policy_age must be 0",
    ),
    (RLConfig, {"grpo": {"max_tokens": 4096}}, "training.seq_len must exceed grpo.max_tokens"),
    (
        RLConfig,
        {"training": {"sync_interval": 2}, "async": {"max_policy_age": 0}},
        "training.sync_interval = 2 makes weights older than async.max_policy_age = 0 allows: raise it to at least 1",
    ),
    (
        RLConfig,
        {"grpo": {"horizon": 9}},
        "grpo.horizon does something under aggregation fixed_horizon only: this is token_mean",
    ),
    (
        RLConfig,
        {"algorithm": "rloo", "training": {"aggregation": "token_mean"}},
        "rloo means something under training.aggregation sequence_mean only",
    ),
    (
        RLConfig,
        {"algorithm": "reinforce", "training": {"epochs": 2}},
        "reinforce takes every sample as the policy's own, which holds for the first update of a step only: set "
        "grpo.clip_ratio or grpo.correction, or make one update",
    ),
    (RLConfig, {"grpo": {"kl": "k2", "beta": 0.0}}, "grpo.kl and grpo.kl_in do nothing: grpo.beta is 0"),
    (
        RLConfig,
        {"algorithm": "distill", "grpo": {"reference": "teacher", "overlong_buffer": 9}},
        "grpo.overlong_buffer does nothing: distill does not look at rewards",
    ),
    (
        RLConfig,
        {"reward": {"functions": ["ExactMatch", STEPS]}},
        "reward.functions rewards steps, and grpo sees only their sum: use algorithm ppo, whose critic assigns them",
    ),
    (RLConfig, {"grpo": {"overlong_buffer": 512}}, "grpo.overlong_buffer must be below grpo.max_tokens"),
    (
        RLConfig,
        {"grpo": {"reference": "a model", "beta": 0.0}},
        "grpo.reference is set and nothing uses it: grpo.beta is 0",
    ),
    (
        RLConfig,
        {"services": {"ref_model": {}}, "grpo": {"beta": 0.0}},
        "services.ref_model is set and nothing uses it: grpo.beta is 0",
    ),
    (
        RLConfig,
        {"grpo": {"beta": 0.1}, "async": {"max_policy_age": 0}},
        "grpo.beta does nothing: without services.ref_model the KL is to the weights that sampled",
    ),
    (
        RLConfig,
        {"algorithm": "distill"},
        "algorithm distill needs grpo.reference: the teacher's folder or hub id",
    ),
    (
        RLConfig,
        {"critic": {"clip": 0.5}},
        "critic or services.critic is set and nothing uses it: grpo has no critic",
    ),
    (
        RLConfig,
        {"grpo": {"correction_low": 0.1}},
        "grpo.correction_low does something only if grpo.correction is mask",
    ),
    (
        RLConfig,
        {"grpo": {"correction_level": "sequence"}},
        "grpo.correction_high and grpo.correction_level do nothing: grpo.correction is not set",
    ),
    (
        RLConfig,
        {"episode": {"max_turns": 3}},
        "episode does nothing: neither environment nor episode.agent is set",
    ),
    (
        RLConfig,
        {**ENVIRONMENT, "episode": {"agent": AGENT}},
        "environment and episode.agent both play the episodes: set one of them",
    ),
    (
        RLConfig,
        {"episode": {"agent": AGENT}, "reward": {"functions": ["ExactMatch"]}},
        "reward does nothing: episode.agent.reward or its test scores",
    ),
    (
        RLConfig,
        {**ENVIRONMENT, "episode": {"max_tokens": 8192}},
        "episode.max_tokens must be at most training.seq_len = 4096",
    ),
    (
        RLConfig,
        {**ENVIRONMENT, "reward": {"functions": ["ExactMatch"]}},
        "reward does nothing: the environment scores",
    ),
    (
        RLConfig,
        {**ENVIRONMENT, "services": {"reward": {"num_replicas": 2}}},
        "services.reward does nothing: the environment scores",
    ),
    (
        RLConfig,
        {**ENVIRONMENT, "grpo": {"overlong_buffer": 9}},
        "grpo.overlong_buffer does nothing: an episode's length is not that of an answer",
    ),
    (
        RLConfig,
        {**ENVIRONMENT, "dataset": {**TASK, "chat_template": True}},
        "dataset.chat_template must be false: episode.template makes the tokens",
    ),
    (
        RLConfig,
        {"generator": {"engine": "vllm"}, "grpo": {"top_k": 5, "max_tokens": 16}},
        "grpo.top_k with vLLM, which has no log-probabilities of what it excludes: the trainer's stand for them, so "
        "set async.max_policy_age and grpo.beta to 0, or generator.engine to embedded",
    ),
    (
        SFTConfig,
        {"colocated": True},
        "colocated does nothing in this recipe: evaluation is the only time that it generates",
    ),
    (
        SFTConfig,
        {"eval": {"accuracy": False}, "generator": {"slots": 3}},
        "reward, generator and serve do nothing: eval.accuracy is false, or eval.problems 0",
    ),
    (
        RLConfig,
        {"models": {"judge": {"model": "x"}}},
        "models does nothing: no agent asks for them: episode.agent is not set",
    ),
    (
        RLConfig,
        {**ENVIRONMENT, "models": {"judge": {"model": "x"}}},
        "models does nothing with an environment: only agents of episode.agent ask for models by their names",
    ),
    (
        RLConfig,
        {**COLOCATED, "episode": {"agent": AGENT}, "models": {"judge": {"model": "x"}}},
        "models does not work with colocated: further models have separate processes",
    ),
    (
        SFTConfig,
        {"eval": {"problems": 0, "stop_at": 0.5}},
        "eval.stop_at and eval.max_tokens do nothing: eval.accuracy is false, or eval.problems 0",
    ),
    (
        SFTConfig,
        {"reward": {"functions": [lambda response, level: 1.0]}},
        "the reward takes the column 'level', which answers here do not have: name prompt, response and target alone, "
        "or set eval.accuracy to false",
    ),
    (
        SFTConfig,
        {"reward": {"functions": ["ExactMatch", "CharacterMatch"]}},
        "reward.functions beyond the first and reward.verifiers do nothing here: answers are right by one function",
    ),
    (
        DistillConfig,
        {"distill": {"teacher": "t", "max_tokens": 4096}},
        "training.seq_len must exceed distill.max_tokens",
    ),
    (
        DistillConfig,
        {"training": {"sync_interval": 2}},
        "training.sync_interval does nothing in this recipe: the student samples with its newest weights",
    ),
    (
        DistillConfig,
        {"eval": {"problems": 0}, "services": {"reward": {"num_replicas": 2}}},
        "reward and services.reward do nothing: eval.problems is 0, and the student learns from its teacher",
    ),
    (
        DistillConfig,
        {"dataset": TASK | {"sampler": "retire"}},
        "dataset.sampler does nothing in this recipe: no groups are scored that it could learn from",
    ),
    (
        DistillConfig,
        {"reward": {"functions": ["ExactMatch", "CharacterMatch"]}},
        "reward.functions beyond the first and reward.verifiers do nothing here: answers are right by one function",
    ),
]
NEEDED: dict[type, dict[str, Any]] = {DistillConfig: {"dataset": TASK, "distill": {"teacher": "a model"}}}
RULES = {rule for name, rules in vars(preflight).items() if name.endswith("_RULES") for rule in rules}


@pytest.fixture(autouse=True)
def vllm_is_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forge.engines.vllm_args.check_installed", lambda: None)


def error_of(recipe: type[TrainingRecipe], settings: dict[str, Any]) -> str:
    needed = NEEDED.get(recipe, {"dataset": TASK if recipe is RLConfig else ROWS})
    with pytest.raises(ConfigError) as error:
        build(recipe, {"model": "a model", **needed, **settings})
    return str(error.value)


@pytest.mark.parametrize(("recipe", "settings", "message"), CASES)
def test_a_broken_rule_is_one_line(recipe: type[TrainingRecipe], settings: dict[str, Any], message: str):
    error = error_of(recipe, settings)
    assert error.startswith(message)
    assert "\n" not in error


def test_every_rule_has_a_case(monkeypatch: pytest.MonkeyPatch):
    broken = set()
    message = preflight.ConfigRule.message

    def recorded(rule: preflight.ConfigRule, config: object) -> str:
        broken.add(rule)
        return message(rule, config)

    monkeypatch.setattr(preflight.ConfigRule, "message", recorded)
    for recipe, settings, _ in CASES:
        error_of(recipe, settings)
    assert len(RULES) > 45
    assert broken == RULES


class Counted:
    """A reward that counts how often it is constructed."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def __call__(self, prompt: str, response: str, target: str) -> float:
        return 1.0


def test_a_start_reads_a_model_once_and_constructs_a_reward_once(tmp_path, monkeypatch):
    reads: dict[str, int] = {}

    def counting(kind: str, read: Any, name: Any, *args: Any, **settings: Any) -> Any:
        reads[f"{kind} of {name}"] = reads.get(f"{kind} of {name}", 0) + 1
        return read(name, *args, **settings)

    model = build_small_model(
        tmp_path / "model", seed=0, alphabet=None, hidden_size=16, layers=1, heads=2, kv_heads=1, max_positions=64
    )
    for kind in ("AutoConfig", "AutoTokenizer"):
        loader = getattr(transformers, kind)
        monkeypatch.setattr(loader, "from_pretrained", functools.partial(counting, kind, loader.from_pretrained))
    Counted.made = 0
    values = {
        "model": model,
        "dataset": TASK,
        "grpo": {"max_tokens": 8},
        "reward": {"functions": [{"use": f"{__name__}:Counted"}], "accuracy": "ExactMatch"},
        "eval": {"problems": 4},
        "run": {"name": "one", "root": str(tmp_path)},
    }
    *_, record = prepare(build(RLConfig, values), Start())
    record.close()
    assert Counted.made == 1
    # AutoTokenizer reads the configuration as well.
    assert reads == {f"AutoConfig of {model}": 2, f"AutoTokenizer of {model}": 1}
