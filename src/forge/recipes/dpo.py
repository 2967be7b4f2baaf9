"""Direct preference optimisation: training makes the preferred one of two answers more likely than the other.

The reference is the model that training starts from. It needs no reward model and no sampling, only pairs of answers.
"""

import asyncio
from collections.abc import Sequence
from typing import ClassVar, cast

from pydantic import Field, PositiveFloat

from ..algorithms import DPOLoss
from ..config.sections import Section
from ..data.config import PreferencesConfig
from ..data.packing import pack
from ..runtime.controller import Placement
from ..training.step import evaluate_pairs
from ..types import Batch, Episode
from . import components
from .job import Job, RunState
from .schema import TrainingRecipe, TrainingServices


class DPOSettings(Section):
    """Settings of `forge.losses.DPOLoss`."""

    beta: PositiveFloat = 0.1
    """How strongly the policy is held to the model it starts from."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """The share of preferences that are assumed to be wrong."""


class DPOServices(TrainingServices):
    """Placement of each component."""

    ref_model: Placement = Placement()


class DPOConfig(TrainingRecipe):
    """Direct preference optimisation."""

    unread: ClassVar[tuple[str, ...]] = (*TrainingRecipe.unread, "training.aggregation")

    dataset: PreferencesConfig
    dpo: DPOSettings = DPOSettings()
    services: DPOServices = DPOServices()

    def _check(self) -> None:
        super()._check()
        self.check_services()
        self.check_pairs(self.dataset)


async def train(cfg: DPOConfig, job: Job) -> None:
    """Train `job.model` on pairs of answers against a frozen reference, as a recipe of `forge.recipes.launch`."""
    loss = DPOLoss(**cfg.dpo)
    dataset, trainer, reference = await asyncio.gather(
        components.start_dataset(cfg, job, in_turn=True),
        components.start_trainer(cfg, job, loss),
        components.start_reference(cfg, job.model),
    )
    state = RunState(trainer, dataset)
    await state.resume(job.record)

    async def pack_pairs(pairs: Sequence[Episode]) -> Batch:
        batch = pack(pairs, aggregation="sequence_mean", unit=2)
        batch.ref_logprobs = await reference.logprobs.route(batch)
        return batch

    # The reference scores held-out pairs once: its weights never change.
    held_out = await pack_pairs([episode for pair in job.held_out for episode in pair]) if job.held_out else None

    async def evaluate() -> dict[str, float]:
        if held_out is None:
            return {}
        return evaluate_pairs(loss, held_out, logprobs=await trainer.logprobs.route(held_out))

    async def train_step(step: int) -> dict[str, float]:
        batch = await pack_pairs(await dataset.pairs.route(cfg.training.batch_size))
        return cast(dict[str, float], await trainer.train_step.route(batch))

    await job.run_steps(cfg, state, train_step, evaluate)
