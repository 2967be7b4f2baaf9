"""A reward model from preferences: the preferred answer of a pair scores higher (Bradley and Terry 1952)."""

import asyncio
from collections.abc import Iterator
from typing import ClassVar, cast

from pydantic import NonNegativeFloat

from ..algorithms import BradleyTerryLoss
from ..config.sections import ConfigError, Section
from ..data.config import PreferencesConfig
from ..data.packing import pack
from ..training.step import evaluate_pairs
from . import components
from .job import Job, RunState
from .schema import TrainingRecipe


class ScoredPairsConfig(PreferencesConfig):
    """Pairs of answers, each of which is scored at its last token."""

    as_scores: ClassVar[bool] = True

    def keys(self) -> Iterator[str]:
        """Yield the names of the settings, and `as_scores`, which a user cannot set: datasets are opened with all keys
        of their section."""
        yield from super().keys()
        yield "as_scores"


class RewardModelLossSettings(Section):
    """Settings of `forge.losses.BradleyTerryLoss`."""

    center: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's scores, which holds their mean to 0."""


class RewardModelConfig(TrainingRecipe):
    """Training of a reward model."""

    unread: ClassVar[tuple[str, ...]] = (*TrainingRecipe.unread, "training.aggregation")

    dataset: ScoredPairsConfig
    reward_model: RewardModelLossSettings = RewardModelLossSettings()

    def scalar(self, model: str) -> list[str]:
        """Return the trained model itself, in a list."""
        return [model]

    def _check(self) -> None:
        super()._check()
        if self.trainer.backend != "fsdp":
            raise ConfigError(f"trainer.backend {self.trainer.backend} does not support reward models: set fsdp")
        self.check_services()
        self.check_pairs(self.dataset)


async def train(cfg: RewardModelConfig, job: Job) -> None:
    """Train `job.model` with a scalar head on pairs of answers, as a recipe of `forge.recipes.launch`."""
    loss = BradleyTerryLoss(**cfg.reward_model)
    dataset, trainer = await asyncio.gather(
        components.start_dataset(cfg, job, in_turn=True), components.start_trainer(cfg, job, loss, head="reward")
    )
    state = RunState(trainer, dataset)
    await state.resume(job.record)

    async def evaluate() -> dict[str, float]:
        if not job.held_out:
            return {}
        pairs = pack([episode for pair in job.held_out for episode in pair], aggregation="sequence_mean", unit=2)
        return evaluate_pairs(loss, pairs, values=await trainer.predict.route(pairs))

    async def train_step(step: int) -> dict[str, float]:
        batch = pack(await dataset.pairs.route(cfg.training.batch_size), aggregation="sequence_mean", unit=2)
        return cast(dict[str, float], await trainer.train_step.route(batch))

    await job.run_steps(cfg, state, train_step, evaluate)
