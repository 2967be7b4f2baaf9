"""The configuration sections that recipes share. Every key is read by something; unknown keys are errors."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from ..config.plugin import load_plugin
from ..config.sections import ConfigError, Section
from ..data.config import PreferencesConfig, RowsConfig
from ..data.files import Rows
from ..engines.interface import check_length
from ..engines.settings import EngineSettings
from ..models.architecture import longest
from ..rewards.config import VerifiersConfig
from ..rewards.reward import as_verifier
from ..rewards.rules import load_reward
from ..runtime.cluster.settings import ClusterConfig
from ..training.settings import LoraSettings, OptimizerSettings, Parallelism, PassSettings
from .metrics_config import MetricsConfig
from .preemption import deadline_of

# With `colocated`, those that live in the trainer's processes, on its devices.
TAKING_TURNS = ("trainer", "generator", "critic", "ref_model")


def sample_seed(seed: int, index: int) -> int:
    """The seed of the completions of prompt `index` in a run of this seed; far apart for neighbouring prompts."""
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

    def optimizer_settings(self) -> dict[str, Any]:
        """Settings for `forge.training.settings.OptimizerSettings`."""
        return self.only(OptimizerSettings)

    def trainer(self) -> dict[str, Any]:
        """Settings for `forge.training.trainer.PolicyTrainer`."""
        return self.only(PassSettings)


class TrainerConfig(Section):
    """Whose models and parallelisation train ([parallelism.md](parallelism.md))."""

    backend: Literal["fsdp", "titan"] = "fsdp"
    """`fsdp`: transformers' models, divided by this library; `titan`: TorchTitan's (`torchtitan==0.3.0`)."""

    def check_model(self, config: Any) -> None:
        """ValueError: a transformers config that the backend does not have. ImportError: it is not installed."""
        if self.backend == "titan":
            from ..training import titan_setup

            titan_setup.check_installed()
            titan_setup.check_model(config)


class ServeConfig(Section):
    """Serve the generators to OpenAI clients as well ([serving.md](serving.md)). Needs aiohttp."""

    port: int | None = Field(None, ge=0, le=65535)
    """0: a free one; null: not served."""
    host: str = "127.0.0.1"
    """The address it listens at, by default this machine alone. Others need a key for clients in FORGE_API_KEY."""

    def _check(self) -> None:
        if self.port is None and self.host != type(self).model_fields["host"].default:
            raise ValueError("serve.host does nothing: serve.port is not set")

    def check_installed(self) -> None:
        """ImportError: aiohttp is missing; says what to install."""
        if self.port is not None:
            from ..system.web import required_key

            required_key(self.host)

    def listening(self) -> socket.socket | None:
        """Listens at the address; None: not served. OSError: it is not available; names the remedy."""
        if self.port is None:
            return None
        from ..system.web import bind

        return bind(self.host, self.port, "--serve.port 0")


class RewardConfig(Section):
    """The sum of all that is set."""

    functions: list[Any] | None = None
    """Names from `forge.rewards.rules` or `package.module:Name`, or verifiers with their settings, `{use:
    package.module:Name, ...}`; from Python also the objects themselves. null: `MathReward` unless `verifiers` is
    set."""
    verifiers: VerifiersConfig | None = None
    """Models, judges and rules, with their scores as they are: the keys of the section `verifiers`."""
    accuracy: Any = None
    """The function that decides which answers are right; null: the first function of `functions`."""

    def _check(self) -> None:
        if self.functions == [] and self.verifiers is None:
            raise ValueError("reward.functions is empty: name at least one, or set reward.verifiers")
        for item in self.functions or ():
            if not isinstance(item, str | dict):
                as_verifier(item)
        if sum(bool(getattr(plugin, "learns", False)) for plugin in self.plugins) > 1:
            raise ValueError("reward.functions: only one of them may learn")

    def settings(self) -> dict[str, Any]:
        """Of `forge.actors.RewardActor`."""
        functions = self.functions
        if functions is None:
            functions = ["MathReward"] if self.verifiers is None else []
        return {**self, "functions": functions}

    @property
    def plugins(self) -> list[Any]:
        """The functions with settings, constructed but not opened."""
        numbered = enumerate(self.functions or ())
        return [load_plugin(item, f"reward.functions[{n}]") for n, item in numbered if isinstance(item, dict)]

    @property
    def decides(self) -> bool:
        """Whether something decides which answers are right."""
        named = (item for item in self.settings()["functions"] if not isinstance(item, dict))
        return self.accuracy is not None or any(not hasattr(item, "names") for item in named)

    @property
    def beyond_accuracy(self) -> bool:
        """Whether it scores more than which answers are right."""
        several = len(self.functions or ()) > 1 and self.accuracy is None
        return several or self.verifiers is not None or any(isinstance(item, dict) for item in self.functions or ())

    @property
    def learns(self) -> bool:
        """Whether it has a state that checkpoints keep."""
        return any(getattr(plugin, "learns", False) for plugin in self.plugins)

    @property
    def gives_steps(self) -> bool:
        """Whether it rewards the steps of a response."""
        return any(getattr(item, "gives_steps", False) for item in (*self.plugins, *(self.functions or ())))

    @property
    def files(self) -> list[str]:
        """Files whose content decides rewards."""
        return [str(file) for plugin in self.plugins for file in getattr(plugin, "files", ())]

    def open(self) -> None:
        """Open what it names, except for models.

        Raises:
            ValueError: a function, a folder or a file does not exist, or is invalid.
        """
        for item in (*self.settings()["functions"], self.accuracy):
            if isinstance(item, str):
                as_verifier(load_reward(item))
        if self.verifiers is not None:
            self.verifiers.check_sources("reward.verifiers")
        for plugin in self.plugins:
            if hasattr(plugin, "check"):
                try:
                    plugin.check()
                except (ValueError, OSError) as error:
                    raise ConfigError(f"reward.functions: {error}") from None


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

    def _check(self) -> None:
        if self.async_write and not self.every:
            raise ValueError("checkpoint.async_write does nothing: checkpoint.every is 0")

    @property
    def remember(self) -> int:
        """How many samples the data set keeps for a checkpoint, see `forge.actors.DatasetActor`."""
        return 1 << 16 if self.every else 0

    def due(self, step: int, last: bool) -> bool:
        """Whether a checkpoint is written after this step."""
        return self.every > 0 and (last or step % self.every == 0)


class EvalConfig(Section):
    """Greedy evaluation on held-out problems, rows or pairs, before and after training."""

    problems: NonNegativeInt = 256
    """How many; 0: no evaluation."""
    every: NonNegativeInt = 0
    """Also every so many steps, a multiple of `training.sync_interval`."""
    path: str | Rows | None = None
    """Where they come from; null: `dataset.path`. A procedural task holds its own out. From Python also rows."""
    split: str = "test"
    """Of a folder or hub id."""


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


class TrainingRecipe(Section):
    """Configuration of every recipe; a recipe adds its algorithm and its `services`."""

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
    services: Any = None  # each recipe's own
    seed: int = 0
    """Of everything that is drawn."""

    def others(self) -> dict[str, str]:
        """Further models that the recipe reads, by the key that names them; they must share the model's tokens."""
        return {}

    def scalar(self, model: str) -> list[str]:
        """The models that get a scalar head, of a run that trains `model`."""
        return []

    @property
    def files(self) -> list[str]:
        """All that is read and may be a file of this machine, models aside."""
        return self.dataset.files

    @property
    def scorers(self) -> list[Any]:
        """What scores responses by the targets of the data, constructed but not opened."""
        return []

    def check_reward(self) -> None:
        """ValueError: something that the recipe's reward names does not exist."""

    def reach(self, config: Any) -> int:
        """Most tokens of a sequence that is trained, with a model of this transformers config."""
        return min(self.training.seq_len, longest(config))

    def check_tokenizer(self, model: str) -> None:
        """ValueError: the tokenizer in a model's folder lacks something that the recipe needs."""

    def data(self, model: str) -> RowsConfig:
        """The data, whose rows are no longer than the model in this folder takes. ConfigError: they are set to more."""
        from transformers import AutoConfig

        return self.dataset.within("max_tokens", longest(AutoConfig.from_pretrained(model, trust_remote_code=False)))

    def placement(self, name: str) -> dict[str, Any]:
        """Options of service `name`, see `forge.runtime.controller.Options`."""
        return {**self.services[name]}

    def _check(self) -> None:
        if (self.model is None) == (self.from_scratch is None):
            raise ConfigError(
                "set either model (a folder or hub id) or from_scratch (a small model made from the seed)"
            )
        if self.metrics.profile is not None:
            known = [name for name in type(self.services).model_fields if self.services[name] is not None]
            if unknown := {*self.metrics.profile.services} - {*known}:
                raise ConfigError(f"metrics.profile.services: {min(unknown)!r} is none of {', '.join(known)}")
        if self.run.save_before is not None and not self.checkpoint.every:
            raise ConfigError("run.save_before needs checkpoints: set checkpoint.every")
        if self.trainer.backend == "titan" and (self.lora is not None or self.training.weights_dtype != "float32"):
            raise ConfigError("trainer.backend titan trains all weights: leave lora out, or set fsdp; in float32 alone")
        if self.trainer.backend == "fsdp" and self.parallelism.expert_parallel_degree != 1:
            raise ConfigError("parallelism.expert_parallel_degree does nothing with trainer.backend fsdp: set titan")
        if self.training.optimizer == "adamw8bit" and self.parallelism.tensor_parallel_degree > 1:
            raise ConfigError(
                "training.optimizer adamw8bit does not support parallelism.tensor_parallel_degree: its state cannot be "
                "divided by columns; raise data_parallel_shard_degree"
            )
        try:
            self.training.check_installed()
        except ImportError as error:
            raise ConfigError(str(error)) from None

    def layout(self, name: str) -> Parallelism:
        """How service `name` divides its model. Over several hosts, each has a whole copy (HSDP) unless a degree is
        set: shards travel within hosts, gradients alone between them. The trainer alone divides experts."""
        own = self.parallelism
        if name != "trainer":
            own = own.model_copy(update={"expert_parallel_degree": 1})
        placed, inner = self.placement(name), own.tensor_parallel_degree * own.context_parallel_degree
        hosts, chosen = placed["hosts"] or 1, (own.data_parallel_replicate_degree, own.data_parallel_shard_degree)
        if hosts == 1 or chosen != (None, -1) or placed["procs"] // hosts % inner:
            return own
        return own.model_copy(update={"data_parallel_replicate_degree": hosts})

    def check_services(self, *, idle: tuple[str, ...] = ()) -> None:
        """Check the placement of all services: those that train may have several ranks, those that hold no state
        several replicas. `idle` are not started."""
        for name in type(self.services).model_fields:
            placed, learns = self.services[name], name in ("trainer", "critic")
            if placed is None:
                continue
            if placed.procs != 1 and not learns and name not in ("generator", "ref_model"):
                raise ConfigError(f"services.{name}.procs must be 1: scale it with num_replicas")
            if placed.num_replicas != 1 and (learns or name in ("replay_buffer", "dataset")):
                raise ConfigError(f"services.{name}.num_replicas must be 1: its state cannot be split")
            if (learns or placed.procs != 1) and name not in ("generator", *idle):
                self.layout(name).over(placed.procs, f"services.{name}.procs = {placed.procs}")
            if learns and name not in idle and self.training.cpu_offload and not placed.with_gpus:
                raise ConfigError(f"training.cpu_offload does nothing: services.{name} has no GPUs (with_gpus)")

    def check_pairs(self, dataset: PreferencesConfig) -> None:
        """Check training on pairs: every pair has the same weight, and fits into one micro-batch, which bounds its
        length where that is not set."""
        if self.training.aggregation is not None:
            raise ConfigError("training.aggregation does nothing in this recipe: every pair has the same weight")
        half = self.training.seq_len // 2
        most = f"dataset.max_tokens must not exceed half of training.seq_len, {half}: both answers of a pair go "
        dataset.bound("max_tokens", half, f"{most}into one micro-batch")

    def check_offline(self) -> None:
        """ConfigError: a setting that has an effect only where a policy samples as it trains."""
        if self.training.sync_interval != 1 or self.training.entropy_coef:
            raise ConfigError("training.sync_interval and training.entropy_coef do nothing in this recipe")
        if self.training.aggregation == "fixed_horizon":
            raise ConfigError("training.aggregation fixed_horizon is for sampled completions: use one of the means")


class RecipeConfig(TrainingRecipe):
    """A recipe whose policy samples and is scored."""

    reward: RewardConfig = RewardConfig()
    generator: EngineSettings = EngineSettings()
    serve: ServeConfig = ServeConfig()
    colocated: bool = False
    """Generators, and critic and reference model where there are any, live in the trainer's processes and take turns
    with it on the same devices ([parallelism.md](parallelism.md)). `async.max_policy_age` must be 0."""

    def prompts(self, model: str) -> RowsConfig:
        """The dataset, whose prompts leave room for a token of the model in this folder."""
        from transformers import AutoConfig

        most = check_length(AutoConfig.from_pretrained(model, trust_remote_code=False), self.generator.max_seq_len)
        return self.dataset.within("max_prompt_tokens", most - 1)

    def placement(self, name: str) -> dict[str, Any]:
        """Options of a service; with `colocated` in the trainer's processes."""
        options = super().placement(name)
        if self.colocated and name in TAKING_TURNS:
            procs = super().placement("trainer")["procs"]
            return options | {"share": "device", "share_procs": procs}
        return options

    def check_services(self, *, idle: tuple[str, ...] = ()) -> None:
        """As the base, and what `colocated` requires. ConfigError: names the setting."""
        super().check_services(idle=idle)
        try:
            self.generator.over(self.services.generator.procs)
        except ValueError as error:
            raise ConfigError(f"services.generator.{error}") from None
        if not self.colocated:
            return
        services, trainer = self.services, self.services.trainer
        running = [name for name in type(services).model_fields if name in TAKING_TURNS and name not in idle]
        for name in running:
            for key in ("with_gpus", "gpus_per_proc", "threads", "env", "memory_gb", "ping_timeout"):
                if services[name][key] != trainer[key]:
                    raise ConfigError(
                        f"colocated: services.{name}.{key} = {services[name][key]!r}, and it lives in the trainer's "
                        f"processes, with {trainer[key]!r}"
                    )
            if name == "generator" and services[name].procs != 1:
                raise ConfigError("colocated: a generator has one process: set services.generator.procs to 1")
            if (services[name].share, services[name].hosts, services[name].per_process) != (None, None, 1):
                raise ConfigError(
                    f"colocated: services.{name} lives in the trainer's processes: leave share, hosts and per_process"
                )
        for bad, message in (
            (
                services.generator.num_replicas > trainer.procs,
                f"services.generator.num_replicas = {services.generator.num_replicas} is more than the trainer's procs "
                f"= {trainer.procs}: a device has room for one generator",
            ),
            (
                "ref_model" in running and services["ref_model"].procs > 1,
                "a reference model has one process: set services.ref_model.procs to 1",
            ),
            (
                "critic" in running and trainer.procs > 1,
                "a critic of several ranks cannot live in the trainer's processes: set services.trainer.procs to 1",
            ),
            (
                self.training.cpu_offload,
                "between steps all is in host memory anyway: leave training.cpu_offload out",
            ),
            (
                self.generator.engine == "vllm" and trainer.procs > 1,
                "generator.engine vllm takes one device: set services.trainer.procs to 1, or choose embedded",
            ),
        ):
            if bad:
                raise ConfigError(f"colocated: {message}")

    def _check(self) -> None:
        super()._check()
        if self.eval.problems and not self.reward.decides:
            raise ConfigError(
                "nothing decides which answers of an evaluation are right: set reward.accuracy, or eval.problems to 0"
            )
        try:
            self.generator.check_installed()
            self.serve.check_installed()
        except ImportError as error:
            raise ConfigError(str(error)) from None

    @property
    def files(self) -> list[str]:
        """Files of the data and of the reward."""
        return [*super().files, *self.reward.files]

    @property
    def scorers(self) -> list[Any]:
        """Plugins and functions of the reward."""
        return [*self.reward.plugins, *(self.reward.functions or ())]

    def check_reward(self) -> None:
        """ValueError: a function, a folder or a file of the reward does not exist."""
        self.reward.open()
