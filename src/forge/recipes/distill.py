"""On-policy distillation: the student samples, and its teacher scores every token of it.

Sampling and training take turns. Rewards play no part in training: they decide how many held-out answers are right.
"""

import asyncio
from typing import Any, ClassVar

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from ..algorithms import Distill
from ..config.sections import Section
from ..data.config import DatasetConfig
from ..data.packing import pack
from ..engines.interface import check_length
from ..envs.group import SingleTurnEnv
from ..runtime.controller import Placement
from ..training import credit
from ..types import Episode
from . import components, rules
from .checkpoint import RunState
from .components import Job
from .schema import RecipeConfig, SamplingServices, sample_seed, with_room


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

    ref_model: Placement = Placement()


class DistillConfig(RecipeConfig):
    """On-policy distillation. `reward` decides what counts as right where the student is evaluated."""

    unread: ClassVar[tuple[str, ...]] = ("training.sync_interval",)

    dataset: DatasetConfig
    distill: DistillSettings
    services: DistillServices = DistillServices()

    def others(self) -> dict[str, str]:
        """Return the teacher, as {"distill.teacher": folder or hub id}."""
        return {"distill.teacher": self.distill.teacher}

    def reach(self, config: Any) -> int:
        """Return the maximum number of tokens of a trained sequence, which is also bounded by the generator's."""
        return min(super().reach(config), check_length(config, self.generator.max_seq_len))

    @property
    def shares(self) -> dict[str, Any]:
        """Return the arguments `aggregation` and `horizon` of `forge.data.packing.pack`: how tokens share the loss."""
        aggregation = self.training.aggregation or "token_mean"
        horizon = self.distill.max_tokens if aggregation == "fixed_horizon" else None
        return {"aggregation": aggregation, "horizon": horizon}

    def _check(self) -> None:
        super()._check()
        self.check_services()
        room = self.training.seq_len - self.distill.max_tokens
        together = f"dataset.max_prompt_tokens and distill.max_tokens together exceed training.seq_len: at most {room}"
        rules.check_rules(rules.DISTILL_RULES, self)
        self.dataset.limit("max_prompt_tokens", room, together)

    def data(self, model: str) -> DatasetConfig:
        """Return a copy of the section `dataset` whose prompts leave space for a completion in the model's sequences.
        ConfigError: there is none."""
        return self.reward.with_columns(with_room(self, "distill", model))


async def train(cfg: DistillConfig, job: Job) -> None:
    """Train `job.model`, the student, on its own samples scored by the teacher, as a recipe of
    `forge.recipes.launch`."""
    settings = cfg.distill
    loss = Distill(settings.clip_high, entropy_coef=cfg.training.entropy_coef)
    sampling: dict[str, Any] = {"temperature": settings.temperature, "max_tokens": settings.max_tokens}
    training: dict[str, Any] = {"temperature": settings.temperature, "max_policy_age": 0}
    dataset, (student, trainer), teacher, reward = await asyncio.gather(
        components.start_dataset(cfg, job, in_turn=True),
        components.start_in_turn(
            cfg.colocated,
            lambda: components.start_generator(cfg, job.model, store=job.store, **sampling),
            lambda: components.start_trainer(cfg, job, loss, store=job.store, **training),
        ),
        components.start_reference(cfg, settings.teacher, settings.temperature),
        components.start_reward(cfg),
    )
    state = RunState(trainer, dataset)
    await state.resume(job.record)

    async def sample_episodes() -> list[Episode]:
        samples = await asyncio.gather(*(dataset.sample.route() for _ in range(cfg.training.batch_size)))
        prompts = sorted((sample.prompt for sample in samples), key=lambda prompt: prompt.index)
        answers = await asyncio.gather(
            *(student.generate.route(p, n=settings.n_samples, seed=sample_seed(cfg.seed, p.index)) for p in prompts)
        )
        return [Episode(completion, advantage=0.0) for completions in answers for completion in completions]

    async def publish_version(version: int) -> None:
        await trainer.push_weights.call(version)
        await student.update_weights.fanout(version)

    async def train_step(step: int) -> dict[str, float]:
        episodes = await sample_episodes()
        credit.record_rollouts(episodes)
        batch = pack(episodes, **cfg.shares)
        batch.groups = np.arange(len(episodes)) // settings.n_samples
        if cfg.colocated:
            await student.release.fanout()

        batch.ref_logprobs = await teacher.logprobs.route(batch)
        metrics: dict[str, float] = await trainer.train_step.route(batch)
        await publish_version(step)
        return metrics

    async def evaluate_student() -> dict[str, float]:
        env = SingleTurnEnv(reward, with_tokens=cfg.reward.reads_tokens)
        return await env.evaluate(student, job.held_out, job.record.keep_evaluation)

    await publish_version(job.record.start)
    await job.run_steps(cfg, state, train_step, evaluate_student)
