"""The rules that a configuration must keep, in one place: for each, when it is broken, the fault and the remedy.

They concern several sections of a recipe; what concerns one section alone is checked by that section. The models and
data that a configuration names are checked by `forge.recipes.prepare`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from ..algorithms.base import Algorithm, OwnLoss
from ..config.sections import ConfigError, Section
from ..runtime.controller import Options

if TYPE_CHECKING:
    from .distill_config import DistillConfig
    from .rl_config import RLConfig
    from .schema import RecipeConfig, TrainingRecipe
    from .sft_config import SFTConfig

C = TypeVar("C")


@dataclass(frozen=True)
class ConfigRule(Generic[C]):
    """One rule. `fault` and `remedy` are made only where it is broken."""

    is_broken: Callable[[C], object]
    fault: str | Callable[[C], str]
    remedy: str | Callable[[C], str] = ""

    def message(self, config: C) -> str:
        """The error of one line: the fault, and what to do."""
        fault = self.fault if isinstance(self.fault, str) else self.fault(config)
        remedy = self.remedy if isinstance(self.remedy, str) else self.remedy(config)
        return f"{fault}: {remedy}" if remedy else fault


def check(rules: Iterable[ConfigRule[C]], config: C) -> None:
    """ConfigError: the message of the first rule that is broken."""
    for rule in rules:
        if rule.is_broken(config):
            raise ConfigError(rule.message(config))


def is_set(section: Section | None) -> bool:
    """Whether a section differs from its type's defaults, as one that is null does."""
    return section is None or section != type(section)()


RECIPE_RULES: list[ConfigRule[TrainingRecipe]] = [
    ConfigRule(
        lambda cfg: (cfg.model is None) == (cfg.from_scratch is None),
        "set either model (a folder or hub id) or from_scratch (a small model made from the seed)",
    ),
    ConfigRule(
        lambda cfg: unknown_profiles(cfg),
        lambda cfg: f"metrics.profile.services: {unknown_profiles(cfg)[0]!r} is none of {', '.join(cfg.configured())}",
    ),
    ConfigRule(
        lambda cfg: cfg.run.save_before is not None and not cfg.checkpoint.every,
        "run.save_before needs checkpoints",
        "set checkpoint.every",
    ),
    ConfigRule(
        lambda cfg: cfg.training.deterministic and not cfg.services.trainer.with_gpus,
        "training.deterministic does nothing: services.trainer has no GPUs (with_gpus), and a CPU repeats its bits",
        "omit it",
    ),
    ConfigRule(
        lambda cfg: (
            cfg.trainer.backend == "titan" and (cfg.lora is not None or cfg.training.weights_dtype != "float32")
        ),
        "trainer.backend titan trains all weights, in float32",
        "omit lora and training.weights_dtype, or set trainer.backend to fsdp",
    ),
    ConfigRule(
        lambda cfg: cfg.trainer.backend == "fsdp" and cfg.parallelism.expert_parallel_degree != 1,
        "parallelism.expert_parallel_degree does nothing with trainer.backend fsdp",
        "set titan",
    ),
    ConfigRule(
        lambda cfg: cfg.training.optimizer == "adamw8bit" and cfg.parallelism.tensor_parallel_degree > 1,
        "training.optimizer adamw8bit does not support parallelism.tensor_parallel_degree, as its state cannot be "
        "divided by columns",
        "raise data_parallel_shard_degree",
    ),
]


def unknown_profiles(cfg: TrainingRecipe) -> list[str]:
    """Services that `metrics.profile` names and the run does not have."""
    profile = cfg.metrics.profile
    return [] if profile is None else sorted({*profile.services} - {*cfg.configured()})


class PlacedService(NamedTuple):
    """A service of a recipe and its options."""

    cfg: TrainingRecipe
    name: str
    options: Options

    @property
    def trains(self) -> bool:
        """Whether it holds an optimiser, and so may have several ranks and no replicas."""
        return self.name in ("trainer", "critic")

    @property
    def trainer(self) -> Options:
        """The options of the trainer, whose processes the service shares with `colocated`."""
        return self.cfg.services.trainer

    def conflict(self) -> str:
        """How it differs from the trainer in an option of processes, which both share; empty if it does not."""
        for key in ("with_gpus", "gpus_per_proc", "threads", "env", "memory_gb", "ping_timeout"):
            if self.options[key] != self.trainer[key]:
                value = f"services.{self.name}.{key} = {self.options[key]!r}"
                return f"{value}, and it lives in the trainer's processes, with {self.trainer[key]!r}"
        return ""


SERVICE_RULES: list[ConfigRule[PlacedService]] = [
    ConfigRule(
        lambda service: (
            service.options.procs != 1 and not service.trains and service.name not in ("generator", "ref_model")
        ),
        lambda service: f"services.{service.name}.procs must be 1",
        "scale it with num_replicas",
    ),
    ConfigRule(
        lambda service: (
            service.options.num_replicas != 1 and (service.trains or service.name in ("replay_buffer", "dataset"))
        ),
        lambda service: f"services.{service.name}.num_replicas must be 1",
        "its state cannot be split",
    ),
    ConfigRule(
        lambda service: (
            service.trains
            and service.name not in service.cfg.idle
            and service.cfg.training.cpu_offload
            and not service.options.with_gpus
        ),
        "training.cpu_offload does nothing",
        lambda service: f"services.{service.name} has no GPUs (with_gpus)",
    ),
]

# `colocated`: services that live in the trainer's processes and take turns on its devices.
COLOCATED_SERVICE_RULES: list[ConfigRule[PlacedService]] = [
    ConfigRule(
        lambda service: service.conflict(),
        lambda service: service.conflict(),
    ),
    ConfigRule(
        lambda service: service.name == "generator" and service.options.procs != 1,
        "a generator has one process",
        "set services.generator.procs to 1",
    ),
    ConfigRule(
        lambda service: (service.options.share, service.options.hosts, service.options.per_process) != (None, None, 1),
        lambda service: f"services.{service.name} lives in the trainer's processes",
        "omit share, hosts and per_process",
    ),
]

# Recipes that learn from fixed data: settings that concern sampling do nothing there.
OFFLINE_RULES: list[ConfigRule[TrainingRecipe]] = [
    ConfigRule(
        lambda cfg: cfg.training.sync_interval != 1 or cfg.training.entropy_coef,
        "training.sync_interval and training.entropy_coef do nothing in this recipe",
    ),
    ConfigRule(
        lambda cfg: cfg.training.aggregation == "fixed_horizon",
        "training.aggregation fixed_horizon is for sampled completions",
        "use one of the means",
    ),
]

SAMPLING_RULES: list[ConfigRule[RecipeConfig]] = [
    ConfigRule(
        lambda cfg: cfg.eval.problems and not cfg.reward.decides,
        "nothing decides which answers of an evaluation are right",
        "set reward.accuracy, or eval.problems to 0",
    ),
    ConfigRule(
        lambda cfg: cfg.generator.cuda_graphs and not cfg.services.generator.with_gpus,
        "generator.cuda_graphs does nothing: services.generator has no GPUs (with_gpus)",
        "omit it",
    ),
]

COLOCATED_RULES: list[ConfigRule[RecipeConfig]] = [
    ConfigRule(
        lambda cfg: cfg.services.generator.num_replicas > cfg.services.trainer.procs,
        lambda cfg: (
            f"services.generator.num_replicas = {cfg.services.generator.num_replicas} is more than the trainer's procs "
            f"= {cfg.services.trainer.procs}"
        ),
        "a device has room for one generator",
    ),
    ConfigRule(
        lambda cfg: cfg.shares_device("ref_model") and cfg.services["ref_model"].procs > 1,
        "a reference model has one process",
        "set services.ref_model.procs to 1",
    ),
    ConfigRule(
        lambda cfg: cfg.shares_device("critic") and cfg.services.trainer.procs > 1,
        "a critic of several ranks cannot live in the trainer's processes",
        "set services.trainer.procs to 1",
    ),
    ConfigRule(
        lambda cfg: cfg.training.cpu_offload,
        "between steps everything is in host memory already",
        "omit training.cpu_offload",
    ),
    ConfigRule(
        lambda cfg: cfg.generator.engine == "vllm" and cfg.services.trainer.procs > 1,
        "generator.engine vllm takes one device",
        "set services.trainer.procs to 1, or choose embedded",
    ),
]


class RLFacts(NamedTuple):
    """A configuration of the RL recipe, with what its rules derive from it."""

    cfg: RLConfig
    algorithm: Algorithm
    aggregation: str

    @property
    def updates(self) -> int:
        """Optimiser updates of a step."""
        return self.cfg.training.mini_batches * self.cfg.training.epochs

    @property
    def interval(self) -> int:
        """Steps between two weight updates of the generators."""
        return self.cfg.training.sync_interval

    @property
    def age(self) -> int:
        """Versions that a trained token may be old."""
        return self.cfg.max_policy_age

    @property
    def correction(self) -> str:
        """How the trained policy over the sampler weights a token: "none", "truncate" or "mask"."""
        return self.cfg.grpo.correction or "none"

    @property
    def kl_to_sampler(self) -> bool:
        """Whether the KL is to the log-probabilities that the generator recorded."""
        regularised = self.algorithm.beta > 0 and not isinstance(self.algorithm, OwnLoss)
        return regularised and self.cfg.services.ref_model is None


RL_RULES: list[ConfigRule[RLFacts]] = [
    ConfigRule(
        lambda rl: rl.cfg.grpo.n_samples < 2 and rl.algorithm.within_group,
        "grpo.n_samples must be at least 2",
        lambda rl: (
            f"{rl.cfg.algorithm} compares the samples of a prompt with one another, and one sample has nothing to be "
            "compared with"
        ),
    ),
    ConfigRule(
        lambda rl: rl.cfg.generator.engine == "vllm" and rl.cfg.grpo.excluding and (rl.age or rl.algorithm.beta),
        lambda rl: f"grpo.{rl.cfg.grpo.excluding[0]} with vLLM, which has no log-probabilities of what it excludes",
        "the trainer's stand for them, so set async.max_policy_age and grpo.beta to 0, or generator.engine to embedded",
    ),
    ConfigRule(
        lambda rl: rl.cfg.colocated and rl.age != 0,
        "colocated",
        "trainer and generator take turns, so async.max_policy_age must be 0",
    ),
    ConfigRule(
        lambda rl: rl.cfg.grpo.max_tokens >= rl.cfg.training.seq_len,
        "training.seq_len must exceed grpo.max_tokens",
    ),
    ConfigRule(
        lambda rl: rl.age < rl.interval - 1,
        lambda rl: (
            f"training.sync_interval = {rl.interval} makes weights older than async.max_policy_age = {rl.age} allows"
        ),
        lambda rl: f"raise it to at least {rl.interval - 1}",
    ),
    ConfigRule(
        lambda rl: rl.cfg.grpo.horizon is not None and rl.aggregation != "fixed_horizon",
        "grpo.horizon does something under aggregation fixed_horizon only",
        lambda rl: f"this is {rl.aggregation}",
    ),
    ConfigRule(
        lambda rl: rl.algorithm.fixed_aggregation and rl.aggregation != rl.algorithm.aggregation,
        lambda rl: f"{rl.cfg.algorithm} means something under training.aggregation {rl.algorithm.aggregation} only",
    ),
    ConfigRule(
        lambda rl: rl.algorithm.on_policy and rl.updates > 1,
        lambda rl: (
            f"{rl.cfg.algorithm} takes every sample as the policy's own, which holds for the first update of a step "
            "only"
        ),
        "set grpo.clip_ratio or grpo.correction, or make one update",
    ),
    ConfigRule(
        lambda rl: not rl.algorithm.beta and {"kl", "kl_in"} & rl.cfg.grpo.settings().keys(),
        "grpo.kl and grpo.kl_in do nothing",
        "grpo.beta is 0",
    ),
    ConfigRule(
        lambda rl: not rl.algorithm.uses_rewards and rl.cfg.grpo.overlong_buffer > 0,
        "grpo.overlong_buffer does nothing",
        lambda rl: f"{rl.cfg.algorithm} does not look at rewards",
    ),
    ConfigRule(
        lambda rl: rl.cfg.reward.gives_steps and not rl.algorithm.needs_critic,
        lambda rl: f"reward.functions rewards steps, and {rl.cfg.algorithm} sees only their sum",
        "use algorithm ppo, whose critic assigns them",
    ),
    ConfigRule(
        lambda rl: rl.cfg.grpo.overlong_buffer >= rl.cfg.grpo.max_tokens,
        "grpo.overlong_buffer must be below grpo.max_tokens",
    ),
    ConfigRule(
        lambda rl: not rl.algorithm.needs_reference and rl.cfg.grpo.reference is not None,
        "grpo.reference is set and nothing uses it",
        "grpo.beta is 0",
    ),
    ConfigRule(
        lambda rl: not rl.algorithm.needs_reference and rl.cfg.services.ref_model is not None,
        "services.ref_model is set and nothing uses it",
        "grpo.beta is 0",
    ),
    ConfigRule(
        lambda rl: rl.kl_to_sampler and (rl.algorithm.kl_in == "reward" or (rl.age == 0 and rl.updates == 1)),
        "grpo.beta does nothing",
        "without services.ref_model the KL is to the weights that sampled, which are those in training; set "
        "services.ref_model to {} for a frozen reference, on the CPU unless it has GPUs",
    ),
    ConfigRule(
        lambda rl: rl.algorithm.needs_teacher and rl.cfg.grpo.reference is None,
        lambda rl: f"algorithm {rl.cfg.algorithm} needs grpo.reference",
        "the teacher's folder or hub id",
    ),
    ConfigRule(
        lambda rl: not rl.algorithm.needs_critic and (is_set(rl.cfg.critic) or is_set(rl.cfg.services.critic)),
        "critic or services.critic is set and nothing uses it",
        lambda rl: f"{rl.cfg.algorithm} has no critic",
    ),
    ConfigRule(
        lambda rl: rl.correction != "mask" and rl.cfg.grpo.differs("correction_low"),
        "grpo.correction_low does something only if grpo.correction is mask",
    ),
    ConfigRule(
        lambda rl: rl.correction == "none" and rl.cfg.grpo.differs("correction_high", "correction_level"),
        "grpo.correction_high and grpo.correction_level do nothing",
        "grpo.correction is not set",
    ),
]

SINGLE_TURN_RULES: list[ConfigRule[RLConfig]] = [
    ConfigRule(lambda cfg: bool(cfg.models), "models does nothing", "no agent asks for them: episode.agent is not set"),
    ConfigRule(lambda cfg: is_set(cfg.episode), "episode does nothing", "neither environment nor episode.agent is set"),
]

MULTI_TURN_RULES: list[ConfigRule[RLConfig]] = [
    ConfigRule(
        lambda cfg: bool(cfg.models) and cfg.episode.agent is None,
        "models does nothing with an environment",
        "only agents of episode.agent ask for models by their names",
    ),
    ConfigRule(
        lambda cfg: bool(cfg.models) and cfg.colocated,
        "models does not work with colocated",
        "further models have separate processes",
    ),
    ConfigRule(
        lambda cfg: cfg.environment is not None and cfg.episode.agent is not None,
        "environment and episode.agent both play the episodes",
        "set one of them",
    ),
    ConfigRule(
        lambda cfg: (cfg.episode.max_tokens or 0) > cfg.training.seq_len,
        lambda cfg: f"episode.max_tokens must be at most training.seq_len = {cfg.training.seq_len}",
    ),
    ConfigRule(
        lambda cfg: is_set(cfg.reward),
        "reward does nothing",
        lambda cfg: (
            "the environment scores" if cfg.episode.agent is None else "episode.agent.reward or its test scores"
        ),
    ),
    ConfigRule(
        lambda cfg: cfg.services.reward != Options(),
        "services.reward does nothing",
        "the environment scores",
    ),
    ConfigRule(
        lambda cfg: cfg.grpo.overlong_buffer != 0,
        "grpo.overlong_buffer does nothing",
        "an episode's length is not that of an answer",
    ),
    ConfigRule(
        lambda cfg: cfg.dataset.chat_template,
        "dataset.chat_template must be false",
        "episode.template makes the tokens",
    ),
]

SFT_RULES: list[ConfigRule[SFTConfig]] = [
    ConfigRule(
        lambda cfg: cfg.colocated,
        "colocated does nothing in this recipe",
        "evaluation is the only time that it generates",
    ),
    ConfigRule(
        lambda cfg: (
            not cfg.generates
            and any(map(is_set, (cfg.reward, cfg.generator, cfg.serve, cfg.services.reward, cfg.services.generator)))
        ),
        "reward, generator and serve do nothing",
        "eval.accuracy is false, or eval.problems 0",
    ),
    ConfigRule(
        lambda cfg: not cfg.generates and cfg.eval.differs("stop_at", "max_tokens"),
        "eval.stop_at and eval.max_tokens do nothing",
        "eval.accuracy is false, or eval.problems 0",
    ),
    ConfigRule(
        lambda cfg: cfg.generates and cfg.reward.required_columns,
        lambda cfg: f"the reward takes the column {cfg.reward.required_columns[0]!r}, which answers here do not have",
        "name prompt, response and target alone, or set eval.accuracy to false",
    ),
    ConfigRule(
        lambda cfg: cfg.generates and cfg.reward.beyond_accuracy,
        "reward.functions beyond the first and reward.verifiers do nothing here",
        "answers are right by one function",
    ),
]

DISTILL_RULES: list[ConfigRule[DistillConfig]] = [
    ConfigRule(
        lambda cfg: cfg.training.seq_len <= cfg.distill.max_tokens,
        "training.seq_len must exceed distill.max_tokens",
    ),
    ConfigRule(
        lambda cfg: cfg.training.sync_interval != 1,
        "training.sync_interval does nothing in this recipe",
        "the student samples with its newest weights",
    ),
    ConfigRule(
        lambda cfg: not cfg.eval.problems and (is_set(cfg.reward) or is_set(cfg.services.reward)),
        "reward and services.reward do nothing",
        "eval.problems is 0, and the student learns from its teacher",
    ),
    ConfigRule(
        lambda cfg: cfg.reward.beyond_accuracy,
        "reward.functions beyond the first and reward.verifiers do nothing here",
        "answers are right by one function",
    ),
    ConfigRule(
        lambda cfg: cfg.dataset.sampler is not None,
        "dataset.sampler does nothing in this recipe",
        "no groups are scored that it could learn from",
    ),
]
