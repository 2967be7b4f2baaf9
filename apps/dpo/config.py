"""What a DPO run can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from forge.config import ConfigError, Section
from forge.data.config import PreferencesConfig
from forge.sections import ServiceConfig, TrainingRecipe


@dataclass
class DPOSettings(Section):
    """`beta`: how hard the policy is held to the model it starts from; `label_smoothing`: the share of preferences that
    are taken to be wrong. See `forge.losses.DPOLoss`."""

    beta: float = 0.1
    label_smoothing: float = 0.0

    def validate(self) -> None:
        if self.beta <= 0 or not 0 <= self.label_smoothing < 0.5:
            raise ConfigError("dpo.beta must be above 0, and dpo.label_smoothing at least 0 and below 0.5")


@dataclass
class Services(Section):
    trainer: ServiceConfig = field(default_factory=ServiceConfig)
    ref_model: ServiceConfig = field(default_factory=ServiceConfig)
    dataset: ServiceConfig = field(default_factory=lambda: ServiceConfig(share="helpers"))


@dataclass
class DPOConfig(TrainingRecipe):
    """`training.batch_size` counts pairs. `dataset.max_tokens` null is half of `training.seq_len`."""

    dataset: PreferencesConfig
    dpo: DPOSettings = field(default_factory=DPOSettings)
    services: Services = field(default_factory=Services)

    def validate(self) -> None:
        super().validate()
        self.validate_offline()
        self.validate_services(self.services)
        self.dpo.validate()
        self.validate_pairs(self.dataset)
