"""What the training of a reward model can be told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from forge.config import ConfigError, Section
from forge.data.config import PreferencesConfig
from forge.sections import ServiceConfig, TrainingRecipe


@dataclass
class ScoredPairsConfig(PreferencesConfig):
    """Pairs of answers, each of which is scored at its last token."""

    as_scores: ClassVar[bool] = True

    def keys(self) -> Iterator[str]:
        """What the dataset is told besides what the user may set: all that open it unpack this section."""
        yield from super().keys()
        yield "as_scores"


@dataclass
class RewardModelSettings(Section):
    """`center`: how hard the mean of both scores is held to 0, see `forge.losses.BradleyTerryLoss`."""

    center: float = 0.0

    def validate(self) -> None:
        if self.center < 0:
            raise ConfigError("reward_model.center must be at least 0")


@dataclass
class Services(Section):
    trainer: ServiceConfig = field(default_factory=ServiceConfig)
    dataset: ServiceConfig = field(default_factory=lambda: ServiceConfig(share="helpers"))


@dataclass
class RewardModelConfig(TrainingRecipe):
    """`training.batch_size` counts pairs. `dataset.max_tokens` null is half of `training.seq_len`."""

    dataset: ScoredPairsConfig
    reward_model: RewardModelSettings = field(default_factory=RewardModelSettings)
    services: Services = field(default_factory=Services)

    def validate(self) -> None:
        super().validate()
        self.validate_offline()
        if self.trainer.backend == "titan":
            raise ConfigError("trainer.backend titan trains policies: take fsdp for a reward model")
        self.validate_services(self.services)
        self.reward_model.validate()
        self.validate_pairs(self.dataset)
