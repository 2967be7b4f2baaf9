"""What a distillation run can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forge.config import ConfigError, Section
from forge.data.config import DatasetConfig
from forge.sections import RecipeConfig, RewardConfig, ServiceConfig


@dataclass
class DistillSettings(Section):
    """`teacher`: a folder or hub id of a model with the student's tokens. `n_samples` completions of each prompt are
    drawn from the student at `temperature`, which all three, sampler, student and teacher, are scored at. `clip_high`
    is of `forge.losses.DistillLoss`."""

    teacher: str
    n_samples: int = 4
    temperature: float = 1.0
    max_tokens: int = 512
    clip_high: float = 1.0

    def validate(self) -> None:
        for bad, message in (
            (self.n_samples < 1, "n_samples must be at least 1"),
            (self.temperature <= 0, "temperature must be positive: a greedy student shows one answer alone"),
            (self.max_tokens < 1, "max_tokens must be at least 1"),
            (self.clip_high < 0, "clip_high must be at least 0"),
        ):
            if bad:
                raise ConfigError(f"distill.{message}")


@dataclass
class Services(Section):
    generator: ServiceConfig = field(default_factory=ServiceConfig)
    trainer: ServiceConfig = field(default_factory=ServiceConfig)
    ref_model: ServiceConfig = field(default_factory=ServiceConfig)
    reward: ServiceConfig = field(default_factory=lambda: ServiceConfig(share="helpers"))
    dataset: ServiceConfig = field(default_factory=lambda: ServiceConfig(share="helpers"))


@dataclass
class DistillConfig(RecipeConfig):
    """The teacher is `services.ref_model`; `reward` says what counts as right where the student is evaluated."""

    dataset: DatasetConfig
    distill: DistillSettings = field(kw_only=True)
    services: Services = field(default_factory=Services)

    def others(self) -> dict[str, str]:
        return {"distill.teacher": self.distill.teacher}

    @property
    def shares(self) -> dict[str, Any]:
        """How tokens share the loss, for `forge.data.packing.pack`."""
        aggregation = self.training.aggregation or "token_mean"
        return {
            "aggregation": aggregation,
            "horizon": self.distill.max_tokens if aggregation == "fixed_horizon" else None,
        }

    def validate(self) -> None:
        super().validate()
        self.validate_services(self.services)
        self.distill.validate()
        room = self.training.seq_len - self.distill.max_tokens
        together = f"dataset.max_prompt_tokens and distill.max_tokens together exceed training.seq_len: at most {room}"
        for bad, message in (
            (room < 1, "training.seq_len must exceed distill.max_tokens"),
            (
                self.training.sync_interval != 1,
                "training.sync_interval does nothing in this recipe: the student samples with its newest weights",
            ),
            (
                not self.eval.problems and (self.reward, self.services.reward) != (RewardConfig(), Services().reward),
                "reward and services.reward do nothing: eval.problems is 0, and the student learns from its teacher",
            ),
            (
                self.reward.beyond_accuracy,
                "reward.functions beyond the first and reward.verifiers do nothing here: answers are "
                "right by one function",
            ),
        ):
            if bad:
                raise ConfigError(message)
        self.dataset.bound("max_prompt_tokens", room, together)
