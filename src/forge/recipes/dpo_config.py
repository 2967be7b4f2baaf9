"""Configuration of direct preference optimisation."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from ..config.sections import Section
from ..data.config import PreferencesConfig
from ..runtime.controller import Options
from .schema import TrainingRecipe, TrainingServices


class DPOSettings(Section):
    """Settings of `forge.losses.DPOLoss`."""

    beta: PositiveFloat = 0.1
    """How strongly the policy is held to the model it starts from."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """The share of preferences that are assumed to be wrong."""


class DPOServices(TrainingServices):
    """Placement of each component."""

    ref_model: Options = Options()


class DPOConfig(TrainingRecipe):
    """Direct preference optimisation."""

    dataset: PreferencesConfig
    dpo: DPOSettings = DPOSettings()
    services: DPOServices = DPOServices()

    def _check(self) -> None:
        super()._check()
        self.check_offline()
        self.check_services()
        self.check_pairs(self.dataset)
