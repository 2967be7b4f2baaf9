"""What a supervised run can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from forge.config import ConfigError, Section
from forge.sections import EvalConfig, RecipeConfig, ServiceConfig


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
class SFTConfig(RecipeConfig):
    eval: SFTEvalConfig = field(default_factory=SFTEvalConfig)
    services: Services = field(default_factory=Services)

    def validate(self) -> None:
        super().validate()
        self.parallelism.validate(self.services.trainer.procs)
        for name in self.services:
            self.services[name].validate(name, ranks=name == "trainer", replicas=name not in ("trainer", "dataset"))
        if self.training.sync_interval != 1 or self.training.entropy_coef:
            raise ConfigError("training.sync_interval and training.entropy_coef do nothing in supervised training")
