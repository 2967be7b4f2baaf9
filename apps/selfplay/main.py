"""Several policies learn in one run, from games against each other.

    prompts -> games (policy, rival, ...) -> replay buffer -> training of each -> new weights of each -> games

A game is a coroutine, `episode.agent.function`: its client asks each player by name, and it returns a reward for each.
`models` says who is who: `trains` is another policy with its own weights and trainer, `seat_of` another side of the
same policy (self-play), and a model without either is frozen.

python -m apps.selfplay.main --config apps/selfplay/auction.yaml
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from forge.config import ConfigError
from forge.recipes.components import Job, start_rl
from forge.recipes.launch import launch
from forge.recipes.learners import Learner
from forge.recipes.rl_config import RLConfig
from forge.recipes.schema import sample_seed
from forge.runtime.controller import first_to_end
from forge.training import credit
from forge.types import Group, Sample


class SelfPlayConfig(RLConfig):
    """Several policies that train."""

    trains_several: ClassVar[bool] = True

    def _check(self) -> None:
        super()._check()
        if self.load_algorithm().needs_critic or self.services.ref_model is not None:
            raise ConfigError("several policies train without a critic and a reference model: choose another algorithm")


async def train(cfg: RLConfig, job: Job) -> None:
    """Train `job.model` and those of `models` that train."""
    algorithm = cfg.load_algorithm()
    record = job.record
    parts = await start_rl(cfg, job, algorithm)
    players = list(parts.learners.values())

    async def rollouts() -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await parts.buffer.admit.route()  # waits while max_policy_age versions ahead of the trainers
                tasks.create_task(rollout(await parts.dataset.sample.route()))

    async def rollout(sample: Sample) -> None:
        prompt, target = sample
        seed = sample_seed(cfg.seed, prompt.index)
        episodes = await parts.env.rollout(parts.policy, sample, n=cfg.grpo.n_samples, seed=seed)  # of all players
        await parts.buffer.add.route(Group(episodes, prompt.index, target, prompt.text))

    async def training() -> None:
        for version in record.steps(cfg.training.steps):
            groups = await parts.buffer.sample.route(version, cfg.training.batch_size)
            steps = await asyncio.gather(*(train_step(player, groups, version) for player in players))
            metrics = {name: value for step_metrics in steps for name, value in step_metrics.items()}
            step = version + 1
            record.log_rollouts(step, [], dropped=await parts.buffer.take_dropped.route())
            if step == cfg.training.steps or step % cfg.training.sync_interval == 0:
                await publish(step)
            await job.end_step(cfg, parts.state, step, metrics, evaluate)

    async def train_step(player: Learner, all_groups: list[Group], version: int) -> dict[str, float]:
        seats = [seat for seat, policy in cfg.seats.items() if policy == player.name]
        groups = [group.of(seat) for group in all_groups for seat in seats] if len(cfg.seats) > 1 else all_groups
        with player.metrics():
            credit.record_rollouts(episode for group in groups for episode in group.episodes)
            recorded_groups = record.pick(groups)
            batch = credit.make_batch(groups, algorithm, version, recorded_groups, **cfg.shares(algorithm))
            if algorithm.needs_reference:
                batch.ref_logprobs = batch.logprobs
            credit.assign(batch, algorithm)
        metrics = await player.train_step(batch)
        if recorded_groups:
            record.log_rollouts(version + 1, recorded_groups, batch, await player.trainer.recorded.route())
        return metrics

    async def publish(version: int) -> None:
        await asyncio.gather(*(player.publish(version) for player in players))
        await parts.buffer.advance.route(version)

    async def evaluate() -> dict[str, float]:
        return await parts.env.evaluate(parts.policy, job.held_out, record.keep_evaluation)

    await publish(record.start)
    if record.start == 0:
        await job.end_step(cfg, parts.state, 0, {}, evaluate)
    await first_to_end(training(), rollouts())
    for player in players:
        await player.trainer.export_model.call(record.model_of(player.name))


if __name__ == "__main__":
    launch(train, SelfPlayConfig)
