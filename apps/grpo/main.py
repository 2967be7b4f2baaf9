"""RL with verifiable rewards: two loops that meet in a replay buffer. `algorithm` chooses the loss and its advantages.

    python -m apps.grpo.main --config apps/grpo/tiny.yaml --algorithm dapo --training.steps 50

Rollouts sample a group of completions for each prompt, score them against one another and store them. Training takes
a batch, improves the policy and hands the new weights to the generators. `async.max_policy_age` says how far rollouts
may run ahead: at 0 the two take turns, above it they overlap; the code below is the same.
"""

import asyncio
from typing import Any

from apps.grpo.config import GRPOConfig
from forge import actors, start
from forge.actors import Agent, Window, evaluate
from forge.controller import drain_metrics, first_to_end
from forge.data.packing import pack
from forge.data.rewards import overlong_penalty
from forge.losses import Algorithm, ValueLoss
from forge.observability import Run, phase
from forge.recipe import launch
from forge.store import VersionStore
from forge.training import credit
from forge.types import Episode, Group, Sample


async def main(
    cfg: GRPOConfig,
    model: str,
    held_out: list[Sample],
    record: Run,
    store: VersionStore,
    algorithm: Algorithm | None = None,
    agent: Agent | None = None,  # plays in an environment, which scores in place of `reward`
) -> None:
    algorithm = algorithm or cfg.load_algorithm()
    algo, batch_size, max_policy_age = cfg.grpo, cfg.training.batch_size, cfg.async_.max_policy_age
    reward: Any  # None where an agent plays
    (dataset, policy, trainer, buffer), (reward, reference, critic) = await asyncio.gather(
        asyncio.gather(
            start.dataset(cfg, model, record),
            start.generator(cfg, model, store, temperature=algo.temperature, max_tokens=algo.max_tokens),
            start.trainer(
                cfg, model, record, algorithm, store=store, temperature=algo.temperature, max_policy_age=max_policy_age
            ),
            start.replay_buffer(cfg, record, batch_size, replace=algorithm.dynamic_sampling),
        ),
        asyncio.gather(
            start.if_needed(agent is None, start.reward(cfg)),
            start.if_needed(algorithm.needs_reference, start.reference(cfg, algo.reference or model, algo.temperature)),
            start.if_needed(algorithm.needs_critic, start.critic(cfg, model, record, ValueLoss(cfg.critic.clip))),
        ),
    )
    state = (trainer, dataset, buffer, critic, reward if cfg.reward.learns else None)
    window = Window(batch_size, max_policy_age, cfg.training.steps, record.start, await actors.resume(record, *state))

    async def rollout() -> None:
        prompt, target = sample = await dataset.sample.route()
        seed = cfg.seed + 1_000_003 * prompt.index
        if agent is not None:
            episodes = await agent.group(policy, sample, algo.n_samples, seed)
        else:
            completions = await policy.generate.route(prompt, n=algo.n_samples, seed=seed)
            rewards = await reward.evaluate_group.route(prompt, [c.text for c in completions], target)
            episodes = [Episode(completion, r) for completion, r in zip(completions, rewards, strict=True)]
        if not await buffer.add.route(Group(episodes, prompt.index, target, prompt.text)):
            await window.refund(1)

    async def continuous_rollouts() -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await window.admit()
                tasks.create_task(rollout())

    async def continuous_training() -> None:
        for version in record.steps(cfg.training.steps):
            await window.refund(await buffer.expire.route(version))
            groups = await buffer.sample.route(version, batch_size)
            record.log_rollouts(version + 1, groups[: cfg.metrics.rollouts])
            metrics = await learn(groups, version)
            step, last = version + 1, version + 1 == cfg.training.steps
            if last or step % cfg.training.sync_interval == 0:
                await publish(step)
            if last or (cfg.eval.every and step % cfg.eval.every == 0):
                metrics |= await evaluate(policy, agent or reward, held_out)
            record.log(step, await drain_metrics(), **metrics)
            if cfg.checkpoint.due(step, last):
                await actors.save(record, *state, **cfg.checkpoint.how)

    async def learn(groups: list[Group], version: int) -> dict[str, float]:
        with phase("pack"):
            credit.record_age(groups, version)
            overlong_penalty([e for g in groups for e in g.episodes], algo.max_tokens, algo.overlong_buffer)
            batch = pack(credit.learnable(groups, algorithm), **cfg.shares(algorithm))
            batch = credit.skip_idle(batch, algorithm)
        if cfg.colocated:
            await policy.release.fanout()
        if reference is not None:
            batch.ref_logprobs = await reference.logprobs.route(batch)
        if critic is not None:
            batch.values = await critic.predict.route(batch)
        with phase("credit"):
            credit.assign(batch, algorithm)
        metrics = await trainer.train_step.route(batch)
        return metrics if critic is None else metrics | await critic.train_step.route(batch)

    async def publish(version: int) -> None:
        await trainer.push_weights.call(version)
        await policy.update_weights.fanout(version)
        await window.advance(version)

    await publish(record.start)
    if record.start == 0:
        before = await evaluate(policy, agent or reward, held_out)
        record.log(0, await drain_metrics(), **before)
    await first_to_end(continuous_training(), continuous_rollouts())
    await trainer.export_model.call(record.model)


if __name__ == "__main__":
    launch(main, GRPOConfig)
