"""Configuration: strict, with errors that say what to do, and overrides that find their section."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from pydantic import Field

from apps.code.config import CodeConfig
from apps.tools.main import ToolsConfig
from apps.weaver.config import WeaverConfig
from forge.config import ConfigError, Section, build, load, section_in, to_dict
from forge.engines import EngineSettings
from forge.recipes.dpo import DPOConfig
from forge.recipes.reward_model import RewardModelConfig
from forge.recipes.rl_config import RLConfig
from forge.recipes.sft import SFTConfig
from forge.runtime.controller import Options
from forge.system.extras import run_elsewhere
from forge_agents.several import SeveralPoliciesConfig

ROOT = Path(__file__).parents[2]
CONFIGS = {
    "agent": RLConfig,
    "code": CodeConfig,
    "distill": RLConfig,
    "dpo": DPOConfig,
    "grpo": RLConfig,
    "reward_model": RewardModelConfig,
    "real": RLConfig,
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
NO_REFERENCE = ["--services.ref_model", "null"]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(SEED_YAML)
    return path


def read(path, *overrides):
    return load(RLConfig, ["--config", str(path), *overrides])


def test_documented_config_sections_load(config):
    cfg = read(config)
    assert cfg.training.learning_rate == 1e-6
    assert cfg.services.ref_model.with_gpus
    assert cfg.grpo.clip_high == 0.28


def test_partial_config_section_keeps_other_defaults(config):
    reward = read(config, "--reward.call_timeout", "60").services.reward
    assert (reward.share, reward.call_timeout) == (None, 60.0)

    class Shared(Section):
        reward: Options = Options(share="helpers", num_replicas=2)

    given = build(Shared, {"reward": {"call_timeout": 60.0}}).reward
    assert (given.share, given.num_replicas, given.call_timeout) == ("helpers", 2, 60.0)
    assert build(Shared, {"reward": {"share": None}}).reward.share is None


def test_command_line_overrides_change_config_values(config):
    cfg = read(config, "--trainer.procs", "4", "--generator.num_replicas=2", "--generator.slots", "64", "--seed", "7")
    assert (cfg.services.trainer.procs, cfg.services.generator.num_replicas) == (4, 2)
    assert (cfg.generator.slots, cfg.seed) == (64, 7)
    assert read(config, "--async.max_policy_age", "3").async_.max_policy_age == 3
    assert read(config, "--training.learning_rate", "3e-5").training.learning_rate == 3e-5
    assert read(config, "--dataset.prompt_template", "{question}>").dataset.prompt_template == "{question}>"
    assert read(config, "--dataset.prompt_template", "{question}").dataset.prompt_template == "{question}"
    assert read(config, "--dataset.difficulty", "[3, 7]").dataset.difficulty == [3, 7]


def test_max_policy_age_defaults_to_sync_interval(config):
    assert read(config).async_.max_policy_age == 1
    assert read(config, "--training.sync_interval", "10").async_.max_policy_age == 10
    together = [
        "--colocated",
        "true",
        *(f"--services.{n}.with_gpus=false" for n in ("generator", "trainer", "ref_model")),
    ]
    assert read(config, *together).async_.max_policy_age == 0


def test_kl_penalty_without_reference_model_uses_generator_logprobs(config):
    cfg = read(config, *NO_REFERENCE)
    algorithm = cfg.load_algorithm()
    assert algorithm.needs_reference
    assert not cfg.starts_reference(algorithm)
    cfg = read(config, *NO_REFERENCE, "--grpo.reference", "start")
    assert cfg.starts_reference(cfg.load_algorithm())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*NO_REFERENCE, "--async.max_policy_age", "0"], "grpo.beta does nothing: without services.ref_model"),
        ([*NO_REFERENCE, "--grpo.kl_in", "reward"], "grpo.beta does nothing: without services.ref_model"),
        (["--training.dtype", "float32", "--training.weights_dtype", "bfloat16"], "weights_dtype bfloat16 needs"),
        (["--training.bach_size", "4"], "unknown key 'training.bach_size'; did you mean 'batch_size'"),
        (["--trainning.steps", "4"], "unknown key 'trainning'; did you mean 'training'"),
        (["--training.steps", "many"], "training.steps must be a whole number, got 'many'"),
        (["--training.steps", "true"], "training.steps must be a whole number, got True"),
        (["--training.dtype", "fp16"], "training.dtype must be one of float32, bfloat16; got 'fp16'"),
        (["--training.steps", "0"], "training.steps must be at least 1"),
        (["--grpo.n_samples", "1"], "one sample has nothing to be compared with"),
        (["--parallelism.pipeline_parallel_degree", "2"], "pipeline_parallel_degree needs trainer.backend titan"),
        (["--parallelism.expert_parallel_degree", "2"], "expert_parallel_degree needs trainer.backend titan"),
        (["--parallelism.tensor_parallel_degree", "2"], "2 \\* 1 does not divide services.trainer.procs = 1"),
        (["--trainer.procs", "3", "--parallelism.data_parallel_shard_degree", "2"], "does not divide"),
        (["--algorithm", "grop"], "unknown algorithm 'grop': did you mean 'grpo'"),
        (["--algorithm", "sapo"], "algorithm sapo has no setting 'clip_low'"),
        (["--grpo.loss", "{dual_clop: 3.0}"], "algorithm grpo has no setting 'dual_clop'; did you mean 'dual_clip'"),
        (["--grpo.loss", "{clip_low: 0.1}"], "grpo.clip_low and grpo.loss.clip_low are the same setting: keep one"),
        (["--grpo.overlong_buffer", "512"], "grpo.overlong_buffer must be below grpo.max_tokens"),
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
            "generator.vllm is not supported by",
        ),
        (["--trainer.backend", "titan", "--lora", "{rank: 2}"], "titan trains all weights, in float32: omit lora"),
        (["--trainer.backend", "ddp"], "trainer.backend must be one of fsdp, titan"),
        ([*COLOCATED, "--async.max_policy_age", "1"], "async.max_policy_age must be 0"),
        ([*COLOCATED, "--generator.num_replicas", "2"], "a device has room for one generator"),
        ([*COLOCATED, "--generator.threads", "2"], "services.generator.threads must be the trainer's"),
        ([*COLOCATED, "--generator.share", "x"], "omit share and hosts"),
        ([*COLOCATED, "--training.cpu_offload", "true"], "omit training.cpu_offload"),
        ([*SOURCES, "[{path: a, max_prompt_tokens: 9999}]"], "together exceed training.seq_len: at most 3584"),
        ([*SOURCES, "[{path: a, wieght: 2}]"], r"unknown key 'dataset.sources\[0\].wieght'"),
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
        (["--algorithm", "ppo", "--critic.clip", "-1"], "critic.clip must be above 0, got -1"),
        (
            ["--algorithm", "ppo", "--critic.procs", "3", "--parallelism.data_parallel_shard_degree", "2"],
            "does not divide",
        ),
        (["--training.epochs", "0"], "training.epochs must be at least 1"),
        (["--lora", "{rank: 0}"], "lora.rank must be at least 1, got 0"),
        (["--async.max_policy_age", "0", "--training.sync_interval", "4"], "raise it to at least 3"),
        (["--dataset.task", "apps.toys.words:Reverse"], "dataset.path .*, dataset.task and dataset.sources"),
        (["--trainer.num_replicas", "2"], "services.trainer.num_replicas must be 1"),
        (
            ["--generator.procs", "2"],
            "services.generator.procs = 2 splits one model over 2 processes .* set generator.engine to vllm",
        ),
        (["--reward.call_timeout", "-1"], "services.reward.call_timeout must be above 0, got -1"),
        (["--checkpoint.keep", "0"], "checkpoint.keep must be at least 1"),
        (["--resume", "auto"], "--resume is only supported by recipes"),
        (["--dataset.max_prompt_tokens", "4096"], "together exceed training.seq_len: at most 3584"),
        (["--eval.every", "3", "--training.sync_interval", "2"], "a multiple of training.sync_interval"),
        (["--seed"], "--seed needs a value"),
        (["seed"], "write overrides as --section.key VALUE"),
        (["--model.name", "x"], "'model' is a single value, not a section"),
        (["--services", "3"], "services must be a mapping"),
        (["--reward.functions", "MathReward"], "reward.functions must be a list"),
        (["--reward.functions", "[]"], "reward.functions is empty"),
        (
            ["--reward.functions", "null", "--reward.verifiers", "{math: true}"],
            "set reward.accuracy, or eval.problems to 0",
        ),
        (
            [
                "--eval.problems",
                "0",
                "--reward.functions",
                "[{use: 'forge_weaver:Ensemble', path: x, form: threshold, threshold: 2.0}]",
            ],
            "threshold above 0 and at most 1",
        ),
        (["--reward.verifiers", "{judge: x}"], "unknown key 'reward.verifiers.judge'; did you mean 'judges'"),
        (["--reward.verifiers", "{judges: [{url: a, model: b, no: x}]}"], r"judges\[0\].False'.*quote the key"),
    ],
)
def test_invalid_setting_combination_raises_one_line_error(config, overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(config, *overrides)
    assert "\n" not in str(caught.value)


def test_configured_verifiers_replace_default_reward_functions(config):
    """The truth must not leak into a reward that is to do without."""
    assert read(config).reward.settings()["functions"] == ["MathReward"]
    alone = ("--reward.accuracy", "ExactMatch", "--reward.verifiers", "{reward_models: [{path: x}]}")
    assert read(config, *alone).reward.settings()["functions"] == []
    assert read(config, *alone, "--reward.functions", "[ThinkingReward]").reward.settings()["functions"] == [
        "ThinkingReward"
    ]


def test_algorithm_receives_only_explicitly_set_settings(config):
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


def test_unreadable_config_files_raise(config, tmp_path):
    with pytest.raises(ConfigError, match=r"run2.yaml does not exist; did you mean .*run.yaml"):
        read(tmp_path / "run2.yaml")
    with pytest.raises(ConfigError, match="--config FILE is missing"):
        load(RLConfig, [])
    config.write_text("model: [1, 2")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        read(config)
    config.write_text("seed: 3")
    with pytest.raises(ConfigError, match="'dataset' must be set"):
        read(config)


@pytest.mark.parametrize("path", sorted(ROOT.glob("apps/*/*.yaml")), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_shipped_configs_load_and_round_trip_through_yaml(path):
    warm_ups = dict.fromkeys(("warmup", "arithmetic_sft", "repair_warmup"), SFTConfig)
    trained = dict.fromkeys(("grpo", "qwen3_8b_grpo", "qwen3_32b_grpo"), RLConfig)
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


def test_config_lists_of_sections_are_validated_and_round_trip():
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


def test_invalid_config_sections_built_in_python_raise():
    with pytest.raises(ConfigError, match=r"^unknown key 'widht'; did you mean 'width'"):
        Shelf(name="low", widht=2.0)
    with pytest.raises(ConfigError, match=r"^width must be a number, got 'wide'$"):
        Shelf(name="low", width="wide")
    with pytest.raises(ConfigError, match=r"^slots must be at least 1, got 0$"):
        EngineSettings(slots=0)


@cache
def names_in_code():
    """The names that the code reads, and those of sections that it unpacks."""
    read_names: set[str] = set()
    unpacked: set[str] = set()
    for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("apps/**/*.py")]:
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
def test_every_config_key_is_read_in_code(cls):
    """A key that nothing reads would be a setting that silently does nothing."""
    read_names, unpacked = names_in_code()

    def check(section, where):
        for name, field in section.model_fields.items():
            # A section that is unpacked into a function's arguments has every key checked by Python itself.
            assert name in read_names or {where, section.__name__} & unpacked, f"nothing reads {where}.{name}"
            if (nested := section_in(field.annotation)) is not None:
                check(nested, name)

    check(cls, "")


@pytest.mark.parametrize("moment", ["2027-01-31 08:00:00", "2027-01-31T08:00:00Z", "2027-01-31", "2027-01-31T08:00"])
def test_dates_in_config_yaml_are_read_as_text(config, moment):
    config.write_text(f"{config.read_text()}\ncheckpoint: {{every: 1}}\n")
    assert read(config, "--run.save_before", moment).run.save_before == moment
    with pytest.raises(ConfigError, match=r"run\.save_before must be a number of seconds or a date and time"):
        read(config, "--run.save_before", "1:30:00")
    with pytest.raises(ConfigError, match=r"training\.batch_size must be a whole number, got '1:30'"):
        read(config, "--training.batch_size", "1:30")
