"""Configuration: strict, with errors that say what to do, and overrides that find their section."""

import ast
import os
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from forge.recipes.memory import memory_report
from pydantic import Field
from safetensors.torch import save_file

from apps.code.config import CodeConfig
from apps.tools.main import ToolsConfig
from apps.weaver.config import WeaverConfig
from forge.config import ConfigError, Section, build, load, section_in, to_dict
from forge.config.plugin import warn_of_code
from forge.config.yaml_files import parse_yaml
from forge.engines import EngineSettings
from forge.recipes.distill import DistillConfig
from forge.recipes.dpo import DPOConfig
from forge.recipes.reward_model import RewardModelConfig
from forge.recipes.rl_config import GRPOConfig
from forge.recipes.sft import SFTConfig
from forge.runtime.controller import Options
from forge.system.extras import run_elsewhere
from forge_agents.several import SeveralPoliciesConfig

ROOT = Path(__file__).parents[2]
CONFIGS = {
    "agent": GRPOConfig,
    "code": CodeConfig,
    "distill": DistillConfig,
    "dpo": DPOConfig,
    "grpo": GRPOConfig,
    "reward_model": RewardModelConfig,
    "real": GRPOConfig,
    "selfplay": SeveralPoliciesConfig,
    "sft": SFTConfig,
    "tools": ToolsConfig,
    "weaver": WeaverConfig,
}

SEED_YAML = """
model: "Qwen/Qwen2.5-7B-Instruct"
dataset:
  path: "openai/gsm8k"
  split: "train"
  streaming: true
training:
  batch_size: 4
  learning_rate: 1e-6
  seq_len: 4096
  dtype: bfloat16
  gradient_accumulation_steps: 4
grpo:
  n_samples: 8
  clip_low: 0.2
  clip_high: 0.28
  beta: 0.1
  temperature: 0.7
services:
  generator: {procs: 1, num_replicas: 1, with_gpus: true}
  trainer: {procs: 1, num_replicas: 1, with_gpus: true}
  ref_model: {procs: 1, num_replicas: 1, with_gpus: true}
"""


NO_CLIP = ["--grpo.clip_low", "null", "--grpo.clip_high", "null"]
COLOCATED = ["--colocated", "true", "--async.max_policy_age", "0"]
SOURCES = ["--dataset.path", "null", "--dataset.sources"]
TEACHER = ["--grpo.reference", "teacher"]
NO_REFERENCE = ["--services.ref_model", "null"]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(SEED_YAML)
    return path


def read(path, *overrides):
    return load(GRPOConfig, ["--config", str(path), *overrides])


def test_the_documented_sections_load(config):
    cfg = read(config)
    assert cfg.training.learning_rate == 1e-6
    assert cfg.services.ref_model.with_gpus
    assert cfg.grpo.clip_high == 0.28


def test_a_section_that_is_given_in_part_keeps_the_rest_of_its_default(config):
    reward = read(config, "--reward.call_timeout", "60").services.reward
    assert (reward.share, reward.call_timeout) == (None, 60.0)

    class Shared(Section):
        reward: Options = Options(share="helpers", num_replicas=2)

    given = build(Shared, {"reward": {"call_timeout": 60.0}}).reward
    assert (given.share, given.num_replicas, given.call_timeout) == ("helpers", 2, 60.0)
    assert build(Shared, {"reward": {"share": None}}).reward.share is None


def test_a_hash_in_an_override_is_no_comment(config):
    cfg = read(config, "--dataset.target_pattern", r"####\s*(.+)", "--dataset.prompt_template", "{question} # so:")
    assert cfg.dataset.target_pattern == r"####\s*(.+)"
    assert cfg.dataset.prompt_template == "{question} # so:"


def test_an_override_opens_a_section_that_is_null(config):
    assert read(config, "--services.reward", "null").services.reward is None
    assert read(config, "--services.ref_model", "{}").services.ref_model is not None
    cfg = read(config, "--services.reward", "null", "--services.reward.num_replicas", "2")
    assert cfg.services.reward.num_replicas == 2


def test_overrides(config):
    cfg = read(config, "--trainer.procs", "4", "--generator.num_replicas=2", "--generator.slots", "64", "--seed", "7")
    assert (cfg.services.trainer.procs, cfg.services.generator.num_replicas) == (4, 2)
    assert cfg.generator.slots == 64
    assert cfg.seed == 7
    assert read(config, "--async.max_policy_age", "3").async_.max_policy_age == 3
    assert read(config, "--training.learning_rate", "3e-5").training.learning_rate == 3e-5
    assert read(config, "--dataset.prompt_template", "{question}>").dataset.prompt_template == "{question}>"
    assert read(config, "--dataset.prompt_template", "{question}").dataset.prompt_template == "{question}"
    assert read(config, "--dataset.difficulty", "[3, 7]").dataset.difficulty == [3, 7]


def test_the_interval_of_weight_updates_sets_the_age(config):
    assert read(config).async_.max_policy_age == 1
    assert read(config, "--training.sync_interval", "10").async_.max_policy_age == 10
    together = [
        "--colocated",
        "true",
        *(f"--services.{n}.with_gpus=false" for n in ("generator", "trainer", "ref_model")),
    ]
    assert read(config, *together).async_.max_policy_age == 0


def test_the_kl_without_a_reference_model_is_to_the_generator(config):
    cfg = read(config, *NO_REFERENCE)
    algorithm = cfg.load_algorithm()
    assert algorithm.needs_reference
    assert not cfg.starts_reference(algorithm)
    cfg = read(config, *NO_REFERENCE, "--grpo.reference", "start")
    assert cfg.starts_reference(cfg.load_algorithm())


def test_the_memory_that_a_run_states(config, tmp_path):
    save_file({"a": torch.zeros(1000, 100), "b": torch.zeros(50)}, tmp_path / "model.safetensors")
    cfg = read(config, "--trainer.procs", "2")
    assert memory_report(cfg, str(tmp_path)) == [
        "100,050 parameters",
        "trainer: weights 0.2 MB, gradients 0.2 MB, AdamW 0.4 MB: 0.8 MB in float32 in each of 2 process(es), which "
        "compute in bfloat16",
        "generator: weights 0.4 MB in float32 in each of 1 process(es)",
        "ref_model: weights 0.2 MB in bfloat16 in each of 1 process(es)",
    ]
    halved = memory_report(read(config, "--training.weights_dtype", "bfloat16"), str(tmp_path))[1]
    assert halved.startswith("trainer: weights 0.2 MB, gradients 0.2 MB, AdamW 0.4 MB: 0.8 MB in bfloat16 in each of 1")
    assert memory_report(cfg, str(tmp_path / "nothing")) == []
    layer = {"model.layers.0.mlp.up_proj.weight": torch.zeros(500, 100)}
    save_file({"a": torch.zeros(500, 100), **layer}, tmp_path / "model.safetensors")
    rounded = "ref_model: weights 0.3 MB in bfloat16 (matrices of layers) and float32 in each of 1 process(es)"
    assert memory_report(read(config), str(tmp_path))[-1] == rounded


@pytest.mark.parametrize(
    ("overrides", "stated"),
    [
        # 2 of weights, 2 of gradients, 8 of moments and 2 of the weights' low bits
        (["bfloat16", "adamw", "float32"], "AdamW 1 MB in float32, together 14 bytes a parameter: 1.4 MB in bfloat16"),
        (["bfloat16", "adamw", "bfloat16"], "AdamW 0.4 MB: 0.8 MB in bfloat16"),
        (["float32", "adamw", "bfloat16"], "AdamW 0.4 MB in bfloat16, together 12 bytes a parameter: 1.2 MB"),
        # a half of all parameters has one moment
        (["float32", "muon", "null"], "Muon and AdamW 0.6 MB in float32, together 14 bytes a parameter: 1.4 MB"),
        (["bfloat16", "muon", "float32"], "Muon and AdamW 0.8 MB in float32, together 12 bytes a parameter: 1.2 MB"),
    ],
)
def test_the_memory_of_other_optimisers(config, tmp_path, overrides, stated):
    layers = {"model.layers.0.mlp.up_proj.weight": torch.zeros(500, 100), "model.layers.0.norm.weight": torch.zeros(50)}
    save_file({"model.embed_tokens.weight": torch.zeros(500, 100), **layers}, tmp_path / "model.safetensors")
    names = ("weights_dtype", "optimizer", "optimizer_dtype")
    settings = [part for n, value in zip(names, overrides, strict=True) for part in (f"--training.{n}", value)]
    assert stated in memory_report(read(config, *settings), str(tmp_path))[1]


def test_eight_bits_need_torchao_and_whole_rows(config, tmp_path, monkeypatch):
    eight = ("--training.optimizer", "adamw8bit")
    monkeypatch.setattr("forge.training.settings.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="adamw8bit needs torchao: pip install"):
        read(config, *eight)
    monkeypatch.setattr("forge.training.settings.find_spec", lambda name: name)
    save_file({"a": torch.zeros(1000, 100)}, tmp_path / "model.safetensors")
    stated = memory_report(read(config, *eight), str(tmp_path))[1]
    assert "AdamW 0.203 MB in 8 bits, together 10 bytes a parameter: 1 MB in float32" in stated
    with pytest.raises(ConfigError, match=r"adamw8bit does not support parallelism.tensor_parallel_degree"):
        read(config, *eight, "--trainer.procs", "2", "--parallelism.tensor_parallel_degree", "2")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*NO_REFERENCE, "--async.max_policy_age", "0"], "grpo.beta does nothing: without services.ref_model"),
        ([*NO_REFERENCE, "--grpo.kl_in", "reward"], "grpo.beta does nothing: without services.ref_model"),
        (["--training.dtype", "float32", "--training.weights_dtype", "bfloat16"], "weights_dtype bfloat16 needs"),
        (["--trainer.gpus_per_proc", "2", "--trainer.with_gpus", "false"], "gpus_per_proc = 2 does nothing"),
        (["--training.bach_size", "4"], "unknown key 'training.bach_size'; did you mean 'batch_size'"),
        (["--trainning.steps", "4"], "unknown key 'trainning'; did you mean 'training'"),
        (["--training.steps", "many"], "training.steps must be a whole number, got 'many'"),
        (["--training.steps", "true"], "training.steps must be a whole number, got True"),
        (["--training.dtype", "fp16"], "training.dtype must be one of float32, bfloat16; got 'fp16'"),
        (["--training.steps", "0"], "training.steps must be at least 1"),
        (["--grpo.n_samples", "1"], "one sample has nothing to be compared with"),
        (["--parallelism.pipeline_parallel_degree", "2"], "is not supported: set it to 1 and raise"),
        (["--parallelism.expert_parallel_degree", "2"], "expert_parallel_degree does nothing with .* fsdp: set titan"),
        (["--parallelism.tensor_parallel_degree", "2"], "2 \\* 1 does not divide services.trainer.procs = 1"),
        (["--training.cpu_offload", "true", "--trainer.with_gpus", "false"], "services.trainer has no GPUs"),
        (["--trainer.procs", "3", "--parallelism.data_parallel_shard_degree", "2"], "does not divide"),
        (["--grpo.beta", "0"], "services.ref_model is set and nothing uses it"),
        (["--algorithm", "grop"], "unknown algorithm 'grop': did you mean 'grpo'"),
        (["--algorithm", "sapo"], "algorithm sapo has no setting 'clip_low'"),
        (["--grpo.loss", "{dual_clop: 3.0}"], "algorithm grpo has no setting 'dual_clop'; did you mean 'dual_clip'"),
        (["--grpo.loss", "{clip_low: 0.1}"], "grpo.clip_low and grpo.loss.clip_low are the same setting: keep one"),
        (["--grpo.correction_low", "0.1"], "correction_low does something only if grpo.correction is mask"),
        (["--grpo.correction_level", "sequence"], "correction_level do nothing: grpo.correction is not set"),
        (["--grpo.overlong_buffer", "512"], "grpo.overlong_buffer must be below grpo.max_tokens"),
        (["--critic.clip", "0.5"], "critic or services.critic is set and nothing uses it: grpo has no critic"),
        (["--training.learning_rate", "-1"], "training.learning_rate must be at least 0, got -1"),
        (["--training.beta1", "2"], "training.beta1 must be below 1, got 2"),
        (["--grpo.temperature", ".nan"], "grpo.temperature must be a finite number, got nan"),
        (["--grpo.max_tokens", "0"], "grpo.max_tokens must be at least 1"),
        (["--async.max_policy_age", "-1"], "async.max_policy_age must be at least 0"),
        (["--eval.problems", "-1"], "eval.problems must be at least 0, got -1"),
        (["--checkpoint.every", "-1"], "checkpoint.every must be at least 0, got -1"),
        (["--generator.slots", "0"], "generator.slots must be at least 1"),
        (
            ["--generator.vllm", "{tensor_parallel_size: 2}"],
            r"generator.vllm \(tensor_parallel_size\) needs generator.engine: vllm",
        ),
        (["--trainer.backend", "titan", "--lora", "{rank: 2}"], "titan trains all weights, in float32: omit lora"),
        (["--trainer.backend", "ddp"], "trainer.backend must be one of fsdp, titan"),
        (["--serve.host", "0.0.0.0"], "serve.host does nothing: serve.port is not set"),
        (["--serve.port", "99999"], "serve.port must be at most 65535, got 99999"),
        ([*COLOCATED, "--async.max_policy_age", "1"], "async.max_policy_age must be 0"),
        ([*COLOCATED, "--generator.num_replicas", "2"], "more than the trainer's procs = 1"),
        ([*COLOCATED, "--generator.threads", "2"], "services.generator.threads = 2, and it lives in the trainer's"),
        ([*COLOCATED, "--generator.share", "x"], "omit share, hosts and per_process"),
        ([*COLOCATED, "--training.cpu_offload", "true"], "omit training.cpu_offload"),
        ([*SOURCES, "[{path: a, max_prompt_tokens: 9999}]"], "together exceed training.seq_len: at most 3584"),
        ([*SOURCES, "[{path: a, wieght: 2}]"], r"unknown key 'dataset.sources\[0\].wieght'"),
        ([*SOURCES, "[{path: a, weight: 0}]"], r"dataset.sources\[0\].weight must be a number above 0"),
        (["--critic.procs", "2"], "critic or services.critic is set and nothing uses it: grpo has no critic"),
        (["--grpo.horizon", "9"], "does something under aggregation fixed_horizon only: this is token_mean"),
        (["--grpo.loss", "{kl: k2}", "--grpo.beta", "0", *NO_REFERENCE], "grpo.kl and grpo.kl_in do nothing"),
        (
            ["--grpo.loss", "{entropy_coef: 0.1}", "--training.entropy_coef", "0.1"],
            "training.entropy_coef and grpo.loss.entropy_coef are the same setting",
        ),
        (
            ["--algorithm", "rloo", "--training.aggregation", "token_mean"],
            "under training.aggregation sequence_mean only",
        ),
        (
            ["--algorithm", "reinforce", *NO_CLIP, "--training.epochs", "2"],
            "holds for the first update of a step only",
        ),
        (
            ["--algorithm", "distill", *NO_CLIP, "--grpo.beta", "null", *TEACHER, "--grpo.overlong_buffer", "9"],
            "grpo.overlong_buffer does nothing: distill does not look at rewards",
        ),
        (["--algorithm", "ppo", "--critic.clip", "-1"], "critic.clip must be above 0, got -1"),
        (
            ["--algorithm", "ppo", "--critic.procs", "3", "--parallelism.data_parallel_shard_degree", "2"],
            "does not divide",
        ),
        (["--training.epochs", "0"], "training.epochs must be at least 1"),
        (["--lora", "{rank: 0}"], "lora.rank must be at least 1, got 0"),
        (["--async.max_policy_age", "0", "--training.sync_interval", "4"], "raise it to at least 3"),
        (["--dataset.task", "apps.toys.words:Reverse"], "a path .*, a task, or sources"),
        (["--trainer.num_replicas", "2"], "services.trainer.num_replicas must be 1"),
        (
            ["--generator.procs", "2"],
            "services.generator.procs = 2 is one model over 2 processes .* set generator.engine to vllm, or procs to 1",
        ),
        (["--reward.call_timeout", "-1"], "services.reward.call_timeout must be above 0, got -1"),
        (["--checkpoint.keep", "0"], "checkpoint.keep must be at least 1"),
        (["--checkpoint.async_write", "true"], "checkpoint.async_write does nothing: checkpoint.every is 0"),
        (["--resume", "auto"], "--resume is understood by recipes only"),
        (["--dataset.max_prompt_tokens", "4096"], "together exceed training.seq_len: at most 3584"),
        (["--eval.every", "3", "--training.sync_interval", "2"], "a multiple of training.sync_interval"),
        (["--seed"], "--seed needs a value"),
        (["seed"], "overrides are written --section.key VALUE"),
        (["--model.name", "x"], "'model' is a value, not a section"),
        (["--services", "3"], "services must be a mapping"),
        (["--reward.functions", "MathReward"], "reward.functions must be a list"),
        (["--reward.functions", "[]"], "reward.functions is empty"),
        (
            ["--reward.functions", "null", "--reward.verifiers", "{math: true}"],
            "set reward.accuracy, or eval.problems to 0",
        ),
        (
            ["--eval.problems", "0", "--reward.functions", "[{use: 'forge_weaver:Ensemble', path: x, clip: 2.0}]"],
            r"reward.functions\[0\]: clip is only used if form is logit",
        ),
        (
            [
                "--eval.problems",
                "0",
                "--reward.functions",
                "[{use: 'forge_weaver:Ensemble', path: x, form: threshold, threshold: 2.0}]",
            ],
            "threshold must be above 0 and at most 1",
        ),
        (["--reward.verifiers", "{judge: x}"], "unknown key 'reward.verifiers.judge'; did you mean 'judges'"),
        (["--reward.verifiers", "{judges: [{url: a, model: b, no: x}]}"], r"judges\[0\].False'.*quote the key"),
    ],
)
def test_mistakes_are_named(config, overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(config, *overrides)
    assert "\n" not in str(caught.value)


def test_functions_are_added_to_verifiers_only_where_they_are_named(config):
    """The truth must not leak into a reward that is to do without."""
    assert read(config).reward.settings()["functions"] == ["MathReward"]
    alone = ("--reward.accuracy", "ExactMatch", "--reward.verifiers", "{reward_models: [{path: x}]}")
    assert read(config, *alone).reward.settings()["functions"] == []
    assert read(config, *alone, "--reward.functions", "[ThinkingReward]").reward.settings()["functions"] == [
        "ThinkingReward"
    ]


def test_ranks_may_share_copies_whatever_a_critic_that_is_not_there(config):
    assert read(config, "--trainer.procs", "4", "--parallelism.data_parallel_shard_degree", "2")


def test_an_algorithm_is_made_with_what_is_set_and_nothing_else(config):
    cfg = read(config, "--grpo.loss", "{dual_clip: 5.0}", "--training.entropy_coef", "0.01")
    made = cfg.load_algorithm()
    assert (made.clip_low, made.clip_high, made.beta, made.dual_clip) == (0.2, 0.28, 0.1, 5.0)
    assert made.entropy_coef == 0.01
    assert cfg.shares(made) == {"aggregation": "token_mean", "horizon": None}
    dr_grpo = read(config, "--algorithm", "dr_grpo", "--grpo.correction", "truncate")
    made = dr_grpo.load_algorithm()
    assert made.correction.kind == "truncate"
    assert dr_grpo.shares(made) == {"aggregation": "fixed_horizon", "horizon": 512}
    distilled = {"grpo.beta": "null", "grpo.clip_low": "null", "grpo.clip_high": "null", "algorithm": "distill"}
    arguments = [word for name, value in distilled.items() for word in (f"--{name}", value)]
    with pytest.raises(ConfigError, match=r"algorithm distill needs grpo.reference: the teacher's folder or hub id"):
        read(config, *arguments)
    assert read(config, *arguments, "--grpo.reference", "teacher").load_algorithm().needs_reference


def test_files_that_cannot_be_read(config, tmp_path):
    with pytest.raises(ConfigError, match=r"run2.yaml does not exist; did you mean .*run.yaml"):
        read(tmp_path / "run2.yaml")
    with pytest.raises(ConfigError, match="--config FILE is missing"):
        load(GRPOConfig, [])
    config.write_text("model: [1, 2")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        read(config)
    config.write_text("seed: 3")
    with pytest.raises(ConfigError, match="'dataset' must be set"):
        read(config)


@pytest.mark.parametrize("path", sorted(ROOT.glob("apps/*/*.yaml")), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_shipped_file_loads_and_round_trips(path):
    warm_ups = dict.fromkeys(("warmup", "arithmetic_sft", "repair_warmup"), SFTConfig)
    trained = dict.fromkeys(("grpo", "qwen3_8b_grpo", "qwen3_32b_grpo"), GRPOConfig)
    cls = {**trained, **warm_ups}.get(path.stem, CONFIGS[path.parent.name])
    with run_elsewhere():  # vLLM has an environment by itself
        cfg = load(cls, ["--config", str(path)])
        assert build(cls, yaml.safe_load(yaml.safe_dump(to_dict(cfg)))) == cfg


class Shelf(Section):
    name: str
    width: float = 1.0


class Cupboard(Section):
    shelves: list[Shelf] = Field(default_factory=list)
    names: list[str] = Field(default_factory=list)
    spare: Shelf = Shelf(name="spare", width=9.0)


def test_lists_of_sections_are_checked_and_written_down():
    values = {"shelves": [{"name": "low", "width": 2}, {"name": "high"}], "names": ["a"]}
    cupboard = build(Cupboard, values)
    assert cupboard.shelves == [Shelf(name="low", width=2.0), Shelf(name="high")]
    plain = to_dict(cupboard)
    spare = {"name": "spare", "width": 9.0}
    shelves = [{"name": "low", "width": 2.0}, {"name": "high", "width": 1.0}]
    assert plain == {"shelves": shelves, "names": ["a"], "spare": spare}
    assert build(Cupboard, yaml.safe_load(yaml.safe_dump(plain))) == cupboard
    with pytest.raises(ConfigError, match=r"unknown key 'shelves\[1\].widht'; did you mean 'width'"):
        build(Cupboard, {"shelves": [{"name": "low"}, {"name": "high", "widht": 3}]})
    with pytest.raises(ConfigError, match=r"'shelves\[0\].name' must be set"):
        build(Cupboard, {"shelves": [{}]})
    assert build(Cupboard, {"spare": {"name": "other"}}).spare == Shelf(name="other", width=9.0)


def test_settings_made_in_python_have_the_same_errors():
    with pytest.raises(ConfigError, match=r"^unknown key 'widht'; did you mean 'width'"):
        Shelf(name="low", widht=2.0)
    with pytest.raises(ConfigError, match=r"^width must be a number, got 'wide'$"):
        Shelf(name="low", width="wide")
    with pytest.raises(ConfigError, match=r"^slots must be at least 1, got 0$"):
        EngineSettings(slots=0)


def test_a_default_that_is_changed_is_of_one_configuration_only():
    one, other = (build(Cupboard, {}) for _ in range(2))
    one.spare.width = 1.0
    assert other.spare.width == 9.0


def test_sections_unpack():
    cfg = build(GRPOConfig, {"model": "m", "dataset": {"task": "apps.toys.words:Reverse"}})
    assert dict(**cfg.checkpoint) == {"every": 0, "keep": 2, "async_write": False, "push_to_hub": None}


@cache
def names_in_code():
    """The names that the code reads, and those of sections that it unpacks."""
    read_names: set[str] = set()
    unpacked: set[str] = set()
    for path in [*ROOT.glob("src/forge/**/*.py"), *ROOT.glob("apps/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                read_names.add(node.attr)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                read_names.add(node.value)
            if isinstance(node, ast.keyword) and node.arg is None and isinstance(node.value, ast.Attribute):
                unpacked.add(node.value.attr)
            if isinstance(node, ast.ClassDef) and re.search(r"\*\*self\b", ast.unparse(node)):
                unpacked.add(node.name)
            if isinstance(node, ast.Dict):
                unpacked.update(
                    v.id for k, v in zip(node.keys, node.values, strict=True) if k is None and isinstance(v, ast.Name)
                )
    return read_names, unpacked


@pytest.mark.parametrize("cls", CONFIGS.values())
def test_every_key_is_read_by_something(cls):
    """A key that nothing reads would be a setting that silently does nothing."""
    read_names, unpacked = names_in_code()

    def check(section, where):
        for name, field in section.model_fields.items():
            # A section that is unpacked into a function's arguments has every key checked by Python itself.
            assert name in read_names or {where, section.__name__} & unpacked, f"nothing reads {where}.{name}"
            if (nested := section_in(field.annotation)) is not None:
                check(nested, name)

    check(cls, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_read_with_the_names_of_its_code(tmp_path, caplog):
    path = tmp_path / "x.yaml"
    path.write_text("reward: {functions: [timeit:timeit, ExactMatch]}\ndataset: {task: apps.toys.words:Reverse}\n")
    warn_of_code(path, yaml.safe_load(path.read_text()))
    assert not caplog.records
    os.chown(path, 21002, 21002)
    warn_of_code(path, yaml.safe_load(path.read_text()))
    assert caplog.records[0].getMessage() == (
        f"{path} belongs to another user (21002). It names code that will run as you: apps.toys.words:Reverse, "
        "timeit:timeit"
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a: &a {b: *a}", "line 1, column 4: a part contains itself"),
        ("- &a0 [x, x]\n" + "".join(f"- &a{n} [{f'*a{n - 1}, ' * 10}]\n" for n in range(1, 6)), "more than 100000"),
        ("a: " + "[" * 120 + "]" * 120, "more than 100 levels"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a: 1" + "0" * 400, "line 1, column 4: a number of 401 characters"),
    ],
    ids=["itself", "aliases", "levels", "lists", "digits"],
)
@pytest.mark.parametrize("fast", [False, True])
def test_yaml_that_would_grow_is_an_error(tmp_path, content, says, fast):
    with pytest.raises(ValueError, match=r"c.yaml is not valid YAML: ") as caught:
        parse_yaml(content, tmp_path / "c.yaml", fast=fast)
    assert says in str(caught.value) or (fast and "maximum nesting depth" in str(caught.value))
    assert "\n" not in str(caught.value)


def test_aliases_that_repeat_little_are_taken(tmp_path):
    text = "a: &a {b: 1e-6, c: [1]}\nd: *a\ne: [*a, *a]\n"
    for fast in (False, True):
        read = parse_yaml(text, tmp_path, fast=fast)
        assert read["e"] == [{"b": 1e-6, "c": [1]}] * 2
