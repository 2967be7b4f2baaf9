"""Several policies learn in one run, from games against each other.

    prompts -> games (policy, rival, ...) -> replay buffer -> training of each -> new weights of each -> games

A game is a coroutine, `episode.agent.function`: its client asks each player by name, and it returns a reward for each.
`models` says who is who: `trains` is another policy with its own weights and trainer, `seat_of` another side of the
same policy (self-play), and a model without either is frozen.

python -m apps.selfplay.main --config apps/selfplay/auction.yaml
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, ClassVar

from forge.recipes import rl
from forge.recipes.components import POLICY, Job, RLComponents
from forge.recipes.launch import launch
from forge.recipes.rl import Loop
from forge.recipes.rl_config import RLConfig
from forge.training import credit
from forge.types import Group
from forge_agents.models import seats
from forge_agents.several import Learner, SeveralPoliciesConfig


class SelfPlay(Loop):
    """The loop of RL, in which every policy learns from the seats that it had in a game."""

    config: ClassVar[type[RLConfig]] = SeveralPoliciesConfig

    def __init__(self, cfg: RLConfig, job: Job, parts: RLComponents) -> None:
        super().__init__(cfg, job, parts)
        own = Learner(POLICY, parts.policy, parts.trainer, parts.reference, parts.critic)
        # Policies that start as the run's own share its reference.
        env: Any = parts.env  # of forge_agents
        further = [replace(each, reference=each.reference or parts.reference) for each in env.learners.values()]
        self.learners = [own, *further]

    async def train_step(self, groups: list[Group], version: int) -> dict[str, float]:
        learners = self.learners
        steps = await asyncio.gather(*(self.learn(learner, groups, version) for learner in learners))
        self.record.log_rollouts(version + 1, [], dropped=await self.parts.buffer.take_dropped.route())
        return {name: value for metrics in steps for name, value in metrics.items()}

    async def learn(self, learner: Learner, games: list[Group], version: int) -> dict[str, float]:
        learners_by_seat = seats(self.cfg.models)
        own_seats = [seat for seat, name in learners_by_seat.items() if name == learner.name]
        groups = [game.of(seat) for game in games for seat in own_seats] if len(learners_by_seat) > 1 else games
        with learner.metrics():
            credit.record_rollouts(episode for group in groups for episode in group.episodes)
            recorded_groups = self.record.pick(groups)
            batch = await self.make_batch(groups, version, recorded_groups, learner)
        metrics = await learner.train_step(batch)
        if recorded_groups:
            self.record.log_rollouts(version + 1, recorded_groups, batch, await learner.trainer.recorded.route())
        return metrics

    async def publish(self, version: int) -> None:
        await asyncio.gather(*(learner.publish(version) for learner in self.learners))
        await self.parts.advance(version)
        self.published_version = version

    async def export(self) -> None:
        for learner in self.learners:
            await learner.trainer.export_model.call(self.record.model_of(learner.name))


async def train(cfg: RLConfig, job: Job) -> None:
    """Train `job.model` and those of `models` that train."""
    await rl.train(cfg, job, loop=SelfPlay)


if __name__ == "__main__":
    launch(train, SeveralPoliciesConfig)
