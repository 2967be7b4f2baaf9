"""The rules of a configuration that concern several sections; the error of a broken one names the fault and the fix.

A section checks by itself what concerns only it; `forge.recipes.prepare` checks models and data. A setting that nothing
reads, given the values of the others, is only a warning: `unused_keys` lists it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..algorithms.base import Algorithm, OwnLoss
from ..config.sections import ConfigError
from ..runtime.controller import Options
from ..training.settings import Parallelism

if TYPE_CHECKING:
    from .rl_config import RLConfig
    from .schema import TrainingRecipe

# (whether a configuration breaks the rule, the message of its error)
Rule = tuple[Callable[[Any], object], str | Callable[[Any], str]]


def check_rules(rules: Iterable[Rule], config: object) -> None:
    """Check all rules in order.

    Args:
        config: what the functions of the rules take, such as a recipe's configuration.

    Raises:
        ConfigError: the message of the first rule that is broken.
    """
    for is_broken, message in rules:
        if is_broken(config):
            raise ConfigError(message if isinstance(message, str) else message(config))


def unused_keys(conditions: Mapping[str, bool], cfg: Any) -> list[str]:
    """Return the dotted keys that are set although nothing reads them.

    Args:
        conditions: {dotted key: whether nothing reads it in this configuration}.
    """
    return [key for key, is_unused in conditions.items() if is_unused and is_set(cfg, key)]


def is_set(cfg: Any, key: str) -> bool:
    """Return whether the value of a dotted key, such as "grpo.horizon", differs from its default; False for a key that
    this configuration does not have."""
    *sections, name = key.split(".")
    for section in sections:
        cfg = getattr(cfg, section, None)
    field = type(cfg).model_fields.get(name) if cfg is not None else None
    return field is not None and getattr(cfg, name) != field.get_default(call_default_factory=True)


# What a trainer at an address decides itself: its precision, memory, placement and kind of optimizer.
LOCAL_KEYS = (
    *("lora.alpha", "lora.targets", "lora.quantize", "colocated", "critic", "models"),
    *(f"training.{name}" for name in ("optimizer", "optimizer_dtype", "dtype", "weights_dtype", "exact", "compile")),
    *(f"training.{name}" for name in ("cpu_offload", "gradient_checkpointing", "gradient_accumulation_steps")),
    *("training.deterministic", "training.router_aux_loss", "training.entropy_coef", "grpo.stop"),
    *(f"parallelism.{name}" for name in Parallelism.model_fields),
    *("services.trainer.procs", "services.trainer.with_gpus", "services.trainer.hosts", "dataset.images_field"),
)

RECIPE_RULES: list[Rule] = [
    (
        lambda cfg: cfg.trainer.backend == "tinker" and cfg.lora is None,
        "trainer.backend tinker trains adapters, not all weights: set lora, for example to {rank: 16}",
    ),
    (
        lambda cfg: cfg.trainer.backend == "tinker" and any(is_set(cfg, key) for key in LOCAL_KEYS),
        lambda cfg: f"{next(key for key in LOCAL_KEYS if is_set(cfg, key))} is not for trainer.backend tinker: omit it",
    ),
    (
        lambda cfg: cfg.dataset.images_field and cfg.engine is not None and cfg.engine.engine == "vllm",
        "dataset.images_field needs generator.engine embedded: vLLM gets no images yet",
    ),
    (
        lambda cfg: cfg.dataset.images_field and cfg.dataset.kind == "preferences",
        "dataset.images_field is of prompts and SFT: preferences have no images yet",
    ),
    (
        lambda cfg: cfg.training.exact and cfg.lora and (cfg.training.dtype != "float32" or cfg.lora.quantize),
        "training.exact trains adapters in float32 only, over weights that are not quantized: omit training.dtype and "
        "lora.quantize",
    ),
    (
        lambda cfg: (
            cfg.training.exact
            and (
                cfg.trainer.backend != "fsdp"
                or cfg.services.trainer.with_gpus
                or cfg.parallelism.tensor_parallel_degree * cfg.parallelism.context_parallel_degree != 1
            )
        ),
        "training.exact is for CPUs, trainer.backend fsdp and ranks that divide the batch only",
    ),
    (
        lambda cfg: (cfg.model is None) == (cfg.from_scratch is None),
        "set either model (a folder or hub id) or from_scratch (a small model made from the seed)",
    ),
    (
        lambda cfg: cfg.metrics.profile is not None and {*cfg.metrics.profile.services} - {*cfg.configured()},
        lambda cfg: f"metrics.profile.services: choose from {', '.join(cfg.configured())}",
    ),
    (
        lambda cfg: cfg.run.save_before is not None and not cfg.checkpoint.every,
        "run.save_before needs checkpoints: set checkpoint.every",
    ),
    (
        lambda cfg: (
            cfg.trainer.backend == "titan" and (cfg.lora is not None or cfg.training.weights_dtype != "float32")
        ),
        "trainer.backend titan trains all weights, in float32: omit lora and training.weights_dtype, or set fsdp",
    ),
    (
        lambda cfg: cfg.trainer.backend == "fsdp" and cfg.parallelism.expert_parallel_degree != 1,
        "parallelism.expert_parallel_degree needs trainer.backend titan",
    ),
    (
        lambda cfg: cfg.trainer.backend == "fsdp" and cfg.parallelism.pipeline_parallel_degree != 1,
        "parallelism.pipeline_parallel_degree needs trainer.backend titan",
    ),
    (
        lambda cfg: cfg.lora is not None and cfg.lora.quantize and cfg.parallelism.tensor_parallel_degree != 1,
        "lora.quantize has no tensor parallelism: set parallelism.tensor_parallel_degree to 1",
    ),
]


class PlacedService(NamedTuple):
    """A service of a recipe with its placement options: the subject of SERVICE_RULES."""

    cfg: "TrainingRecipe"
    name: str
    options: Options

    @property
    def trains(self) -> bool:
        """Return whether the service holds an optimiser: it may have several ranks, but only one replica."""
        return self.name in ("trainer", "critic")

    def differing_option(self) -> str | None:
        """Return the name of the first process option in which the service differs from the trainer; None if it does
        not, so that both can share processes."""
        trainer = self.cfg.services.trainer
        return next((key for key in ("with_gpus", "threads", "env") if self.options[key] != trainer[key]), None)


SERVICE_RULES: list[Rule] = [
    (
        lambda service: (
            service.options.procs != 1 and not service.trains and service.name not in ("generator", "ref_model")
        ),
        lambda service: f"services.{service.name}.procs must be 1: scale it with num_replicas",
    ),
    (
        lambda service: (
            service.options.num_replicas != 1 and (service.trains or service.name in ("replay_buffer", "dataset"))
        ),
        lambda service: f"services.{service.name}.num_replicas must be 1: its state cannot be split",
    ),
]

# `colocated`: services that live in the trainer's processes and take turns on its devices.
COLOCATED_SERVICE_RULES: list[Rule] = [
    (
        lambda service: service.differing_option(),
        lambda service: (
            f"services.{service.name}.{service.differing_option()} must be the trainer's, in whose processes it lives"
        ),
    ),
    (
        lambda service: service.name == "generator" and service.options.procs != 1,
        "a generator has one process: set services.generator.procs to 1",
    ),
    (
        lambda service: (service.options.share, service.options.hosts) != (None, None),
        lambda service: f"services.{service.name} lives in the trainer's processes: omit share and hosts",
    ),
]

SAMPLING_RULES: list[Rule] = [
    (
        lambda cfg: (cfg.generator.engine == "tinker") != (cfg.trainer.backend == "tinker"),
        "trainer.backend tinker trains and samples at one server: omit generator.engine, and set the backend for it",
    ),
    (
        lambda cfg: (
            cfg.training.exact
            and (
                cfg.generator.engine != "embedded"
                or cfg.services.generator.with_gpus
                or cfg.generator.dtype != cfg.training.dtype
            )
        ),
        "training.exact needs generator.engine embedded, on a CPU, and the same value of generator.dtype and "
        "training.dtype",
    ),
    (
        lambda cfg: cfg.eval.problems and not cfg.reward.decides,
        "nothing decides which answers of an evaluation are right: set reward.accuracy, or eval.problems to 0",
    ),
    (
        lambda cfg: cfg.generator.cuda_graphs and not cfg.services.generator.with_gpus,
        "generator.cuda_graphs captures steps of a GPU, and services.generator has no GPUs: omit it, or set with_gpus",
    ),
]

COLOCATED_RULES: list[Rule] = [
    (
        lambda cfg: cfg.services.generator.num_replicas > cfg.services.trainer.procs,
        "services.generator.num_replicas is more than services.trainer.procs: a device has room for one generator",
    ),
    (
        lambda cfg: cfg.shares_device("ref_model") and cfg.services["ref_model"].procs > 1,
        "a reference model has one process: set services.ref_model.procs to 1",
    ),
    (
        lambda cfg: cfg.shares_device("critic") and cfg.services.trainer.procs > 1,
        "a critic of several ranks cannot live in the trainer's processes: set services.trainer.procs to 1",
    ),
    (
        lambda cfg: cfg.training.cpu_offload,
        "between steps everything is in host memory already: omit training.cpu_offload",
    ),
    (
        lambda cfg: cfg.generator.engine == "vllm" and cfg.services.trainer.procs > 1,
        "generator.engine vllm takes one device: set services.trainer.procs to 1, or choose embedded",
    ),
]

# Recipes that learn from fixed data.
OFFLINE_RULES: list[Rule] = [
    (
        lambda cfg: cfg.training.aggregation == "fixed_horizon",
        "training.aggregation fixed_horizon is for sampled completions: use one of the means",
    ),
]


class RLFacts(NamedTuple):
    """A configuration of the RL recipe with values that follow from it: the subject of RL_RULES."""

    cfg: "RLConfig"
    algorithm: Algorithm
    aggregation: str
    updates: int  # optimizer updates of a step
    interval: int  # steps between two weight updates of the generators
    age: int  # maximum age of a trained token, in policy versions

    @property
    def has_idle_kl(self) -> bool:
        """Return whether `grpo.beta` has no effect: the KL is to the sampler's weights, which are those in training."""
        has_kl = self.algorithm.beta > 0 and not isinstance(self.algorithm, OwnLoss)
        is_to_sampler = has_kl and self.cfg.services.ref_model is None
        # In the loss the KL has an effect once weights differ from the sampler's: with older samples or later updates.
        return is_to_sampler and (self.algorithm.kl_in == "reward" or (self.age == 0 and self.updates == 1))

    def unused(self) -> list[str]:
        """Return the dotted keys of the RL recipe that are set although nothing reads them."""
        cfg, algorithm = self.cfg, self.algorithm
        correction = cfg.grpo.correction or "none"
        no_reference = not algorithm.needs_reference
        no_penalty = not algorithm.uses_rewards or cfg.multi_turn
        conditions = {
            "critic": not algorithm.needs_critic,
            "services.critic": not algorithm.needs_critic,
            "services.ref_model": no_reference,
            "grpo.reference": no_reference,
            "grpo.horizon": self.aggregation != "fixed_horizon",
            "grpo.overlong_buffer": no_penalty,
            "grpo.correction_low": correction != "mask",
            "grpo.correction_high": correction == "none",
            "grpo.correction_level": correction == "none",
            "reward": cfg.multi_turn,
            "services.reward": cfg.multi_turn,
            "episode": not cfg.multi_turn,
            "models": cfg.episode.agent is None,
        }

        return unused_keys(conditions, cfg)


RL_RULES: list[Rule] = [
    (
        lambda rl: rl.cfg.trainer.backend == "tinker" and rl.algorithm.needs_critic,
        "algorithm needs a critic, which trainer.backend tinker does not have: choose another algorithm",
    ),
    (  # A server's log-probabilities are of temperature 1 and all tokens.
        lambda rl: rl.cfg.trainer.backend == "tinker" and (rl.cfg.grpo.temperature != 1 or rl.cfg.grpo.excluding),
        "trainer.backend tinker: set grpo.temperature to 1, and omit top_p, top_k and repetition_penalty",
    ),
    (
        lambda rl: rl.cfg.trainer.backend == "tinker" and {"stop", "repetition_penalty"} & {*rl.cfg.eval.sampling},
        "eval.sampling: a server of trainer.backend tinker has neither stop nor repetition_penalty: omit them",
    ),
    (
        lambda rl: rl.cfg.trainer.backend == "tinker" and getattr(rl.algorithm, "entropy_coef", 0),
        "grpo.loss.entropy_coef: trainer.backend tinker gets no gradient of the entropy: omit it",
    ),
    (
        lambda rl: rl.cfg.grpo.n_samples < 2 and rl.algorithm.within_group,
        lambda rl: (
            f"grpo.n_samples must be at least 2: {rl.cfg.algorithm} compares the samples of a prompt with one another, "
            "and one sample has nothing to be compared with"
        ),
    ),
    (
        lambda rl: rl.cfg.generator.engine == "vllm" and rl.cfg.grpo.excluding and (rl.age or rl.algorithm.beta),
        lambda rl: (
            f"grpo.{rl.cfg.grpo.excluding[0]} with vLLM, which has no log-probabilities of what it excludes: the "
            "trainer's stand for them, so set async.max_policy_age and grpo.beta to 0, or generator.engine to embedded"
        ),
    ),
    (
        lambda rl: rl.cfg.colocated and rl.age != 0,
        "colocated: trainer and generator take turns, so async.max_policy_age must be 0",
    ),
    (
        lambda rl: rl.cfg.grpo.max_tokens >= rl.cfg.training.seq_len,
        "training.seq_len must exceed grpo.max_tokens",
    ),
    (
        lambda rl: rl.age < rl.interval - 1,
        lambda rl: (
            f"training.sync_interval = {rl.interval} makes weights older than async.max_policy_age = {rl.age} allows: "
            f"raise it to at least {rl.interval - 1}"
        ),
    ),
    (
        lambda rl: rl.algorithm.fixed_aggregation and rl.aggregation != rl.algorithm.aggregation,
        lambda rl: f"{rl.cfg.algorithm} means something under training.aggregation {rl.algorithm.aggregation} only",
    ),
    (
        lambda rl: rl.algorithm.on_policy and rl.updates > 1,
        lambda rl: (
            f"{rl.cfg.algorithm} takes every sample as the policy's own, which holds for the first update of a step "
            "only: set grpo.clip_ratio or grpo.correction, or make one update"
        ),
    ),
    (
        lambda rl: rl.cfg.reward.gives_steps and not rl.algorithm.needs_critic,
        lambda rl: (
            f"reward.functions rewards steps, and {rl.cfg.algorithm} sees only their sum: use algorithm ppo, whose "
            "critic assigns them"
        ),
    ),
    (
        lambda rl: rl.cfg.dataset.sampler is not None and not rl.cfg.reward.decides,
        "nothing decides which answers are right, by which dataset.sampler chooses rows: set reward.accuracy",
    ),
    (
        lambda rl: rl.cfg.grpo.overlong_buffer >= rl.cfg.grpo.max_tokens,
        "grpo.overlong_buffer must be below grpo.max_tokens",
    ),
    (
        lambda rl: rl.has_idle_kl,
        "grpo.beta does nothing: without services.ref_model the KL is to the weights that sampled, which are those in "
        "training; set services.ref_model to {} for a frozen reference, on the CPU unless it has GPUs",
    ),
    (
        lambda rl: rl.algorithm.needs_teacher and rl.cfg.grpo.reference is None,
        lambda rl: f"algorithm {rl.cfg.algorithm} needs grpo.reference: the teacher's folder or hub id",
    ),
]

MULTI_TURN_RULES: list[Rule] = [
    (
        lambda cfg: bool(cfg.models) and cfg.colocated,
        "models does not work with colocated: additional models have separate processes",
    ),
    (
        lambda cfg: cfg.dataset.images_field and (cfg.environment is not None or cfg.episode.agent is not None),
        "dataset.images_field is of prompts that one answer follows: omit it, or environment and episode.agent",
    ),
    (
        lambda cfg: cfg.environment is not None and cfg.episode.agent is not None,
        "environment and episode.agent both play the episodes: set one of them",
    ),
    (
        lambda cfg: (cfg.episode.max_tokens or 0) > cfg.training.seq_len,
        lambda cfg: f"episode.max_tokens must be at most training.seq_len = {cfg.training.seq_len}",
    ),
    (
        lambda cfg: cfg.dataset.chat_template,
        "dataset.chat_template must be false: episode.template makes the tokens",
    ),
]

SFT_RULES: list[Rule] = [
    (
        lambda cfg: cfg.generates and cfg.reward.required_columns,
        lambda cfg: (
            f"the reward takes the column {cfg.reward.required_columns[0]!r}, which answers here do not have: "
            "name prompt, response and target only, or set eval.accuracy to false"
        ),
    ),
]
