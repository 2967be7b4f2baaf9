"""A simulated run: the two loops of `forge.recipes.rl` over the real replay buffer, in virtual time.

Admission, order, ages and drops are the buffer's own, requests go through the controller's balancer. What takes time
is slept: generation by `SimulatedEngine`, rewards, training, weights and checkpoints by the settings.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from dataclasses import dataclass
from random import Random
from typing import Any, cast

from ...actors.replay_buffer import ReplayBuffer
from ...observability.metrics import drain
from ...runtime.controller import first_to_end
from ...types import Episode, Group
from .clock import run_virtually
from .results import Counters, SimulatedRun
from .services import Failures, GeneratorService, RewardServers, RunEnded
from .settings import SimulationSettings

PRIME = 1_000_003  # keeps the seeds of prompts of neighbouring runs apart, as `sample_seed` of the recipes
MAX_LOSSES = 100  # of the trainer within one step: a run that loses more makes no progress


@dataclass(slots=True)
class SimulatedEpisode:
    """What the replay buffer reads of an episode."""

    version: int
    reward: float
    length: int
    policy: str = ""
    had_no_turn: bool = False

    @property
    def outcome(self) -> float:
        """Its reward."""
        return self.reward


@dataclass(slots=True)
class Draw:
    """What chance decides about a group: lengths of completions, seconds of each reward, and whether they are equal."""

    lengths: list[int]
    rewards: list[float]
    equal: bool


class Simulation:
    """The components and loops of one simulated run."""

    def __init__(self, settings: SimulationSettings) -> None:
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.failures = Failures(settings.faults, Random(settings.seed))
        self.generators = GeneratorService(settings.generators, settings.router, self.failures)
        self.rewards = RewardServers(settings.rewards.servers)
        # As `forge.recipes.components.replay_buffer` makes it.
        self.buffer = ReplayBuffer(
            capacity=2 * settings.batch_size * (settings.max_policy_age + 1),
            max_policy_age=settings.max_policy_age,
            order=settings.order,
            seed=settings.seed,
            replace=int(settings.dynamic_sampling * settings.batch_size),
            batch_size=settings.batch_size,
            steps=settings.steps,
            keep_dropped=sys.maxsize,
        )
        self.result = SimulatedRun(settings)
        self.trainer_failure = self.failures.next(settings.trainer_gpus)
        self.trainer_busy = 0.0
        self.since_checkpoint: list[float] = []  # seconds of the training steps since the last one
        self.trained_tokens = 0
        self.open = 0  # groups that are rolled out
        self.batch = 0  # groups that are being trained

    async def run(self) -> SimulatedRun:
        """Run to the last step, or to a failure that ends the run."""
        faults = [self.generators.fail_at_times(index) for index in range(self.settings.generators.replicas)]
        if self.settings.faults.gpu_hours is None:
            for fault in faults:
                fault.close()
            faults = []
        # The run ends with its last step, as the real one does; what is rolled out by then is cancelled.
        try:
            await first_to_end(self.training(), self.rollouts(), *faults)
        except RunEnded as error:
            self.result.ending = str(error)
        counts = await self.buffer.counts()
        result = self.result
        result.unfinished = self.open + self.batch + counts.pop("size")
        result.dropped = {reason: count for reason, count in counts.items() if count}
        engines = self.generators.engines
        result.generated_tokens = sum(engine.tokens for engine in engines)
        result.lost_tokens = sum(engine.lost for engine in engines)
        await self.count_dropped()
        result.failures = self.failures.count
        return result

    async def rollouts(self) -> None:
        """Start a rollout whenever the buffer admits one."""
        async with asyncio.TaskGroup() as tasks:
            for index in itertools.count():
                await self.buffer.admit()
                self.result.begun += 1
                self.open += 1
                tasks.create_task(self.rollout(index))

    async def rollout(self, index: int) -> None:
        """Generate and score a group, and store it."""
        # Lengths and rewards are drawn by the group's number: two settings then meet the same groups.
        draw = self.draw(index)
        versions = await self.generators.generate(draw.lengths, self.settings.lengths.prompt)
        if self.settings.rewards.servers:
            await self.rewards.score(sum(draw.rewards))
        else:
            await asyncio.sleep(max(draw.rewards))
        episodes = [
            SimulatedEpisode(version, float(not draw.equal and not number), length)
            for number, (version, length) in enumerate(zip(versions, draw.lengths, strict=True))
        ]
        await self.buffer.add(Group(cast("list[Episode]", episodes), index))
        self.open -= 1

    async def training(self) -> None:
        """Train one batch after the other."""
        settings = self.settings
        # The order of a step is that of `forge.recipes.rl`: sample, train, publish, log, checkpoint.
        for version in range(settings.steps):
            groups = cast("list[Group]", await self.buffer.sample(version, settings.batch_size))
            self.batch = len(groups)
            await self.train_step(groups)
            step = version + 1
            if step == settings.steps or step % settings.sync_interval == 0:
                await self.publish(step)
            await asyncio.sleep(settings.trainer.log_seconds)
            if settings.checkpoint.every and step % settings.checkpoint.every == 0:
                await asyncio.sleep(settings.checkpoint.seconds)
                self.since_checkpoint = []
            await self.count_dropped()
            self.record(version, groups)

    async def train_step(self, groups: list[Group]) -> None:
        """Pack and train a batch; after a failure of the trainer, all since the last checkpoint once more.

        Raises:
            RunEnded: a failure that the run does not survive.
        """
        trainer = self.settings.trainer
        samples = len(groups) * self.settings.n_samples
        await asyncio.sleep(trainer.pack_seconds + trainer.pack_sample_seconds * samples)
        tokens = sum(map(length_of, groups)) + samples * self.settings.lengths.prompt
        seconds = trainer.step_seconds + trainer.token_gpu_seconds * tokens / self.settings.trainer_gpus
        self.since_checkpoint.append(seconds)
        # A failure within a step throws away all that was trained since the last checkpoint.
        pending = [seconds]
        losses = 0
        while pending:
            if self.loop.time() + pending[0] < self.trainer_failure:
                await asyncio.sleep(pending.pop(0))
                continue
            losses += 1
            if losses > MAX_LOSSES:
                raise RunEnded("the trainer is lost before it has repeated the steps since its checkpoint, every time")
            await self.restart_trainer()
            pending = list(self.since_checkpoint)
            self.result.repeated += len(pending) - 1
        self.trainer_busy += seconds

    async def restart_trainer(self) -> None:
        """Wait for the failure, and for the trainer that comes in its place.

        Raises:
            RunEnded: there is no checkpoint, or the failure ends the run.
        """
        await asyncio.sleep(max(0.0, self.trainer_failure - self.loop.time()))
        self.failures.happen("the trainer")
        # `Trainer.on_respawn` starts from a checkpoint, and without `checkpoint.every` none is written.
        if not self.settings.checkpoint.every:
            raise RunEnded("the trainer was lost, and there are no checkpoints: set checkpoint.every")
        ready = self.trainer_failure + self.settings.faults.trainer_seconds
        await asyncio.sleep(max(0.0, ready - self.loop.time()))
        self.trainer_failure = self.loop.time() + self.failures.next(self.settings.trainer_gpus)

    async def publish(self, version: int) -> None:
        """Hand new weights to the generators."""
        await asyncio.sleep(self.settings.trainer.push_seconds)
        await self.generators.update_weights(version)
        await self.buffer.advance(version)

    def record(self, version: int, groups: list[Group]) -> None:
        """Add a step to the result."""
        ages = [version - group.version for group in groups]
        self.result.ages.append((sum(ages) / len(ages), max(ages)))
        self.result.trained += len(groups)
        self.batch = 0
        self.trained_tokens += sum(map(length_of, groups))
        engines = self.generators.engines
        for engine in engines:
            engine.advance()
        counters = Counters(
            seconds=self.loop.time(),
            generators=sum(engine.busy for engine in engines),
            rows=sum(engine.row_seconds for engine in engines),
            trainer=self.trainer_busy,
            rewards=self.rewards.busy,
            trained_tokens=self.trained_tokens,
        )
        self.result.steps.append(counters)

    async def count_dropped(self) -> None:
        """Count the tokens of the groups that the buffer dropped."""
        self.result.dropped_tokens += sum(length_of(group) for _, group in await self.buffer.take_dropped())

    def draw(self, index: int) -> Draw:
        """Draw a group. It depends on the seed and the index alone, so that settings are compared on the same work."""
        random = Random(self.settings.seed + PRIME * index)
        lengths = self.settings.lengths
        rewards = self.settings.rewards
        count = self.settings.n_samples
        if lengths.values:
            drawn = random.choices(lengths.values, k=count)
        else:
            between = lengths.spread * math.sqrt(lengths.per_prompt)
            within = lengths.spread * math.sqrt(1 - lengths.per_prompt)
            centre = math.log(lengths.mean) - lengths.spread**2 / 2 + between * random.gauss(0, 1)
            drawn = [round(math.exp(centre + within * random.gauss(0, 1))) for _ in range(count)]
        seconds = [rewards.seconds] * count
        if rewards.spread:
            seconds = [second * math.exp(rewards.spread * random.gauss(0, 1)) for second in seconds]
        capped = [min(max(length, 1), lengths.max_tokens) for length in drawn]
        return Draw(capped, seconds, random.random() < self.settings.equal_rewards)


def length_of(group: Group) -> int:
    """Tokens of a group's completions."""
    return sum(cast(Any, episode).length for episode in group.episodes)


def simulate(settings: SimulationSettings) -> SimulatedRun:
    """Simulate a run in virtual time.

    Equal settings give equal results. The real components record metrics, which are dropped at the end: call it in no
    process that is in the middle of a run.

    Raises:
        NothingLeft: the run would wait for ever.
    """

    async def run() -> SimulatedRun:
        return await Simulation(settings).run()

    try:
        return run_virtually(run())
    finally:
        drain()
