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

from forge.recipes import rl
from forge.recipes.components import Job
from forge.recipes.launch import launch
from forge.recipes.learners import Learner
from forge.recipes.rl import Loop
from forge.recipes.rl_config import RLConfig, SeveralPoliciesConfig
from forge.training import credit
from forge.types import Group


class SelfPlay(Loop):
    """The loop of RL, in which every policy learns from the seats that it had in a game."""

    config: ClassVar[type[RLConfig]] = SeveralPoliciesConfig

    async def train_step(self, groups: list[Group], version: int) -> dict[str, float]:
        learners = self.parts.learners.values()
        steps = await asyncio.gather(*(self.learn(learner, groups, version) for learner in learners))
        self.record.log_rollouts(version + 1, [], dropped=await self.parts.buffer.take_dropped.route())
        return {name: value for metrics in steps for name, value in metrics.items()}

    async def learn(self, learner: Learner, games: list[Group], version: int) -> dict[str, float]:
        seats = [seat for seat, policy in self.cfg.seats.items() if policy == learner.name]
        groups = [game.of(seat) for game in games for seat in seats] if len(self.cfg.seats) > 1 else games
        with learner.metrics():
            credit.record_rollouts(episode for group in groups for episode in group.episodes)
            recorded_groups = self.record.pick(groups)
            batch = await self.make_batch(groups, version, recorded_groups, learner)
        metrics = await learner.train_step(batch)
        if recorded_groups:
            self.record.log_rollouts(version + 1, recorded_groups, batch, await learner.trainer.recorded.route())
        return metrics

    async def publish(self, version: int) -> None:
        await asyncio.gather(*(learner.publish(version) for learner in self.parts.learners.values()))
        await self.parts.advance(version)
        self.published_version = version

    async def export(self) -> None:
        for learner in self.parts.learners.values():
            await learner.trainer.export_model.call(self.record.model_of(learner.name))


async def train(cfg: RLConfig, job: Job) -> None:
    """Train `job.model` and those of `models` that train."""
    await rl.train(cfg, job, loop=SelfPlay)


if __name__ == "__main__":
    launch(train, SeveralPoliciesConfig)
