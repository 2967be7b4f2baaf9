"""RL with verifiable rewards: two loops that meet in a replay buffer. `algorithm` chooses the loss and its advantages.

    prompts -> rollouts (policy + environment) -> replay buffer -> training -> new weights -> policy

Rollouts sample a group of episodes for each prompt and store them. Training takes a batch, improves the policy and
hands the new weights to the generators. `async.max_policy_age` says how far rollouts may run ahead: at 0 the two take
turns, above it they overlap; the code is the same.
"""

from __future__ import annotations

import asyncio

from ..rewards.rules import overlong_penalty
from ..runtime.controller import first_to_end
from ..training import credit
from ..types import Group, Sample
from .components import Job, MakeEnv, start_rl
from .rl_config import RLConfig
from .schema import sample_seed


async def train(cfg: RLConfig, job: Job, make_env: MakeEnv | None = None) -> None:
    """Train `job.model` as configured.

    Args:
        make_env: makes the environment; None: the configuration's reward, or its `environment`.
    """
    algorithm = cfg.load_algorithm()
    record = job.record
    rollout_settings = cfg.grpo
    parts = await start_rl(cfg, job, algorithm, make_env)

    async def rollouts() -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await parts.buffer.admit.route()  # waits while max_policy_age versions ahead of the trainer
                tasks.create_task(rollout(await parts.dataset.sample.route()))

    async def rollout(sample: Sample) -> None:
        prompt, target = sample
        seed = sample_seed(cfg.seed, prompt.index)
        episodes = await parts.env.rollout(parts.policy, sample, n=rollout_settings.n_samples, seed=seed)
        await parts.buffer.add.route(Group(episodes, prompt.index, target, prompt.text))

    async def training() -> None:
        for version in record.steps(cfg.training.steps):
            groups = await parts.buffer.sample.route(version, cfg.training.batch_size)
            metrics = await train_step(groups, version)
            step = version + 1
            if step == cfg.training.steps or step % cfg.training.sync_interval == 0:
                await publish(step)
            await job.end_step(cfg, parts.state, step, metrics, evaluate)

    async def train_step(groups: list[Group], version: int) -> dict[str, float]:
        credit.record_rollouts(episode for group in groups for episode in group.episodes)
        overlong_penalty(groups, rollout_settings.max_tokens, rollout_settings.overlong_buffer)
        recorded_groups = record.pick(groups)
        shares = cfg.shares(algorithm)
        batch = credit.make_batch(groups, algorithm, version, recorded_groups, **shares)  # advantages, packing
        if cfg.colocated:
            await parts.policy.release.fanout()
        if parts.reference is not None:
            batch.ref_logprobs = await parts.reference.logprobs.route(batch)
        elif algorithm.needs_reference:
            batch.ref_logprobs = batch.logprobs  # of the generator, see services.ref_model
        if parts.critic is not None:
            batch.values = await parts.critic.predict.route(batch)
        credit.assign(batch, algorithm)  # GAE, KL in the reward, whitening
        metrics = await parts.trainer.train_step.route(batch)
        if parts.critic is not None:
            metrics |= await parts.critic.train_step.route(batch)
        if recorded_groups:
            numbers = await parts.trainer.recorded.route()
            record.log_rollouts(version + 1, recorded_groups, batch, numbers, await parts.buffer.take_dropped.route())
        return metrics

    async def publish(version: int) -> None:
        await parts.trainer.push_weights.call(version)
        await parts.policy.update_weights.fanout(version)
        await parts.buffer.advance.route(version)

    async def evaluate() -> dict[str, float]:
        return await parts.env.evaluate(parts.policy, job.held_out, record.keep_evaluation)

    await publish(record.start)
    if record.start == 0:
        await job.end_step(cfg, parts.state, 0, {}, evaluate)
    await first_to_end(training(), rollouts())
    await parts.trainer.export_model.call(record.model)
