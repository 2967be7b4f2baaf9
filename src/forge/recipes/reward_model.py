"""A reward model from preferences: the preferred answer of a pair scores higher (Bradley and Terry 1952)."""

from __future__ import annotations

import asyncio

from ..algorithms import BradleyTerryLoss
from ..data.packing import pack
from ..training.step import evaluate_pairs
from . import components
from .checkpoint import RunState
from .components import Job
from .reward_model_config import RewardModelConfig


async def train(cfg: RewardModelConfig, job: Job) -> None:
    """Train a scalar head on pairs of answers."""
    loss = BradleyTerryLoss(**cfg.reward_model)
    record = job.record
    dataset, trainer = await asyncio.gather(
        components.dataset(cfg, job, in_turn=True), components.trainer(cfg, job, loss, head="reward")
    )
    state = RunState(trainer, dataset)
    await state.resume(record)

    async def evaluate() -> dict[str, float]:
        if not job.held_out:
            return {}
        pairs = pack([episode for pair in job.held_out for episode in pair], aggregation="sequence_mean", unit=2)
        return evaluate_pairs(loss, pairs, values=await trainer.predict.route(pairs))

    is_ended = record.start == 0 and await job.end_step(cfg, state, 0, {}, evaluate)
    for step in () if is_ended else range(record.start + 1, cfg.training.steps + 1):
        pairs = await dataset.pairs.route(cfg.training.batch_size)
        metrics = await trainer.train_step.route(pack(pairs, aggregation="sequence_mean", unit=2))
        if await job.end_step(cfg, state, step, metrics, evaluate):
            break
    await trainer.export_model.call(record.model)
