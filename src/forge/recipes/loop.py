"""The frame of a loop over the components of a run: how it begins and ends, and how weights reach the generators."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..observability.metrics import phase
from ..observability.schedule import StepEntry
from ..runtime.controller import first_to_end
from ..types import Group
from .components import POLICY, Job, MakeEnv, RLComponents
from .rl_config import RLConfig


def begin_schedule(job: Job, loop: type[Frame], make_env: MakeEnv | None) -> None:
    """Begin the schedule of a run, with what a replay needs and no file has."""
    passed = {"an environment": make_env, "on_step": job.hooks.on_step, "on_rollouts": job.hooks.on_rollouts}
    by_hand = [name for name, value in passed.items() if value is not None]
    job.record.begin_schedule(f"{loop.__module__}:{loop.__qualname__}", by_hand)


class Frame(ABC):
    """A loop in two halves, which overlap: `rollouts` fills the buffer, and `training` empties it.

    Args:
        parts: the started components.

    Attributes:
        version: of the trainer's weights.
        published_version: of the generators'.
    """

    def __init__(self, cfg: RLConfig, job: Job, parts: RLComponents) -> None:
        self.cfg = cfg
        self.job = job
        self.record = job.record
        self.parts = parts
        self.algorithm = parts.algorithm
        self.version = self.record.start
        self.published_version = -1

    @abstractmethod
    async def rollouts(self) -> None:
        """Sample without end."""

    @abstractmethod
    async def training(self) -> None:
        """Train until the last step."""

    async def publish(self, version: int) -> None:
        """Hand the trainer's weights to the generators, and admit the rollouts that may start with them."""
        await self.parts.trainer.push_weights.call(version)
        await self.parts.policy.update_weights.fanout(version)
        await self.parts.advance(version)
        self.published_version = version
        with phase("log_rollouts"):
            self.record.log_published(version, self.job.store.manifest(POLICY, version).digest)

    def log_schedule(self, entry: StepEntry, dropped: list[tuple[str, Group]], metrics: dict[str, float]) -> None:
        """Write what a step trained on to the run's schedule."""
        self.record.log_schedule(entry, dropped, metrics)

    async def evaluate(self) -> dict[str, float]:
        """Return the metrics of the held-out problems that are due."""
        # The run may end between two publications.
        if self.published_version != self.version:
            await self.publish(self.version)
        return await self.parts.evaluation.run(self.parts.policy, self.version)

    async def run(self) -> None:
        """Evaluate, train, and export the model."""
        await self.publish(self.version)
        if self.version or not await self.job.end_step(self.cfg, self.parts.state, 0, {}, self.evaluate):
            await first_to_end(self.training(), self.rollouts())
        await self.export()

    async def export(self) -> None:
        """Write the model in Hugging Face format."""
        await self.parts.trainer.export_model.call(self.record.model)
