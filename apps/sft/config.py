"""What a supervised run can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from forge.config import ConfigError, Section
from forge.data.config import SupervisedConfig
from forge.sections import EvalConfig, GeneratorConfig, RecipeConfig, RewardConfig, ServeConfig, ServiceConfig


@dataclass
class SFTEvalConfig(EvalConfig):
    """Held-out loss and, with `accuracy`, the share of greedy answers that the reward takes for right: conversations
    are continued at the last turn of the assistant. Training ends once accuracy reaches `stop_at`."""

    accuracy: bool = True
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
    dataset: SupervisedConfig
    eval: SFTEvalConfig = field(default_factory=SFTEvalConfig)
    services: Services = field(default_factory=Services)

    def validate(self) -> None:
        super().validate()
        self.validate_offline()
        self.validate_services(self.services)
        self.dataset.bound("max_tokens", self.training.seq_len, "dataset.max_tokens must not exceed training.seq_len")
        exam, unset = self.eval.accuracy and self.eval.problems > 0, SFTEvalConfig()
        unread = (self.reward, self.generator, self.serve, self.services.reward, self.services.generator)
        default = (RewardConfig(), GeneratorConfig(), ServeConfig(), Services().reward, ServiceConfig())
        for bad, message in (
            (self.colocated, "colocated does nothing in this recipe: evaluation is the only time that it generates"),
            (
                not exam and unread != default,
                "reward, generator and serve do nothing: eval.accuracy is false, or eval.problems 0",
            ),
            (
                not exam and (self.eval.stop_at, self.eval.max_tokens) != (unset.stop_at, unset.max_tokens),
                "eval.stop_at and eval.max_tokens do nothing: eval.accuracy is false, or eval.problems 0",
            ),
            (
                exam and self.reward.beyond_accuracy,
                "reward.functions beyond the first and reward.verifiers do nothing here: answers are "
                "right by one function",
            ),
        ):
            if bad:
                raise ConfigError(message)
