"""RL with verifiable rewards: two loops that share a replay buffer. `algorithm` chooses the loss and its advantages.

    prompts -> rollouts (policy + environment) -> replay buffer -> training -> new weights -> policy

Rollouts sample a group of episodes for each prompt and store them. Training takes a batch, improves the policy and
hands the new weights to the generators. `async.max_policy_age` says how far rollouts may run ahead: at 0 the two take
turns, above it they overlap; the code is the same.
"""

import asyncio
from typing import Any

from ..observability.metrics import phase
from ..observability.schedule import StepEntry
from ..rewards.rules import overlong_penalty
from ..runtime.controller import first_to_end
from ..training import credit
from ..types import Batch, Group, Sample
from .components import POLICY, Job, MakeEnv, RLComponents, start_rl
from .rl_config import RLConfig
from .schema import sample_seed


class Loop:
    """The two loops of a run, which overlap: `rollouts` fills the buffer, and `training` empties it.

    A subclass may replace each method (docs/own_loop.md).

    Args:
        parts: the started components.

    Attributes:
        version: of the trainer's weights, the number of steps that they are trained for.
        published_version: of the generators' weights; -1 before the first publication.
    """

    def __init__(self, cfg: RLConfig, job: Job, parts: RLComponents) -> None:
        self.cfg, self.job, self.parts = cfg, job, parts
        self.record, self.algorithm = job.record, parts.algorithm
        self.version = self.record.start
        self.published_version = -1

    async def rollouts(self) -> None:
        """Start a rollout for each prompt without end, as far ahead of the trainer as the buffer admits."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self.parts.buffer.admit.route()  # waits while max_policy_age versions ahead of the trainer
                tasks.create_task(self.rollout(await self.parts.dataset.sample.route()))

    async def rollout(self, sample: Sample) -> None:
        """Sample a group of episodes for one prompt, and store it in the buffer."""
        prompt = sample.prompt
        seed = sample_seed(self.cfg.seed, prompt.index)
        episodes = await self.parts.env.rollout(self.parts.policy, sample, n=self.cfg.grpo.n_samples, seed=seed)
        await self.parts.buffer.add.route(Group(episodes, prompt.index, sample.target, str(prompt)))

    async def training(self) -> None:
        """Train on the buffer's groups step by step, and publish and checkpoint the weights when due."""
        for version in self.record.steps(self.cfg.training.steps):
            groups = await self.parts.buffer.sample.route(version, self.cfg.training.batch_size)
            await self.job.hooks.rollouts(version + 1, groups)
            metrics = await self.train_step(groups, version)
            self.version += 1
            if self.is_published(self.version):
                await self.publish(self.version)
            if await self.job.end_step(self.cfg, self.parts.state, self.version, metrics, self.evaluate):
                return

    def is_published(self, version: int) -> bool:
        """Return whether the weights of this version are published to the generators."""
        return version == self.cfg.training.steps or version % self.cfg.training.sync_interval == 0

    async def train_step(self, groups: list[Group], version: int) -> dict[str, float]:
        """Train one step on groups, record them, and return the step's metrics.

        Args:
            version: of the weights before the step.
        """
        entry = self.record.schedule_entry(version + 1, groups)
        credit.record_rollouts(episode for group in groups for episode in group.episodes)

        recorded_groups = self.record.pick(groups)
        batch = await self.make_batch(groups, version, recorded_groups)
        metrics = await self.parts.trainer.train_step.route(batch)
        if self.parts.critic is not None:
            metrics |= await self.parts.critic.train_step.route(batch)

        dropped = await self.parts.buffer.take_dropped.route()
        self.log_schedule(entry, dropped, metrics)
        if recorded_groups:
            token_values = await self.parts.trainer.recorded.route()
            self.record.log_rollouts(version + 1, recorded_groups, batch, token_values, dropped)

        return metrics

    async def make_batch(
        self, groups: list[Group], version: int, recorded_groups: list[Group], parts: Any = None
    ) -> Batch:
        """Return the groups packed as a batch, with advantages, reference log-probabilities and values.

        Args:
            version: of the weights in training.
            recorded_groups: the groups whose tokens are recorded.
            parts: has `reference` and `critic` of another policy; None: the run's own components.
        """
        parts = parts or self.parts
        overlong_penalty(groups, self.cfg.grpo.max_tokens, self.cfg.grpo.overlong_buffer)
        shares = self.cfg.shares(self.algorithm)
        batch = credit.make_batch(groups, self.algorithm, version, recorded_groups, **shares)  # advantages, packing

        if self.cfg.colocated:
            await self.parts.policy.release.fanout()
        if parts.reference is not None:
            batch.ref_logprobs = await parts.reference.logprobs.route(batch)
        elif self.algorithm.needs_reference:
            batch.ref_logprobs = batch.logprobs  # of the generator, see services.ref_model

        if parts.critic is not None:
            batch.values = await parts.critic.predict.route(batch)

        credit.assign_credit(batch, self.algorithm)  # GAE, KL in the reward, whitening
        return batch

    async def publish(self, version: int) -> None:
        """Publish the trainer's weights as this version to the generators, and admit the rollouts that may use them."""
        await self.parts.trainer.push_weights.call(version)
        await self.parts.policy.update_weights.fanout(version)
        await self.parts.advance(version)
        self.published_version = version
        with phase("log_rollouts"):
            self.record.log_published(version, self.job.store.manifest(POLICY, version).digest)

    def log_schedule(self, entry: StepEntry, dropped: list[tuple[str, Group]], metrics: dict[str, float]) -> None:
        """Write to the run's schedule what a step trained on, and the groups that were dropped."""
        self.record.log_schedule(entry, dropped, metrics)

    async def evaluate(self) -> dict[str, float]:
        """Return the metrics of the held-out problems that are due, measured with the trainer's weights."""
        # They differ from the generators' if the run ends between two publications.
        if self.published_version != self.version:
            await self.publish(self.version)
        return await self.parts.evaluation.run(self.parts.policy, self.version)

    async def run(self) -> None:
        """Run from start to end: publish the first weights, evaluate, train, and export the model."""
        await self.publish(self.version)
        if not await self.job.begin(self.cfg, self.parts.state, self.evaluate):
            await first_to_end(self.training(), self.rollouts())
        await self.export()

    async def export(self) -> None:
        """Write the model in Hugging Face format to the run's folder."""
        await self.parts.trainer.export_model.call(self.record.model)


async def train(cfg: RLConfig, job: Job, make_env: MakeEnv | None = None, loop: type[Loop] = Loop) -> None:
    """Train `job.model` by reinforcement learning, as a recipe of `forge.recipes.launch`.

    Args:
        make_env: makes the environment, instead of the configuration.
        loop: the class whose `run` is the run.
    """
    # Python objects that a replay would need and cannot read from a file.
    objects = {"an environment": make_env, "on_step": job.hooks.on_step, "on_rollouts": job.hooks.on_rollouts}
    passed_objects = [name for name, value in objects.items() if value is not None]
    job.record.begin_schedule(f"{loop.__module__}:{loop.__qualname__}", passed_objects)

    await loop(cfg, job, await start_rl(cfg, job, cfg.load_algorithm(), make_env)).run()
