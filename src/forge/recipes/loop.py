"""The frame of a loop over the components of a run: how it begins and ends, and how weights reach the generators."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..runtime.controller import first_to_end
from .components import Job, RLComponents
from .rl_config import RLConfig


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

    async def evaluate(self) -> dict[str, float]:
        """The metrics of the held-out problems that are due."""
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
