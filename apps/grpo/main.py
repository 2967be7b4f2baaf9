"""GRPO: two loops that meet in a replay buffer.

    python -m apps.grpo.main --config apps/grpo/tiny.yaml --training.steps 50

Rollouts sample a group of completions for each prompt, score them against one another and store them. Training takes
a batch, improves the policy and hands the new weights to the generators. `async.max_policy_age` says how far rollouts
may run ahead: at 0 the two take turns, above it they overlap; the code below is the same.
"""

import asyncio

from apps.grpo.config import GRPOConfig
from forge import actors
from forge.actors import DatasetActor, Generator, ReferenceModel, ReplayBuffer, RewardActor, Trainer, Window, evaluate
from forge.advantages import group_relative
from forge.controller import drain_metrics, first_to_end
from forge.data.packing import pack
from forge.losses import GRPOLoss
from forge.observability import Reduce, Run, phase, record_metric
from forge.recipe import launch
from forge.store import VersionStore
from forge.types import Episode, Group, Sample


async def main(cfg: GRPOConfig, model: str, held_out: list[Sample], record: Run, store: VersionStore) -> None:
    services, algo, batch_size = cfg.services, cfg.grpo, cfg.training.batch_size
    capacity = 2 * batch_size * (cfg.async_.max_policy_age + 1)
    loss = GRPOLoss(entropy_coef=cfg.training.entropy_coef, **algo.loss())
    dataset, policy, trainer, reward, buffer, reference = await asyncio.gather(
        DatasetActor.options(**services.dataset).as_actor(
            model, seed=cfg.seed, journal=f"{record.recovery}/dataset", remember=cfg.checkpoint.remember, **cfg.dataset
        ),
        Generator.options(**services.generator).as_service(
            model, store=store, temperature=algo.temperature, max_tokens=algo.max_tokens, **cfg.generator
        ),
        Trainer.options(**services.trainer).as_actor(
            model,
            loss=loss,
            store=store,
            optimizer=cfg.training.optimizer(),
            temperature=algo.temperature,
            shard_degree=cfg.parallelism.data_parallel_shard_degree,
            recovery=record.checkpoints if cfg.checkpoint.every else None,
            max_policy_age=cfg.async_.max_policy_age,
            **cfg.training.trainer(),
        ),
        RewardActor.options(**services.reward).as_service(**cfg.reward),
        ReplayBuffer.options(**services.replay_buffer).as_actor(
            capacity, seed=cfg.seed, journal=f"{record.recovery}/buffer", **cfg.async_
        ),
        ReferenceModel.options(**services.ref_model).as_service(
            model, seq_len=cfg.training.seq_len, temperature=algo.temperature
        )
        if algo.beta
        else asyncio.sleep(0),
    )
    held = await actors.resume(record, trainer, dataset, buffer)
    window = Window(batch_size, cfg.async_.max_policy_age, cfg.training.steps, record.start, held)

    async def rollout() -> None:
        prompt, target = await dataset.sample.route()
        completions = await policy.generate.route(prompt, n=algo.n_samples, seed=cfg.seed + 1_000_003 * prompt.index)
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
            with phase("pack"):
                batch = pack(learnable(groups, version), aggregation=cfg.training.aggregation)
            if reference is not None:
                batch.ref_logprobs = await reference.logprobs.route(batch)
            metrics = await trainer.train_step.route(batch)
            step, last = version + 1, version + 1 == cfg.training.steps
            if last or step % cfg.training.sync_interval == 0:
                await publish(step)
            if last or (cfg.eval.every and step % cfg.eval.every == 0):
                metrics |= await evaluate(policy, reward, held_out)
            record.log(step, await drain_metrics(), **metrics)
            if cfg.checkpoint.due(step, last):
                await actors.save(record, trainer, dataset, buffer, **cfg.checkpoint.how)

    async def publish(version: int) -> None:
        await trainer.push_weights.call(version)
        await policy.update_weights.fanout(version)
        await window.advance(version)

    def learnable(groups: list[Group], version: int) -> list[Episode]:
        for group in groups:
            record_metric("policy_age", version - group.version)
            record_metric("policy_age", version - group.version, Reduce.MAX)
            record_metric("groups_without_signal", len(set(group.rewards)) == 1)
            for episode, advantage in zip(
                group.episodes, group_relative(group.rewards, normalize=algo.normalize), strict=True
            ):
                episode.advantage = advantage
        signal = [g for g in groups if len(set(g.rewards)) > 1 or not algo.skip_no_signal] or groups
        return [episode for group in sorted(signal, key=lambda g: g.index) for episode in group.episodes]

    await publish(record.start)
    if record.start == 0:
        before = await evaluate(policy, reward, held_out)
        record.log(0, await drain_metrics(), **before)
    await first_to_end(continuous_training(), continuous_rollouts())
    await trainer.export_model.call(record.model)


if __name__ == "__main__":
    launch(main, GRPOConfig)
