"""What a supervised run can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from forge.config import ConfigError, Section
from forge.models import build_small_model, resolve_model
from forge.sections import (
    CheckpointConfig,
    DatasetConfig,
    EvalConfig,
    GeneratorConfig,
    MetricsConfig,
    ParallelismConfig,
    RewardConfig,
    RunConfig,
    ServiceConfig,
    TrainingConfig,
)


@dataclass
class FromScratch(Section):
    """A small Qwen3-architecture model with a character tokenizer, made from the seed."""

    alphabet: str
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    max_positions: int = 128


@dataclass
class SFTEvalConfig(EvalConfig):
    """As elsewhere; training ends once accuracy reaches `stop_at`."""

    max_tokens: int = 512
    stop_at: float = 1.1


@dataclass
class Services(Section):
    generator: ServiceConfig = field(default_factory=ServiceConfig)
    trainer: ServiceConfig = field(default_factory=ServiceConfig)
    reward: ServiceConfig = field(default_factory=lambda: ServiceConfig(share="helpers"))
    dataset: ServiceConfig = field(default_factory=lambda: ServiceConfig(share="helpers"))


@dataclass
class SFTConfig(Section):
    dataset: DatasetConfig
    model: str | None = None
    from_scratch: FromScratch | None = None
    run: RunConfig = field(default_factory=lambda: RunConfig(name="sft"))
    training: TrainingConfig = field(default_factory=TrainingConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    services: Services = field(default_factory=Services)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: SFTEvalConfig = field(default_factory=SFTEvalConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    seed: int = 0

    def validate(self) -> None:
        self.dataset.validate()
        self.training.validate()
        self.parallelism.validate(self.services.trainer.procs)
        if (self.model is None) == (self.from_scratch is None):
            raise ConfigError("set either model (a folder or hub id) or from_scratch (a small model from the seed)")
        if self.training.sync_interval != 1 or self.training.entropy_coef:
            raise ConfigError("training.sync_interval and training.entropy_coef do nothing in supervised training")

    def prepare_model(self) -> str:
        """The model folder to start from."""
        if self.from_scratch is None:
            return resolve_model(str(self.model))
        folder = Path(self.run.root) / f"{self.run.name}-initial"
        return build_small_model(folder, seed=self.seed, **self.from_scratch)
