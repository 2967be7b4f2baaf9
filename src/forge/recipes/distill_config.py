"""Configuration of on-policy distillation."""

from __future__ import annotations

from typing import Any

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from ..config.sections import Section
from ..data.config import DatasetConfig
from ..engines.interface import check_length
from ..runtime.controller import Options
from . import preflight
from .lengths import with_room
from .schema import RecipeConfig, SamplingServices


class DistillSettings(Section):
    """Sampling, and settings of `forge.losses.DistillLoss`."""

    teacher: str
    """Folder or hub id of a model with the student's tokens."""
    n_samples: PositiveInt = 4
    """Completions of each prompt, drawn from the student."""
    temperature: PositiveFloat = 1.0
    """Of sampling; student and teacher are scored at it."""
    max_tokens: PositiveInt = 512
    """Most tokens of a completion."""
    clip_high: NonNegativeFloat = 1.0
    """Upper bound of the importance ratio, 1 + high."""


class DistillServices(SamplingServices):
    """Placement of each component; `ref_model` is the teacher."""

    ref_model: Options = Options()


class DistillConfig(RecipeConfig):
    """On-policy distillation. `reward` decides what counts as right where the student is evaluated."""

    dataset: DatasetConfig
    distill: DistillSettings
    services: DistillServices = DistillServices()

    def others(self) -> dict[str, str]:
        """The teacher."""
        return {"distill.teacher": self.distill.teacher}

    def reach(self, config: Any) -> int:
        """The most tokens of a sequence that is trained, which the generator bounds as well."""
        return min(super().reach(config), check_length(config, self.generator.max_seq_len))

    @property
    def shares(self) -> dict[str, Any]:
        """Settings of `forge.data.packing.pack`: how tokens share the loss."""
        aggregation = self.training.aggregation or "token_mean"
        return {
            "aggregation": aggregation,
            "horizon": self.distill.max_tokens if aggregation == "fixed_horizon" else None,
        }

    def _check(self) -> None:
        super()._check()
        self.check_services()
        room = self.training.seq_len - self.distill.max_tokens
        together = f"dataset.max_prompt_tokens and distill.max_tokens together exceed training.seq_len: at most {room}"
        preflight.check(preflight.DISTILL_RULES, self)
        self.dataset.bound("max_prompt_tokens", room, together)

    def data(self, model: str) -> DatasetConfig:
        """The data, whose prompts leave room for a completion. ConfigError: there is none."""
        return self.reward.with_columns(with_room(self, "distill", model))
