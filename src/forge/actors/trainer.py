"""The trainer as an actor: one process a rank, every endpoint runs on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..controller import ForgeActor, endpoint
from ..data.packing import Aggregation, pack
from ..observability import phase
from ..store import VersionStore
from ..types import Batch, Episode, Group
from .ledger import Ledger

JOURNAL = "trainer.journal"


class Trainer(ForgeActor):
    """Trains the policy and publishes its versions.

    Args:
        model: Hugging Face folder or hub id to start from.
        loss: a callable over named tensors, see `forge.losses`.
        store: where `push_weights` publishes; None for a trainer that does not.
        optimizer: fields of `forge.training.optimizer.OptimizerSettings`.
        aggregation: how tokens share the loss when a batch arrives as episodes, see `forge.data.packing.pack`.
        shard_degree: ranks that share one copy of the weights, -1 for all.
        recovery: the checkpoint folder from which a replaced trainer restores itself, on a file system that all ranks
            share: it loads the checkpoint that was last saved there, or restored, and trains the batches since then
            again, from a journal beside it. None makes the loss of a process the end of the run.
        **settings: further settings of `forge.training.trainer.PolicyTrainer`.
    """

    def __init__(
        self,
        model: str,
        *,
        loss: Callable[..., Any],
        store: VersionStore | None = None,
        optimizer: dict[str, Any] | None = None,
        aggregation: Aggregation = "token_mean",
        shard_degree: int = -1,
        recovery: str | None = None,
        **settings: Any,
    ) -> None:
        self.model, self.loss, self.store, self.aggregation = model, loss, store, aggregation
        self.optimizer, self.shard_degree, self.settings = optimizer or {}, shard_degree, settings
        self.recovery = None if recovery is None else Path(recovery).resolve()
        lost = "what it had learned is lost: set checkpoint.every, or give Trainer a recovery= folder"
        journal = None if self.recovery is None else str(self.recovery / JOURNAL)
        self.ledger = Ledger(self, journal, lost=lost, shared=True)

    def setup(self) -> None:
        from ..training.distributed import join
        from ..training.optimizer import OptimizerSettings
        from ..training.trainer import PolicyTrainer

        self.ledger.begin()
        place = self.context
        ranks = join(place.rank, place.world_size, place.rendezvous, self.shard_degree)
        self.trainer = PolicyTrainer(self.model, ranks, OptimizerSettings(**self.optimizer), **self.settings)

    def on_respawn(self) -> None:
        from ..training import checkpoint

        def train(step: tuple[Batch, dict[str, float]]) -> dict[str, float]:
            batch, metrics = step
            self.trainer.train_step(batch, self.loss)
            return metrics

        self.ledger.replay(lambda path: checkpoint.load(self.trainer, path), train)

    def teardown(self) -> None:
        from ..training.distributed import leave

        leave()

    @endpoint
    def train_step(self, batch: Batch | Sequence[Episode | Group]) -> dict[str, float]:
        """One optimiser step; its metrics as `train/<name>`, see `PolicyTrainer.train_step`.

        Episodes and groups are packed here; an episode without an advantage trains on its reward (REINFORCE without
        a baseline).
        """
        if self.ledger.repeated:
            return self.ledger.answer
        # The ranks train at the same time: one of them stands for all in the time by phase.
        with phase("train") if self.context.rank == 0 else nullcontext():
            batch = batch if isinstance(batch, Batch) else self._pack(batch)
            metrics = {f"train/{name}": value for name, value in self.trainer.train_step(batch, self.loss).items()}
        # After the step, not before it: a batch that kills the trainer must not kill every trainer that follows.
        return self.ledger.complete((batch, metrics), metrics)

    @endpoint
    def push_weights(self, version: int) -> None:
        """Publish the current weights as `version`."""
        if self.store is None:
            raise ValueError("this trainer has no weight store to publish to")
        with phase("push_weights"):
            weights = self.trainer.export_weights()
            if self.context.rank == 0:
                self.store.put(version, weights)
            else:
                for _ in weights:  # gathering a sharded tensor needs every rank
                    pass

    @endpoint
    def save_checkpoint(self, folder: str, extra: dict[str, Any] | None = None, keep: int = 2) -> str:
        """Write a checkpoint, see `forge.training.checkpoint.save`; returns its path."""
        from ..training import checkpoint

        if self.ledger.repeated:
            return self.ledger.answer
        with phase("checkpoint"):
            path = str(checkpoint.save(self.trainer, folder, extra=extra, keep=None))
            if Path(folder).resolve() == self.recovery:
                self.ledger.restart(str(Path(path).resolve()), path)
            # Not before: until then the journal may stand on a checkpoint that is now to go.
            if self.context.rank == 0:
                checkpoint.prune(folder, keep, path)
        return path

    @endpoint
    def load_checkpoint(self, path: str) -> dict[str, Any]:
        """Restore a checkpoint; returns its `extra`."""
        from ..training import checkpoint

        if self.ledger.repeated:
            return checkpoint.extra(path)
        extra = checkpoint.load(self.trainer, path)
        self.ledger.restart(str(Path(path).resolve()), None)
        return extra

    @endpoint
    def export_model(self, folder: str) -> None:
        """Write the policy and its tokenizer in Hugging Face format."""
        from ..training import checkpoint

        checkpoint.export(self.trainer, folder, self.model)

    def _pack(self, items: Sequence[Episode | Group]) -> Batch:
        episodes = [e for item in items for e in (item.episodes if isinstance(item, Group) else [item])]
        for episode in episodes:
            if episode.advantage is None:
                if episode.reward is None:
                    raise ValueError("an episode without a reward cannot be trained on: drop it, or score it first")
                episode.advantage = episode.reward
        return pack(episodes, aggregation=self.aggregation)
