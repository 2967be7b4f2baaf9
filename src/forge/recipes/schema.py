"""The configuration sections that recipes share. Every key is read by something; unknown keys are errors."""

from __future__ import annotations

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
from ..training.settings import LoraSettings, OptimizerSettings, Parallelism, PassSettings
from . import rules
from .eval_config import EvalConfig
from .metrics_config import MetricsConfig
from .placement import ClusterConfig
from .preemption import deadline_of
from .reward_config import RewardConfig

if TYPE_CHECKING:
    from .distill import DistillConfig
    from .rl_config import RLConfig

# With `colocated`, those that live in the trainer's processes, on its devices.
TAKING_TURNS = ("trainer", "generator", "critic", "ref_model")


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of the completions of prompt `index` in a run of this seed; far apart for neighbouring
    prompts.

    >>> sample_seed(0, 1) == sample_seed(0, 1)
    True
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

    backend: Literal["fsdp", "titan"] = "fsdp"
    """`fsdp`: transformers' models, divided by this library; `titan`: TorchTitan's (`torchtitan==0.3.0`)."""

    def check_model(self, config: Any) -> None:
        """Raise ValueError for a model that the backend does not have, ImportError if it is not installed."""
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
        """Return the number of samples that the data set keeps for a checkpoint, see `forge.actors.DatasetActor`."""
        return 1 << 16 if self.every else 0

    def due(self, step: int, last: bool) -> bool:
        """Return whether a checkpoint is written after this step."""
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
        """Return additional models that the recipe reads, by the key that names them; they must share the model's
        tokens."""
        return {}

    def scalar(self, model: str) -> list[str]:
        """Return the models that get a scalar head, of a run that trains `model`."""
        return []

    @property
    def files(self) -> list[str]:
        """Return all that is read and may be a file of this machine, models aside."""
        return self.dataset.files

    @property
    def scorers(self) -> list[Any]:
        """Return the scorers of responses, constructed but not opened."""
        return []

    @property
    def engine(self) -> EngineSettings | None:
        """Return the settings of the engine that samples; None where nothing does."""
        return None

    def shares_device(self, name: str) -> bool:
        """Return whether a service that is started lives in the trainer's processes, on its devices."""
        return False

    def check_reward(self) -> None:
        """Raise ValueError if something that the recipe's reward names does not exist."""

    def reach(self, config: Any) -> int:
        """Return the most tokens of a sequence that is trained, with a model of this transformers config."""
        return min(self.training.seq_len, max_length(config))

    def check_tokenizer(self, model: str) -> None:
        """Raise ValueError if the tokenizer in a model's folder lacks something that the recipe needs."""

    def data(self, model: str) -> RowsConfig:
        """Return the data, whose rows are no longer than the model in this folder takes. ConfigError: they are set to
        more."""
        return self.dataset.cap("max_tokens", max_length(model_config(model)))

    def placement(self, name: str) -> dict[str, Any]:
        """Return options of service `name`, see `forge.runtime.controller.Options`."""
        return {**Options(**self.services[name])}

    def unused(self) -> list[str]:
        """Return the keys that are set and that nothing reads under the others."""
        conditions = {
            "checkpoint.async_write": not self.checkpoint.every,
            "eval.every": not self.eval.intervals(),
            "training.cpu_offload": not self.services.trainer.with_gpus,
        }
        return rules.unused_keys(conditions | dict.fromkeys(self.unread, True), self)

    def placements(self) -> dict[str, dict[str, Any]]:
        """Return the options of all that a run places, by the settings that have them."""
        return {f"services.{name}": self.placement(name) for name in self.configured()}

    def _check(self) -> None:
        rules.check_rules(rules.RECIPE_RULES, self)

    def layout(self, name: str) -> Parallelism:
        """Return the layout in which service `name` divides its model. Only the trainer divides experts.

        Over several hosts, each has a whole copy (HSDP) unless a degree is set: shards travel within hosts, gradients
        only between them.
        """
        layout = self.parallelism
        if name != "trainer":
            layout = layout.model_copy(update={"expert_parallel_degree": 1})
        options = self.placement(name)
        ranks_per_copy = layout.tensor_parallel_degree * layout.context_parallel_degree
        hosts = options["hosts"] or 1
        data_degrees = (layout.data_parallel_replicate_degree, layout.data_parallel_shard_degree)
        if hosts == 1 or data_degrees != (None, -1) or options["procs"] // hosts % ranks_per_copy:
            return layout
        return layout.model_copy(update={"data_parallel_replicate_degree": hosts})

    @property
    def idle(self) -> frozenset[str]:
        """Return services that are configured and that the recipe does not start."""
        return frozenset()

    def configured(self) -> list[str]:
        """Return the services that are not null."""
        return [name for name in type(self.services).model_fields if self.services[name] is not None]

    def service(self, name: str) -> Placement | None:
        """Return the options of a service; None where the recipe has none of this name, or it is null."""
        return getattr(self.services, name, None)

    def check_services(self) -> None:
        """Check the placement of all services: those that train may have several ranks, those that hold no state
        several replicas. ConfigError: names the setting."""
        for name in self.configured():
            service = rules.PlacedService(self, name, Options(**self.services[name]))
            rules.check_rules(rules.SERVICE_RULES, service)
            procs = service.options.procs
            if (service.trains or procs != 1) and name not in ("generator", *self.idle):
                self.layout(name).over(procs, f"services.{name}.procs = {procs}")

    def check_pairs(self, dataset: PreferencesConfig) -> None:
        """Check training on pairs: every pair has the same weight, and fits into one micro-batch, which bounds its
        length where that is not set."""
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
        """Return options of a service; with `colocated` in the trainer's processes."""
        options = super().placement(name)
        if self.colocated and name in TAKING_TURNS:
            procs = super().placement("trainer")["procs"]
            return options | {"share": "device", "share_procs": procs}
        return options

    @property
    def engine(self) -> EngineSettings | None:
        """Return the settings of the engine that samples."""
        return self.generator

    def shares_device(self, name: str) -> bool:
        """Return whether a service that is started lives in the trainer's processes, on its devices."""
        return self.colocated and name in TAKING_TURNS and name in self.configured() and name not in self.idle

    def check_services(self) -> None:
        """Check the placement of all services, and what `colocated` requires. ConfigError: names the setting."""
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
        rules.check_rules(rules.SAMPLING_RULES, self)
        if extras.are_needed():
            try:
                self.generator.check_installed()
            except ImportError as error:
                raise ConfigError(str(error)) from None

    @property
    def files(self) -> list[str]:
        """Return files of the data and of the reward."""
        return [*super().files, *self.reward.files]

    @property
    def scorers(self) -> list[Any]:
        """Return plugins and functions of the reward."""
        return [*self.reward.plugins, *(self.reward.functions or ())]

    def check_reward(self) -> None:
        """Raise ValueError if a function, a folder or a file of the reward does not exist."""
        self.reward.open()


def longest_sequence(cfg: RecipeConfig, model: str) -> int:
    """Return the most tokens of a prompt and its completion that generators of a model folder take."""
    return check_length(model_config(model), cfg.generator.max_seq_len)


def with_room(cfg: RLConfig | DistillConfig, section: str, model: str) -> DatasetConfig:
    """Return the data, with prompts that leave room for the completions of a section in what generators take.

    It is a copy: a resumed run is compared with the configuration as it was written.

    Raises:
        ConfigError: the completions leave no room, or `dataset.max_prompt_tokens` is set to more than they leave.
    """
    sampling = cfg[section]
    longest = longest_sequence(cfg, model)
    data = cfg.dataset.model_copy()
    room = longest - sampling.max_tokens
    completion = f"{section}.max_tokens = {sampling.max_tokens}"
    fix = "raise generator.max_seq_len as far as the model allows"
    if room < 1 and "max_tokens" in sampling.model_fields_set:
        raise ConfigError(
            f"{completion} leaves no room for a prompt in the {longest} tokens that generators take: lower it, or {fix}"
        )
    # A default that leaves no room is a bound that answers never reach: they end at the model's length.
    room = room if room > 0 else longest - 1
    default_bound = cfg.training.seq_len - sampling.max_tokens  # where the user set none
    if data.max_prompt_tokens == default_bound:
        data.max_prompt_tokens = min(default_bound, room)
    data.limit(
        "max_prompt_tokens",
        room,
        f"dataset.max_prompt_tokens is more than the {room} tokens that {completion} leaves of the {longest} that "
        f"generators take: lower either, or {fix}",
    )
    return data
