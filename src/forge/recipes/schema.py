"""The configuration sections that recipes share. Every key is read by something; unknown keys are errors."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

from ..config.plugin import resolve
from ..config.sections import ConfigError, Section
from ..data.config import DatasetConfig, PreferencesConfig, RowsConfig
from ..engines.interface import check_length
from ..engines.settings import EngineSettings
from ..models.architecture import max_length
from ..models.tokenizer import model_config
from ..runtime.controller import Options, Placement
from ..system import extras
from ..training.settings import Backend, LoraSettings, OptimizerSettings, Parallelism, PassSettings
from . import rules
from .eval_config import EvalConfig
from .metrics_config import MetricsConfig
from .placement import ClusterConfig
from .preemption import deadline_of
from .reward_config import RewardConfig

if TYPE_CHECKING:
    from .rl_config import RLConfig

# The services that with `colocated` live in the trainer's processes, and take turns on its devices.
TAKING_TURNS = ("trainer", "generator", "critic", "ref_model")


def sample_seed(seed: int, index: int) -> int:
    """Return the seed with which the completions of prompt `index` are sampled in a run with this `seed`.

    >>> sample_seed(7, 0), sample_seed(7, 1)
    (7, 1000010)
    """
    return seed + 1_000_003 * index


class FromScratch(Section):
    """A small Qwen3-architecture model with a character tokenizer, made from the seed."""

    alphabet: str | None = None
    """Characters of the tokenizer; null: printable ASCII."""
    hidden_size: PositiveInt = 128
    """Width; a multiple of twice `heads`."""
    layers: PositiveInt = 4
    """Decoder layers."""
    heads: PositiveInt = 4
    """Attention heads; a multiple of `kv_heads`."""
    kv_heads: PositiveInt = 2
    """Key and value heads."""
    max_positions: PositiveInt = 128
    """Longest sequence."""

    def _check(self) -> None:
        if self.hidden_size % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError("hidden_size must be a multiple of twice heads, and heads a multiple of kv_heads")


class TrainingConfig(PassSettings, OptimizerSettings):
    """One optimiser step and how many of them."""

    batch_size: PositiveInt = 4
    """Prompts of one step, each with all its samples; rows or pairs where nothing is sampled."""
    steps: PositiveInt = 1000
    """Optimiser steps of the run."""
    sync_interval: PositiveInt = 1
    """Steps between two weight updates of the generators."""
    entropy_coef: float = 0.0
    """Weight of a bonus on the policy's entropy."""
    aggregation: Literal["token_mean", "sequence_mean", "fixed_horizon"] | None = None
    """How tokens share the loss: `token_mean` (every token has the same weight), `sequence_mean` (every episode has),
    or `fixed_horizon` (a token has 1 / (episodes * horizon)); null: the algorithm's own."""


class TrainerConfig(Section):
    """Training backend: whose models and parallelism are used ([large_models.md](large_models.md))."""

    backend: Backend = "fsdp"
    """`fsdp`: transformers' models, divided by this library; `titan`: TorchTitan's (`torchtitan==0.3.0`); `tinker`: a
    Tinker server's, which also samples ([tinker.md](tinker.md#a-run-at-a-server))."""

    def check_model(self, config: Any) -> None:
        """Check that the backend trains models of this config. ValueError: it does not. ImportError: not installed."""
        if self.backend == "titan":
            resolve("forge_titan.setup:check_installed", "trainer.backend")()
            resolve("forge_titan.setup:check_model", "trainer.backend")(config)


class CheckpointConfig(Section):
    """Checkpoints of a run ([resume.md](resume.md))."""

    every: NonNegativeInt = 0
    """Steps between two checkpoints; the last step has one too. 0: none."""
    keep: PositiveInt = 2
    """How many of the newest stay."""
    async_write: bool = False
    """Copy the state in memory and write the copy while training continues; a write that fails is an error at the next
    checkpoint, or at the end."""
    push_to_hub: str | None = None
    """`owner/name`: upload the exported model there when the run ends, with a model card; a new repository is private.
    Needs a token of the hub (`hf auth login`)."""

    @property
    def remember(self) -> int:
        """Return how many of the last samples the dataset remembers, to return them again after a resume; 0 without
        checkpoints."""
        return 1 << 16 if self.every else 0

    def due(self, step: int, last: bool) -> bool:
        """Return whether a checkpoint is written after this step; `last`: the run ends with it."""
        return self.every > 0 and (last or step % self.every == 0)


class RunConfig(Section):
    """Results go to `<root>/<name>/`."""

    name: str
    """Of the run's folder."""
    root: str = "runs"
    """The folder of all runs."""
    overwrite: bool = False
    """Remove an earlier run of this name."""
    save_before: float | str | None = None
    """When the run has to have ended, as seconds from its start or as a date and time: it writes a checkpoint in time
    and exits with 75; null: the end of its Slurm job, if it has one. Needs `checkpoint.every`."""

    def _check(self) -> None:
        parts = Path(self.name).parts
        if not parts or ".." in parts:
            raise ConfigError(f"run.name is {self.name!r}: it names a folder within run.root")
        deadline_of(self.save_before)


class TrainingServices(Section):
    """Placement of the services that every recipe has."""

    trainer: Placement = Placement()
    dataset: Placement | None = None
    """Null: in the controller's process."""


class SamplingServices(TrainingServices):
    """Placement of the services of a recipe whose policy samples and is scored."""

    generator: Placement = Placement()
    reward: Placement | None = Placement()
    """Null: in the controller's process."""


class TrainingRecipe(Section):
    """Configuration of every recipe; a recipe adds its algorithm and its `services`."""

    unread: ClassVar[tuple[str, ...]] = ("training.sync_interval", "training.entropy_coef")  # keys of other recipes

    model: str | None = None
    """A folder in Hugging Face format, or a hub id."""
    from_scratch: FromScratch | None = None
    dataset: RowsConfig
    run: RunConfig = RunConfig(name="run")
    training: TrainingConfig = TrainingConfig()
    lora: LoraSettings | None = None
    trainer: TrainerConfig = TrainerConfig()
    parallelism: Parallelism = Parallelism()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()
    cluster: ClusterConfig = ClusterConfig()
    services: TrainingServices = TrainingServices()
    seed: int = 0
    """Random seed."""

    def others(self) -> dict[str, str]:
        """Return the additional models of a run as {dotted key of the configuration: folder or hub id}, such as
        {"grpo.reference": "Qwen/Qwen3-8B"}."""
        return {}

    def scalar(self, model: str) -> list[str]:
        """Return the folders or hub ids of the models that get a scalar head in a run that trains `model`."""
        return []

    @property
    def files(self) -> list[str]:
        """Return the paths and names in the configuration that may be local files which the run reads, without
        models."""
        return self.dataset.files

    @property
    def scorers(self) -> list[Any]:
        """Return the functions and plugins that score responses, constructed but not opened."""
        return []

    @property
    def engine(self) -> EngineSettings | None:
        """Return the settings of the engine that samples; None if the recipe samples nothing."""
        return None

    def shares_device(self, name: str) -> bool:
        """Return whether service `name` is started in the trainer's processes, on its devices."""
        return False

    def check_reward(self) -> None:
        """Check that the functions and files which the recipe's reward names exist. ValueError: one does not."""

    def reach(self, config: Any) -> int:
        """Return the maximum number of tokens of a trained sequence, for a model with this transformers config."""
        return min(self.training.seq_len, max_length(config))

    def check_tokenizer(self, model: str) -> None:
        """Check that the tokenizer in the folder `model` has what the recipe needs. ValueError: it has not."""

    def data(self, model: str) -> RowsConfig:
        """Return a copy of the section `dataset` whose limit of tokens is at most the longest sequence of the model in
        this folder."""
        return self.dataset.cap("max_tokens", max_length(model_config(model)))

    def placement(self, name: str) -> dict[str, Any]:
        """Return the placement options of a service, the fields of `forge.runtime.controller.Options`."""
        return {**Options(**self.services[name])}

    def unused(self) -> list[str]:
        """Return the dotted keys that are set although nothing reads them, given the values of the others."""
        conditions = {
            "checkpoint.async_write": not self.checkpoint.every,
            "eval.every": not self.eval.intervals(),
            "parallelism.pipeline_parallel_schedule": self.parallelism.pipeline_parallel_degree == 1,
            "training.cpu_offload": not self.services.trainer.with_gpus,
        }
        return rules.unused_keys(conditions | dict.fromkeys(self.unread, True), self)

    def placements(self) -> dict[str, dict[str, Any]]:
        """Return the placement options of each component by dotted setting: {"services.trainer": {"procs": 1, ...}}."""
        return {f"services.{name}": self.placement(name) for name in self.configured()}

    def _check(self) -> None:
        rules.check_rules(rules.RECIPE_RULES, self)

    def layout(self, name: str) -> Parallelism:
        """Return how service `name` divides its model over its ranks; only the trainer divides experts, or in stages.

        Unless a data-parallel degree is set, or the model is in stages, each of several hosts has a complete copy
        (HSDP): parameters are gathered within a host, and only gradients travel between hosts.
        """
        layout = self.parallelism
        if name != "trainer":
            layout = layout.model_copy(update={"expert_parallel_degree": 1, "pipeline_parallel_degree": 1})

        options = self.placement(name)
        ranks_per_copy = layout.tensor_parallel_degree * layout.context_parallel_degree
        hosts = options["hosts"] or 1
        degrees = layout.data_parallel_replicate_degree, layout.data_parallel_shard_degree, layout.stages
        if hosts == 1 or degrees != (None, -1, 1) or options["procs"] // hosts % ranks_per_copy:
            return layout
        return layout.model_copy(update={"data_parallel_replicate_degree": hosts})

    @property
    def idle(self) -> frozenset[str]:
        """Return the names of services that are configured although the recipe does not start them."""
        return frozenset()

    def configured(self) -> list[str]:
        """Return the names of the services that are not null."""
        return [name for name in type(self.services).model_fields if self.services[name] is not None]

    def service(self, name: str) -> Placement | None:
        """Return the placement of service `name`; None if it is null, or the recipe has no such service."""
        return getattr(self.services, name, None)

    def check_services(self) -> None:
        """Check the placement of all services: only those that train may have several ranks, and only those without
        state several replicas. ConfigError: one of them differs; names the setting."""
        for name in self.configured():
            service = rules.PlacedService(self, name, Options(**self.services[name]))
            rules.check_rules(rules.SERVICE_RULES, service)
            procs = service.options.procs
            if (service.trains or procs != 1) and name not in ("generator", *self.idle):
                self.layout(name).over(procs, f"services.{name}.procs = {procs}")

    def check_pairs(self, dataset: PreferencesConfig) -> None:
        """Bound `max_tokens` of a dataset of pairs by half of training.seq_len, since both answers of a pair go into
        one micro-batch. ConfigError: it is set to more."""
        half = self.training.seq_len // 2
        dataset.limit(
            "max_tokens",
            half,
            f"dataset.max_tokens must not exceed half of training.seq_len, {half}: both answers of a pair go into one "
            "micro-batch",
        )


class RecipeConfig(TrainingRecipe):
    """A recipe whose policy samples and is scored."""

    reward: RewardConfig = RewardConfig()
    generator: EngineSettings = EngineSettings()
    colocated: bool = False
    """Generators, and critic and reference model where there are any, live in the trainer's processes and take turns
    with it on the same devices ([large_models.md](large_models.md)). `async.max_policy_age` must be 0."""
    services: SamplingServices = SamplingServices()

    def placement(self, name: str) -> dict[str, Any]:
        """Return the placement options of a service; with `colocated` they put it into the trainer's processes."""
        options = super().placement(name)
        if self.colocated and name in TAKING_TURNS:
            return options | {"share": "device", "share_procs": super().placement("trainer")["procs"]}
        return options

    @property
    def engine(self) -> EngineSettings | None:
        """Return the section `generator`, the settings of the engine that samples."""
        return self.generator

    def shares_device(self, name: str) -> bool:
        """Return whether service `name` is started in the trainer's processes, on its devices."""
        return self.colocated and name in TAKING_TURNS and name in self.configured() and name not in self.idle

    def check_services(self) -> None:
        """Check the placement of all services, and what `colocated` requires. ConfigError: names a wrong setting."""
        super().check_services()
        try:
            self.generator.over(self.services.generator.procs)
        except ValueError as error:
            raise ConfigError(f"services.generator.{error}") from None

        if not self.colocated:
            return

        try:
            for name in filter(self.shares_device, self.configured()):
                service = rules.PlacedService(self, name, Options(**self.services[name]))
                rules.check_rules(rules.COLOCATED_SERVICE_RULES, service)
            rules.check_rules(rules.COLOCATED_RULES, self)
        except ConfigError as error:
            raise ConfigError(f"colocated: {error}") from None

    def _check(self) -> None:
        super()._check()
        if self.trainer.backend == "tinker" and self.generator.engine == "embedded":
            self.generator = EngineSettings(**{**self.generator, "engine": "tinker"})
        rules.check_rules(rules.SAMPLING_RULES, self)
        if extras.are_needed():
            try:
                self.generator.check_installed()
            except ImportError as error:
                raise ConfigError(str(error)) from None

    @property
    def files(self) -> list[str]:
        """Return the paths of the data and of the reward that may be local files."""
        return [*super().files, *self.reward.files]

    @property
    def scorers(self) -> list[Any]:
        """Return the plugins of the reward, constructed but not opened, and its functions."""
        return [*self.reward.plugins, *(self.reward.functions or ()), self.reward.accuracy]

    def check_reward(self) -> None:
        """Check that all functions, folders and files of the reward exist. ValueError: one does not."""
        self.reward.open()


def longest_sequence(cfg: RecipeConfig, model: str) -> int:
    """Return the maximum number of tokens of a prompt with its completion, for generators of the model in a folder."""
    return check_length(model_config(model), cfg.generator.max_seq_len)


def limit_prompt_tokens(cfg: "RLConfig", model: str) -> DatasetConfig:
    """Return a copy of the section `dataset` whose `max_prompt_tokens` leaves space for a completion in the sequences
    that generators take.

    Args:
        model: folder of the model.

    Raises:
        ConfigError: completions leave no space, or `dataset.max_prompt_tokens` is set to more than they leave.
    """
    longest = longest_sequence(cfg, model)
    data = cfg.dataset.model_copy()  # a resumed run is compared with the configuration as it was written
    prompt_room = longest - cfg.grpo.max_tokens
    completion = f"grpo.max_tokens = {cfg.grpo.max_tokens}"
    fix = "raise generator.max_seq_len as far as the model allows"
    if prompt_room < 1 and "max_tokens" in cfg.grpo.model_fields_set:
        raise ConfigError(
            f"{completion} leaves no room for a prompt in the {longest} tokens that generators take: lower it, or {fix}"
        )

    # A default of max_tokens that leaves no room is never reached: answers end at the longest sequence.
    prompt_room = prompt_room if prompt_room > 0 else longest - 1
    default_bound = cfg.training.seq_len - cfg.grpo.max_tokens  # which RLConfig sets for null
    if data.max_prompt_tokens == default_bound:
        data.max_prompt_tokens = min(default_bound, prompt_room)
    data.limit(
        "max_prompt_tokens",
        prompt_room,
        f"dataset.max_prompt_tokens is more than the {prompt_room} tokens that {completion} leaves of the {longest} "
        f"that generators take: lower either, or {fix}",
    )
    return data
