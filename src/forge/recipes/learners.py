"""The trained policies of a run: each has generators, a trainer, and weights under its name."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ..observability import metrics_of, record_metric
from ..observability.metrics import labelled
from ..runtime.controller.handle import Handle
from ..types import Batch
from .models_config import POLICY


@dataclass(frozen=True)
class Learner:
    """A policy that trains.

    Args:
        name: by which agents ask for it, and under which its weights are published.
        policy: a service of `forge.actors.Generator`.
        trainer: of `forge.actors.Trainer`.
        reference: a service of `forge.actors.ReferenceModel`, where the algorithm needs one.
        critic: of `forge.actors.Trainer`, where the algorithm needs one.
    """

    name: str
    policy: Handle
    trainer: Handle
    reference: Handle | None = None
    critic: Handle | None = None

    def metrics(self) -> AbstractContextManager[None]:
        """Name the metrics of a block after it, `rival/reward`; those of the run's own policy have no prefix."""
        return nullcontext() if self.name == POLICY else metrics_of(self.name)

    async def train_step(self, batch: Batch) -> dict[str, float]:
        """Train one step of the policy and its critic; returns metrics by their full names, `rival/train/loss`."""
        metrics = await self.trainer.train_step.route(batch)
        if self.critic is not None:
            metrics |= await self.critic.train_step.route(batch)
        with self.metrics():
            return {labelled(name): value for name, value in metrics.items()}

    async def publish(self, version: int) -> None:
        """Publish its weights as a version, and give them to its generators."""
        await self.trainer.push_weights.call(version)
        await self.policy.update_weights.fanout(version)
        with self.metrics():
            record_metric("policy_version", version)
