"""Training of several policies in one run: each has its own generators, trainer, and published weights."""

import asyncio
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from forge.algorithms import Algorithm
from forge.observability.metrics import add_label, metrics_of, record_metric
from forge.recipes.components import POLICY, Job, start_critic, start_reference, start_rl_policy, start_rl_trainer
from forge.recipes.rl_config import RLConfig
from forge.runtime.controller.handle import Handle
from forge.types import Batch

from .models import place_part, scoring_parts


class SeveralPoliciesConfig(RLConfig):
    """The configuration of recipes that train several policies, such as `apps.selfplay.main`."""

    trains_several: ClassVar[bool] = True


@dataclass(frozen=True)
class Learner:
    """An additional policy that trains, and its services.

    Args:
        name: the name by which agents ask for it, and under which its weights are published.
        policy: a service of `forge.actors.Generator`.
        trainer: a `forge.actors.Trainer`.
        reference: a service of `forge.actors.ReferenceModel` with the policy's first weights; None: the policy has no
            reference model, or shares the run's.
        critic: a `forge.actors.Trainer`; None: the algorithm needs no critic.
    """

    name: str
    policy: Handle
    trainer: Handle
    reference: Handle | None = None
    critic: Handle | None = None

    def metrics(self) -> AbstractContextManager[None]:
        """Return a context in which metrics are prefixed with the policy's name, such as `rival/reward`.

        The run's own policy has no prefix.
        """
        return nullcontext() if self.name == POLICY else metrics_of(self.name)

    def trainers(self) -> dict[str, Handle]:
        """Return the policy's trainer and critic, keyed by their checkpoint folders: "models.rival.trainer"."""
        critics = {} if self.critic is None else {f"models.{self.name}.critic": self.critic}
        return {f"models.{self.name}.trainer": self.trainer, **critics}

    async def train_step(self, batch: Batch) -> dict[str, float]:
        """Train the policy and its critic for one step, and return metrics by full name, such as `rival/train/loss`."""
        metrics = await self.trainer.train_step.route(batch)
        if self.critic is not None:
            metrics |= await self.critic.train_step.route(batch)
        with self.metrics():
            return {add_label(name): value for name, value in metrics.items()}

    async def publish(self, version: int) -> None:
        """Publish the trainer's weights as a version, and load them into the policy's generators."""
        await self.trainer.push_weights.call(version)
        await self.policy.update_weights.fanout(version)
        with self.metrics():
            record_metric("policy_version", version)


async def start_learners(cfg: RLConfig, job: Job, algorithm: Algorithm) -> dict[str, Learner]:
    """Start the services of all additional models that train, and return the learners by name."""
    names = [name for name, model_config in cfg.models.items() if model_config.trains]
    learners = await asyncio.gather(*(start_learner(cfg, job, algorithm, name) for name in names))
    return {learner.name: learner for learner in learners}


async def start_learner(cfg: RLConfig, job: Job, algorithm: Algorithm, name: str) -> Learner:
    """Start an additional policy: its generators and trainer, and a critic and a reference model if it has its own."""
    model_config = cfg.models[name]
    own_job = job if model_config.model in (None, cfg.model) else job._replace(model=model_config.model)
    scorers = scoring_parts(cfg, model_config)
    options_of = partial(place_part, model_config, name)

    async def start_scorer(part: str) -> Handle | None:
        if part not in scorers:
            return None
        if part == "critic":
            return await start_critic(cfg, own_job.model, job, f"models.{name}.critic", options=options_of("critic"))
        return await start_reference(cfg, own_job.model, cfg.grpo.temperature, options=options_of("ref_model"))

    policy, trainer, value_model, reference_model = await asyncio.gather(
        start_rl_policy(cfg, own_job, name, options=options_of("generator")),
        start_rl_trainer(
            cfg,
            own_job,
            algorithm,
            name,
            folder=f"models.{name}.trainer",
            options=options_of("trainer"),
        ),
        start_scorer("critic"),
        start_scorer("ref_model"),
    )

    return Learner(name, policy, trainer, reference_model, value_model)
