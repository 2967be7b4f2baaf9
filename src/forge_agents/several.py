"""Several policies that train in one run: each has generators, a trainer, and weights under its name."""

import asyncio
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from forge.algorithms import Algorithm
from forge.observability import metrics_of, record_metric
from forge.observability.metrics import add_label
from forge.recipes.components import POLICY, Job, start_critic, start_reference, start_rl_policy, start_rl_trainer
from forge.recipes.rl_config import RLConfig
from forge.runtime.controller.handle import Handle
from forge.types import Batch

from .models import place_part, scoring_parts


class SeveralPoliciesConfig(RLConfig):
    """Reinforcement learning of several policies, as `apps.selfplay.main` does it."""

    trains_several: ClassVar[bool] = True


@dataclass(frozen=True)
class Learner:
    """A policy that trains.

    Args:
        name: by which agents ask for it, and under which its weights are published.
        policy: a service of `forge.actors.Generator`.
        trainer: of `forge.actors.Trainer`.
        reference: a service of `forge.actors.ReferenceModel`, where the algorithm needs one, of this policy's start.
        critic: of `forge.actors.Trainer`, where the algorithm needs one.
    """

    name: str
    policy: Handle
    trainer: Handle
    reference: Handle | None = None
    critic: Handle | None = None

    def metrics(self) -> AbstractContextManager[None]:
        """Prefix the metrics of a block with its name, `rival/reward`; the run's own policy has no prefix."""
        return nullcontext() if self.name == POLICY else metrics_of(self.name)

    def trainers(self) -> dict[str, Handle]:
        """Return its trainers by the folders of their checkpoints."""
        critics = {} if self.critic is None else {f"models.{self.name}.critic": self.critic}
        return {f"models.{self.name}.trainer": self.trainer, **critics}

    async def train_step(self, batch: Batch) -> dict[str, float]:
        """Train one step of the policy and its critic; returns metrics by their full names, `rival/train/loss`."""
        metrics = await self.trainer.train_step.route(batch)
        if self.critic is not None:
            metrics |= await self.critic.train_step.route(batch)
        with self.metrics():
            return {add_label(name): value for name, value in metrics.items()}

    async def publish(self, version: int) -> None:
        """Publish its weights as a version, and give them to its generators."""
        await self.trainer.push_weights.call(version)
        await self.policy.update_weights.fanout(version)
        with self.metrics():
            record_metric("policy_version", version)


async def start_learners(cfg: RLConfig, job: Job, algorithm: Algorithm) -> dict[str, Learner]:
    """Start the additional models of a configuration that train, by name."""
    names = [name for name, further in cfg.models.items() if further.trains]
    learners = await asyncio.gather(*(start_learner(cfg, job, algorithm, name) for name in names))
    return {learner.name: learner for learner in learners}


async def start_learner(cfg: RLConfig, job: Job, algorithm: Algorithm, name: str) -> Learner:
    """Start the generators, the trainer, and the critic and reference model as far as it has its own."""
    further = cfg.models[name]
    own_job = job if further.model in (None, cfg.model) else job._replace(model=further.model)
    parts = scoring_parts(cfg, further)
    place = partial(place_part, further, name)

    async def start_part(part: str) -> Handle | None:
        if part not in parts:
            return None
        if part == "critic":
            return await start_critic(cfg, own_job.model, job, f"models.{name}.critic", options=place("critic"))
        return await start_reference(cfg, own_job.model, cfg.grpo.temperature, options=place("ref_model"))

    policy, trainer, value_model, reference_model = await asyncio.gather(
        start_rl_policy(cfg, own_job, name, options=place("generator")),
        start_rl_trainer(
            cfg,
            own_job,
            algorithm,
            name,
            folder=f"models.{name}.trainer",
            options=place("trainer"),
        ),
        start_part("critic"),
        start_part("ref_model"),
    )

    return Learner(name, policy, trainer, reference_model, value_model)
