"""The configuration sections that recipes share. Every key is read by something; unknown keys are errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .config import ConfigError, Section
from .controller import Options
from .controller.routers import resolve_router
from .data.config import PreferencesConfig, RowsConfig
from .data.rewards.load import load_reward
from .plugin import load_plugin
from .training.layout import Parallelism
from .verifiers.spec import VerifiersConfig

# With `colocated`, those that live in the trainer's processes, on its devices.
TAKING_TURNS = ("trainer", "generator", "critic", "ref_model")


@dataclass
class ServiceConfig(Section, Options):
    """Placement and supervision of one component, see `forge.controller.Options`."""

    def __post_init__(self) -> None:
        """Checked by `validate`, which knows the service's name."""

    def validate(self, name: str, *, ranks: bool = False, replicas: bool = True) -> None:
        """Check the placement of service `name`: may it have several ranks, several replicas?"""
        try:
            self.check()
            resolve_router(self.router)
        except ValueError as error:
            raise ConfigError(f"services.{name}: {error}") from None
        if self.procs != 1 and not ranks:
            raise ConfigError(f"services.{name}.procs must be 1: scale it with num_replicas")
        if self.num_replicas != 1 and not replicas:
            raise ConfigError(f"services.{name}.num_replicas must be 1: it holds state that cannot be split")


@dataclass
class FromScratch(Section):
    """A small Qwen3-architecture model with a character tokenizer, made from the seed; `alphabet` null is printable
    ASCII."""

    alphabet: str | None = None
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    max_positions: int = 128

    def validate(self) -> None:
        least = min(self.layers, self.heads, self.kv_heads, self.max_positions)
        if least < 1 or self.hidden_size % (2 * self.heads) or self.heads % self.kv_heads:
            raise ConfigError(
                "from_scratch: layers, heads, kv_heads and max_positions must be at least 1, hidden_size a multiple of "
                "twice heads, and heads one of kv_heads"
            )


@dataclass
class TrainingConfig(Section):
    """One optimiser step and how many of them.

    `batch_size` counts prompts (with all their samples) of a step, rows or pairs where nothing is sampled; `seq_len` is
    the longest sequence and the most tokens of a micro-batch; `sync_interval` is the number of steps between two weight
    updates of the generators. A step makes `mini_batches` * `epochs` updates. `aggregation` null is the algorithm's
    own.
    """

    batch_size: int = 4
    steps: int = 1000
    learning_rate: float = 1e-6
    seq_len: int = 4096
    dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    cpu_offload: bool = False
    compile: bool = False
    sync_interval: int = 1
    entropy_coef: float = 0.0
    mini_batches: int = 1
    epochs: int = 1
    aggregation: Literal["token_mean", "sequence_mean", "fixed_horizon"] | None = None
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = 0.1

    def validate(self) -> None:
        for name in (
            "batch_size",
            "steps",
            "seq_len",
            "gradient_accumulation_steps",
            "sync_interval",
            "mini_batches",
            "epochs",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"training.{name} must be at least 1, got {getattr(self, name)}")
        if self.schedule != "constant" and self.steps <= self.warmup_steps:
            raise ConfigError(f"a {self.schedule} schedule needs training.steps > training.warmup_steps")
        from .training.optimizer import OptimizerSettings

        try:
            OptimizerSettings(**self.optimizer())
        except ValueError as error:
            raise ConfigError(f"training: {error}") from None

    def optimizer(self) -> dict[str, Any]:
        """Settings for `forge.training.optimizer.OptimizerSettings`."""
        names = ("learning_rate", "weight_decay", "beta1", "beta2", "max_grad_norm", "warmup_steps", "schedule")
        return {name: self[name] for name in (*names, "min_lr_ratio")} | {"total_steps": self.steps}

    def trainer(self) -> dict[str, Any]:
        """Settings for `forge.training.trainer.PolicyTrainer`."""
        return {
            "seq_len": self.seq_len,
            "dtype": self.dtype,
            "accumulation_steps": self.gradient_accumulation_steps,
            "gradient_checkpointing": self.gradient_checkpointing,
            "cpu_offload": self.cpu_offload,
            "compile": self.compile,
            "mini_batches": self.mini_batches,
            "epochs": self.epochs,
        }


@dataclass
class LoRAConfig(Section):
    """Train factors of low rank beside frozen weights (Hu et al. 2021): W + (alpha / rank) B A, in the linear modules
    whose names end in one of `targets` (null: all of attention and feed-forward)."""

    rank: int = 16
    alpha: float = 32.0
    targets: list[str] | None = None

    def validate(self) -> None:
        if self.rank < 1 or self.alpha <= 0 or self.targets == []:
            raise ConfigError("lora needs a rank of at least 1, an alpha above 0 and at least one of targets")

    def settings(self) -> dict[str, Any]:
        """Of `forge.training.lora.LoraSettings`."""
        return {name: self[name] for name in self if self[name] is not None}


@dataclass
class ParallelismConfig(Section, Parallelism):
    """How the trainer's ranks share the model and its batches, see `forge.training.layout.Parallelism`."""

    def validate(self, service: str, ranks: int) -> None:
        try:
            self.over(ranks, f"services.{service}.procs = {ranks}")
        except ValueError as error:
            raise ConfigError(str(error)) from None


@dataclass
class TrainerConfig(Section):
    """Whose models and parallelisation train: "fsdp" is transformers' with this library's, "titan" TorchTitan's."""

    backend: Literal["fsdp", "titan"] = "fsdp"

    def check_model(self, config: Any) -> None:
        """ValueError: a transformers config that the backend does not have. ImportError: it is not installed."""
        if self.backend == "titan":
            from .training import titan_setup

            titan_setup.check_installed()
            titan_setup.check_model(config)


@dataclass
class GeneratorConfig(Section):
    """The generation engine, see `forge.actors.Generator`. `vllm`: further arguments of vLLM's engine."""

    engine: Literal["embedded", "vllm"] = "embedded"
    slots: int = 256
    max_seq_len: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    on_update: Literal["continue", "finish", "recompute"] = "continue"
    vllm: dict[str, Any] = field(default_factory=dict)

    def validate(self) -> None:
        if self.slots < 1 or (self.max_seq_len is not None and self.max_seq_len < 2):
            raise ConfigError(
                f"generator.slots must be at least 1 and max_seq_len at least 2, got {self.slots}, {self.max_seq_len}"
            )
        if self.engine != "vllm":
            if self.vllm:
                raise ConfigError(f"generator.vllm needs generator.engine: vllm, it is {self.engine}")
            return
        from .engines.vllm_args import check_installed, check_options

        try:
            check_installed()
            check_options(self.vllm)
        except (ImportError, ValueError) as error:
            raise ConfigError(str(error)) from None


@dataclass
class ServeConfig(Section):
    """Serve the generators to OpenAI clients as well, at `host` and `port` (0: a free one; null: not at all)."""

    port: int | None = None
    host: str = "127.0.0.1"

    def validate(self) -> None:
        if self.port is None:
            if self.host != ServeConfig.host:
                raise ConfigError("serve.host does nothing: serve.port is not set")
            return
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"serve.port must be 0 to {(1 << 16) - 1}, got {self.port}")
        # Says what to install where the extra is missing.
        from .serve import Server as _  # noqa: F401


@dataclass
class RewardConfig(Section):
    """The sum of `functions` and of the scores of `verifiers`.

    An item of `functions` is a name (of `forge.data.rewards`, or `package.module:Name`), or a verifier with its
    settings: `{use: package.module:Name, ...}`, see `forge.verifiers.Verifier`. `functions` null is MathReward unless
    `verifiers` is set. `accuracy` decides what counts as right; null: the first name in `functions`.
    """

    functions: list[str | dict[str, Any]] | None = None
    verifiers: VerifiersConfig | None = None
    accuracy: str | None = None

    def settings(self) -> dict[str, Any]:
        """Of `forge.actors.RewardActor`."""
        functions: list[str | dict[str, Any]] | None = self.functions
        if functions is None:
            functions = ["MathReward"] if self.verifiers is None else []
        return {**self, "functions": functions}

    @property
    def names(self) -> list[str]:
        """Of all functions that are named without settings."""
        named = [item for item in self.settings()["functions"] if isinstance(item, str)]
        return [*named, *filter(None, [self.accuracy])]

    @property
    def plugins(self) -> list[Any]:
        """The functions with settings, constructed: nothing is opened. ValueError: unknown ones, bad settings."""
        numbered = enumerate(self.functions or ())
        return [load_plugin(item, f"reward.functions[{n}]") for n, item in numbered if isinstance(item, dict)]

    @property
    def beyond_accuracy(self) -> bool:
        """Whether it says more than which answers are right."""
        several = len(self.functions or ()) > 1 and self.accuracy is None
        return several or self.verifiers is not None or any(isinstance(item, dict) for item in self.functions or ())

    @property
    def learns(self) -> bool:
        """Whether it has a state that checkpoints keep."""
        return any(getattr(plugin, "learns", False) for plugin in self.plugins)

    @property
    def files(self) -> list[str]:
        """Files whose content decides rewards."""
        return [str(file) for plugin in self.plugins for file in getattr(plugin, "files", ())]

    def validate(self, problems: int) -> None:
        """Check it against an evaluation on so many problems."""
        if self.functions == [] and self.verifiers is None:
            raise ConfigError("reward.functions is empty: name at least one, or set reward.verifiers")
        if problems and not self.names:
            raise ConfigError(
                "nothing says which answers of an evaluation are right: set reward.accuracy, or eval.problems to 0"
            )
        try:
            learning = [plugin for plugin in self.plugins if getattr(plugin, "learns", False)]
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if len(learning) > 1:
            raise ConfigError("reward.functions: only one of them may learn")

    def check(self) -> None:
        """Open what it names, except for models.

        Raises:
            ValueError: a function, a folder or a file that is not there, or is not what it should be.
        """
        for name in self.names:
            load_reward(name)
        if self.verifiers is not None:
            self.verifiers.validate("reward.verifiers")
        for plugin in self.plugins:
            if hasattr(plugin, "check"):
                try:
                    plugin.check()
                except (ValueError, OSError) as error:
                    raise ConfigError(f"reward.functions: {error}") from None


@dataclass
class CheckpointConfig(Section):
    """`every` so many steps, and after the last (0: never); the newest `keep` stay.

    `async_write`: training goes on while a copy of the state is written.
    """

    every: int = 0
    keep: int = 2
    async_write: bool = False

    def validate(self) -> None:
        if self.keep < 1 or self.every < 0:
            raise ConfigError(f"checkpoint.keep must be at least 1 and every at least 0, got {self.keep}, {self.every}")
        if self.async_write and not self.every:
            raise ConfigError("checkpoint.async_write does nothing: checkpoint.every is 0")

    @property
    def remember(self) -> int:
        """How many samples the data set keeps for a checkpoint, see `forge.actors.DatasetActor`."""
        return 1 << 16 if self.every else 0

    @property
    def how(self) -> dict[str, Any]:
        """Settings for `forge.actors.save`."""
        return {"keep": self.keep, "async_write": self.async_write}

    def due(self, step: int, last: bool) -> bool:
        """Whether a checkpoint is written after this step."""
        return self.every > 0 and (last or step % self.every == 0)


@dataclass
class EvalConfig(Section):
    """An evaluation on `problems` held-out problems, rows or pairs before, after and every so many steps (0: only those
    two); 0 problems: none.

    They come from `path` and `split`, or from the dataset's own path; a procedural task holds its own out.
    """

    problems: int = 256
    every: int = 0
    path: str | None = None
    split: str = "test"


@dataclass
class MetricsConfig(Section):
    """`tensorboard`: also write events for it."""

    tensorboard: bool = False


@dataclass
class RunConfig(Section):
    """Results go to `<root>/<name>/`."""

    name: str
    root: str = "runs"
    overwrite: bool = False


@dataclass
class TrainingRecipe(Section):
    """What every recipe can be told; a recipe adds its algorithm and its `services`."""

    dataset: RowsConfig
    model: str | None = None
    from_scratch: FromScratch | None = None
    run: RunConfig = field(default_factory=lambda: RunConfig(name="run"))
    training: TrainingConfig = field(default_factory=TrainingConfig)
    lora: LoRAConfig | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    services: Any = None  # each recipe's own
    seed: int = 0

    def others(self) -> dict[str, str]:
        """Further models that the recipe reads, by the key that names them; they must share the model's tokens."""
        return {}

    @property
    def files(self) -> list[str]:
        """All that is read and may be a file of this machine, models aside."""
        return self.dataset.files

    def check_reward(self) -> None:
        """ValueError: what the recipe's reward names is not there."""

    def check_tokenizer(self, model: str) -> None:
        """ValueError: the tokenizer in a model's folder has not what the recipe needs."""

    def placement(self, name: str) -> dict[str, Any]:
        """Options of service `name`, see `forge.controller.Options`."""
        return {**self.services[name]}

    def validate(self) -> None:
        """Check what can be known without opening anything.

        Raises:
            ConfigError: says which key and what to do.
        """
        if (self.model is None) == (self.from_scratch is None):
            raise ConfigError(
                "set either model (a folder or hub id) or from_scratch (a small model made from the seed)"
            )
        self.dataset.validate()
        self.training.validate()
        if self.lora is not None:
            self.lora.validate()
            if self.trainer.backend == "titan":
                raise ConfigError("trainer.backend titan trains all weights: leave lora out, or take fsdp")
        self.checkpoint.validate()
        if self.eval.problems < 0 or self.eval.every < 0:
            raise ConfigError("eval.problems and eval.every must be at least 0")
        if self.from_scratch is not None:
            self.from_scratch.validate()

    def validate_services(self, services: Any, *, idle: tuple[str, ...] = ()) -> None:
        """Check the placement of all services: those that train may have several ranks, those that hold no state
        several replicas. `idle` are not started."""
        for name in services:
            learns, holds = name in ("trainer", "critic"), name in ("replay_buffer", "dataset")
            services[name].validate(name, ranks=learns, replicas=not learns and not holds)
            if learns and name not in idle:
                self.parallelism.validate(name, services[name].procs)
                if self.training.cpu_offload and not services[name].with_gpus:
                    raise ConfigError(f"training.cpu_offload does nothing: services.{name} has no GPUs (with_gpus)")

    def validate_pairs(self, dataset: PreferencesConfig) -> None:
        """Check what training on pairs asks for: every pair counts the same, and goes into one micro-batch whole. Their
        length is bounded by that where it is not set."""
        if self.training.aggregation is not None:
            raise ConfigError("training.aggregation does nothing in this recipe: every pair counts the same")
        half = self.training.seq_len // 2
        most = f"dataset.max_tokens must not exceed half of training.seq_len, {half}: both answers of a pair go "
        dataset.bound("max_tokens", half, f"{most}into one micro-batch")

    def validate_offline(self) -> None:
        """Refuse what means something only where a policy samples as it trains."""
        if self.training.sync_interval != 1 or self.training.entropy_coef:
            raise ConfigError("training.sync_interval and training.entropy_coef do nothing in this recipe")
        if self.training.aggregation == "fixed_horizon":
            raise ConfigError("training.aggregation fixed_horizon is for sampled completions: use one of the means")


@dataclass
class RecipeConfig(TrainingRecipe):
    """A recipe whose policy samples and is scored."""

    reward: RewardConfig = field(default_factory=RewardConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    colocated: bool = False

    def placement(self, name: str) -> dict[str, Any]:
        options = super().placement(name)
        if self.colocated and name in TAKING_TURNS:
            procs = super().placement("trainer")["procs"]
            return options | {"share": "device", "share_procs": procs}
        return options

    def validate_services(self, services: Any, *, idle: tuple[str, ...] = ()) -> None:
        super().validate_services(services, idle=idle)
        if not self.colocated:
            return
        trainer = services.trainer
        for name in (name for name in services if name in TAKING_TURNS and name not in idle):
            for key in ("with_gpus", "threads", "env", "memory_gb", "ping_timeout"):
                if services[name][key] != trainer[key]:
                    raise ConfigError(
                        f"colocated: services.{name}.{key} = {services[name][key]!r}, and it lives in the trainer's "
                        f"processes, with {trainer[key]!r}"
                    )
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
                "critic" in services and "critic" not in idle and trainer.procs > 1,
                "a critic of several ranks cannot live in the trainer's processes: set services.trainer.procs to 1",
            ),
            (
                self.training.cpu_offload,
                "between steps all is in host memory anyway: leave training.cpu_offload out",
            ),
            (
                self.generator.engine == "vllm" and trainer.procs > 1,
                "generator.engine vllm takes one device: set services.trainer.procs to 1, or take embedded",
            ),
        ):
            if bad:
                raise ConfigError(f"colocated: {message}")

    def validate(self) -> None:
        super().validate()
        self.reward.validate(self.eval.problems)
        self.generator.validate()
        self.serve.validate()

    @property
    def files(self) -> list[str]:
        return [*super().files, *self.reward.files]

    def check_reward(self) -> None:
        self.reward.check()
