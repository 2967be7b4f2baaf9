"""Configuration of the training of a reward model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import NonNegativeFloat

from ..config.sections import ConfigError, Section
from ..data.config import PreferencesConfig
from .schema import TrainingRecipe


class ScoredPairsConfig(PreferencesConfig):
    """Pairs of answers, each of which is scored at its last token."""

    as_scores: ClassVar[bool] = True

    def keys(self) -> Iterator[str]:
        """The dataset's settings besides what the user may set: all that open it unpack this section."""
        yield from super().keys()
        yield "as_scores"


class RewardModelLossSettings(Section):
    """Settings of `forge.losses.BradleyTerryLoss`."""

    center: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's scores, which holds their mean to 0."""


class RewardModelConfig(TrainingRecipe):
    """Training of a reward model."""

    dataset: ScoredPairsConfig
    reward_model: RewardModelLossSettings = RewardModelLossSettings()

    def scalar(self, model: str) -> list[str]:
        """The trained model itself."""
        return [model]

    def _check(self) -> None:
        super()._check()
        self.check_offline()
        if self.trainer.backend == "titan":
            raise ConfigError("trainer.backend titan trains policies: set fsdp for a reward model")
        self.check_services()
        self.check_pairs(self.dataset)
