"""What a supervised run can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from forge.config import ConfigError, Section
from forge.sections import (
    CheckpointConfig,
    DatasetConfig,
    EvalConfig,
    FromScratch,
    GeneratorConfig,
    MetricsConfig,
    ParallelismConfig,
    RewardConfig,
    RunConfig,
    ServiceConfig,
    TrainingConfig,
    check_model_source,
)


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
        check_model_source(self.model, self.from_scratch)
        if self.training.sync_interval != 1 or self.training.entropy_coef:
            raise ConfigError("training.sync_interval and training.entropy_coef do nothing in supervised training")
