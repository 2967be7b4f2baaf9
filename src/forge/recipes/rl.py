"""RL with verifiable rewards: two loops that meet in a replay buffer. `algorithm` chooses the loss and its advantages.

    prompts -> rollouts (policy + environment) -> replay buffer -> training -> new weights -> policy

Rollouts sample a group of episodes for each prompt and store them. Training takes a batch, improves the policy and
hands the new weights to the generators. `async.max_policy_age` says how far rollouts may run ahead: at 0 the two take
turns, above it they overlap; the code is the same.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ..rewards.rules import overlong_penalty
from ..training import credit
from ..types import Batch, Group, Sample
from .components import Job, MakeEnv, start_rl
from .loop import Frame, begin_schedule
from .rl_config import RLConfig
from .schema import sample_seed


class Loop(Frame):
    """The loops of a run over its components, `parts`. A subclass may replace each method (docs/howto/own_loop.md)."""

    async def rollouts(self) -> None:
        """Start a rollout for each prompt, as far ahead as the buffer admits."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self.parts.buffer.admit.route()  # waits while max_policy_age versions ahead of the trainer
                tasks.create_task(self.rollout(await self.parts.dataset.sample.route()))

    async def rollout(self, sample: Sample) -> None:
        """Play the group of one prompt, and store it."""
        prompt = sample.prompt
        seed = sample_seed(self.cfg.seed, prompt.index)
        episodes = await self.parts.env.rollout(self.parts.policy, sample, n=self.cfg.grpo.n_samples, seed=seed)
        await self.parts.buffer.add.route(Group(episodes, prompt.index, sample.target, prompt.text))

    async def training(self) -> None:
        """Take the groups of each step from the buffer, and train on them."""
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
        """Return whether generators get the weights of this version."""
        return version == self.cfg.training.steps or version % self.cfg.training.sync_interval == 0

    async def train_step(self, groups: list[Group], version: int) -> dict[str, float]:
        """Train one step on groups; returns its metrics."""
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
            numbers = await self.parts.trainer.recorded.route()
            self.record.log_rollouts(version + 1, recorded_groups, batch, numbers, dropped)
        return metrics

    async def make_batch(
        self, groups: list[Group], version: int, recorded_groups: list[Group], parts: Any = None
    ) -> Batch:
        """Compute advantages, pack, and add what reference and critic say: the run's own, or `parts`'."""
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


async def train(cfg: RLConfig, job: Job, make_env: MakeEnv | None = None, loop: type[Loop] = Loop) -> None:
    """Train `job.model` as configured. `make_env` makes the environment instead of what the configuration names."""
    begin_schedule(job, loop, make_env)
    await loop(cfg, job, await start_rl(cfg, job, cfg.load_algorithm(), make_env)).run()
