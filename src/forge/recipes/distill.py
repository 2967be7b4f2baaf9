"""On-policy distillation: the student samples, and its teacher scores every token of it.

Sampling and training take turns. Rewards play no part in training: they decide how many held-out answers are right.
"""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np

from ..algorithms import Distill
from ..data.packing import pack
from ..envs.group import SingleTurnEnv
from ..training import credit
from ..types import Episode
from . import components
from .checkpoint import RunState
from .components import Job
from .distill_config import DistillConfig
from .schema import sample_seed


async def train(cfg: DistillConfig, job: Job) -> None:
    """Sample from the student, score its tokens with the teacher, and train (on-policy distillation)."""
    settings = cfg.distill
    record = job.record
    loss = Distill(settings.clip_high, entropy_coef=cfg.training.entropy_coef)
    temperature = settings.temperature
    dataset, (student, trainer), teacher, reward = await asyncio.gather(
        components.dataset(cfg, job, in_turn=True),
        components.policy_and_trainer(
            cfg.colocated,
            partial(components.generator, cfg, job, temperature=temperature, max_tokens=settings.max_tokens),
            partial(components.trainer, cfg, job, loss, store=job.store, temperature=temperature, max_policy_age=0),
        ),
        components.reference(cfg, settings.teacher, temperature),
        components.reward(cfg),
    )
    state = RunState(trainer, dataset)
    await state.resume(record)

    async def sampled() -> list[Episode]:
        samples = await asyncio.gather(*(dataset.sample.route() for _ in range(cfg.training.batch_size)))
        prompts = sorted((sample.prompt for sample in samples), key=lambda prompt: prompt.index)
        answers = await asyncio.gather(
            *(student.generate.route(p, n=settings.n_samples, seed=sample_seed(cfg.seed, p.index)) for p in prompts)
        )
        return [Episode(completion, advantage=0.0) for completions in answers for completion in completions]

    async def publish(version: int) -> None:
        await trainer.push_weights.call(version)
        await student.update_weights.fanout(version)

    async def evaluate() -> dict[str, float]:
        return await SingleTurnEnv(reward, with_tokens=cfg.reward.reads_tokens).evaluate(
            student, job.held_out, job.record.keep_evaluation
        )

    await publish(record.start)
    is_ended = record.start == 0 and await job.end_step(cfg, state, 0, {}, evaluate)
    for step in () if is_ended else range(record.start + 1, cfg.training.steps + 1):
        episodes = await sampled()
        credit.record_rollouts(episodes)
        batch = pack(episodes, **cfg.shares)
        batch.groups = np.arange(len(episodes)) // settings.n_samples
        if cfg.colocated:
            await student.release.fanout()
        batch.ref_logprobs = await teacher.logprobs.route(batch)
        metrics = await trainer.train_step.route(batch)
        await publish(step)
        if await job.end_step(cfg, state, step, metrics, evaluate):
            break
    await trainer.export_model.call(record.model)
