"""The trainer as an actor: one process a rank, every endpoint runs on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..data.packing import pack, pack_tensors
from ..models.flops import forward_flops
from ..models.hub import check_model_name
from ..observability import phase
from ..runtime.controller import ForgeActor, Service, endpoint
from ..runtime.store import Store
from ..training.settings import OptimizerSettings, Parallelism, PolicySettings
from ..types import Batch, Episode, Group
from .identity import POLICY, Identities
from .ledger import Ledger
from .publication import connect_store, controller_store, publish_by
from .staleness import Staleness

if TYPE_CHECKING:
    from ..algorithms.base import Aggregation
    from ..training.checkpoint import Background

JOURNAL = "trainer.journal"
IDENTITIES = "identities"


class Write(NamedTuple):
    """A checkpoint that is written while training continues."""

    folder: str
    extra: dict[str, Any] | None
    keep: int


class Trainer(ForgeActor):
    """Trains the policy and publishes its versions; or trains a critic or reward model.

    Args:
        model: Hugging Face folder or hub id to start from.
        loss: a callable over named tensors, see `forge.losses`.
        store: where versions are published; None for a trainer that does not. `push_weights` publishes one, and so does
            a fanout of `Generator.update_weights` with the number of the trainer's step.
        weights_key: under which; the generators'.
        optimizer: fields of `forge.training.settings.OptimizerSettings`.
        aggregation: how tokens share the loss when a batch arrives as episodes or tensors, see
            `forge.data.packing.pack`; None: the loss's own, or "token_mean" if it has none.
        horizon: of aggregation "fixed_horizon".
        parallelism: fields of `forge.training.settings.Parallelism`; by default all ranks share the weights.
        recovery: the checkpoint folder from which a replaced trainer restores itself, on a file system that all ranks
            share: it loads the checkpoint that was last saved there, or restored, and trains the batches since then
            again, from a journal alongside it. None makes the loss of a process the end of the run.
        report: what its metrics and its time are called: `<report>/loss`.
        max_policy_age: the most versions (steps) that a trained token may be old; None is any age. A batch with an
            older one is an error.
        colocated: leave the device to others whenever a call is done: what it holds goes to host memory.
        publish_dtype: of published weights, float32 or bfloat16, where a GPU casts them: half the bytes for engines
            that compute in bfloat16. Adapters stay as they are. None: the weights'.
        **settings: others, of `forge.training.trainer.PolicyTrainer`: `head` ("policy", "value" or "reward"),
            `backend`, `lora` (train adapters only), `temperature`, and the fields of
            `forge.training.settings.PassSettings`, such as `seq_len`, `dtype` and `mini_batches`.
    """

    constructor_checks = True

    def __init__(
        self,
        model: str,
        *,
        loss: Callable[..., Any],
        store: Store | None = None,
        weights_key: str = POLICY,
        optimizer: Mapping[str, Any] | None = None,
        aggregation: Aggregation | None = None,
        horizon: int | None = None,
        parallelism: Mapping[str, Any] | None = None,
        recovery: str | None = None,
        report: str = "train",
        max_policy_age: int | None = None,
        colocated: bool = False,
        publish_dtype: str | None = None,
        **settings: Any,
    ) -> None:
        check_model_name(model)
        PolicySettings(**settings)  # a wrong one is an error here, and not of the process that loads the model
        self.publish_dtype = publish_dtype
        self.model = model
        self.loss = loss
        self.store_ref = store
        self.weights_key = weights_key
        self.horizon = horizon

        loss_aggregation: Aggregation = getattr(loss, "aggregation", "token_mean")
        self.aggregation: Aggregation = aggregation or loss_aggregation
        self.optimizer = OptimizerSettings(**(optimizer or {}))
        self.layout = Parallelism(**(parallelism or {}))
        self.settings = settings
        self.staleness = Staleness(max_policy_age)
        self.report = report
        self.colocated = colocated

        self.unit = getattr(loss, "unit", 1)
        if self.aggregation != loss_aggregation and getattr(loss, "fixed_aggregation", False):
            raise ValueError(
                f"{type(loss).__name__} is only defined under aggregation {loss_aggregation}, not {aggregation}"
            )
        if (aggregation == "fixed_horizon" or horizon is not None) and not (
            self.aggregation == "fixed_horizon" and (horizon or 0) > 0
        ):
            raise ValueError(
                f"aggregation fixed_horizon, and no other, needs a horizon of at least 1: got {self.aggregation} and "
                f"{horizon}"
            )

        self.recovery = None if recovery is None else Path(recovery).resolve()
        lost = "what it had learned is lost: set checkpoint.every, or give Trainer a recovery= folder"
        journal = None if self.recovery is None else str(self.recovery / JOURNAL)
        self.ledger = Ledger(self, journal, lost=lost)
        self.background: Background | None = None
        self.writing: tuple[Write, str, int] | None = None  # its path, and the point in the journal

    @classmethod
    def started(cls, service: Service, kwargs: Mapping[str, Any]) -> None:
        """Let the store publish this trainer's step on demand, see `forge.actors.publication`."""
        store = controller_store(kwargs.get("store"))
        if store is not None:
            publish_by(store, service, kwargs.get("weights_key", POLICY))

    def setup(self) -> None:
        """Join the ranks, and load model, optimiser and loss."""
        import torch

        from ..runtime.process_groups import process_store
        from ..training.distributed import join_ranks
        from ..training.trainer import PolicyTrainer

        self.ledger.begin()
        self.store = connect_store(self.store_ref)
        self.identities = None if self.store is None else Identities(self.store, self.weights_key)
        context = self.context
        cpu_offload = self.settings.get("cpu_offload", False)
        in_bfloat16 = self.settings.get("dtype") == "bfloat16" and torch.accelerator.is_available()
        store = process_store(context.rendezvous, context.world_size, context.rank)
        ranks = join_ranks(
            context.rank, context.world_size, store, self.layout, cpu_offload=cpu_offload, mesh=in_bfloat16
        )

        with self._on_device():
            self.trainer = PolicyTrainer(self.model, ranks, self.optimizer, **self.settings)

    @cached_property
    def architecture(self) -> Any:
        """Return the model's transformers configuration."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.model, trust_remote_code=False)

    def on_respawn(self) -> None:
        """Load the last checkpoint and repeat the batches since then. Unrecoverable: there is no checkpoint."""
        from ..training import checkpoint

        def redo_change(change: tuple[Batch, Any, bool] | Write) -> Any:
            if isinstance(change, Write):  # it was being written when the process was lost
                self.writing = change, (path := self._begin_write(change)), self.ledger.now
                return path
            batch, answer, same_step = change
            self.trainer.train_step(batch, self.loss, same_step=same_step)
            return answer

        with self._on_device():
            self.ledger.replay(lambda path: checkpoint.load_checkpoint(self.trainer, path), redo_change)

    def teardown(self) -> None:
        """Finish a checkpoint that is being written, and leave the process group."""
        from ..training.distributed import leave_ranks

        try:
            self._settle_write()
        finally:
            leave_ranks()

    @endpoint
    def train_step(
        self,
        batch: Batch | Sequence[Episode | Group] | Sequence[Mapping[str, Any]],
        targets: Sequence[Mapping[str, Any]] | None = None,
        same_step: bool = False,
    ) -> dict[str, float] | float:
        """Return one step, of one update or several; its metrics as `<report>/<name>`, see `PolicyTrainer.train_step`.

        Episodes and groups are packed here, with the branches of each episode. Groups get the advantages of an
        algorithm; of another loss, an episode without an advantage trains on all that it earned (REINFORCE without a
        baseline). `train_step(inputs, targets)` takes dicts of tensors, see
        `forge.data.packing.pack_tensors`, and returns the loss.

        Args:
            same_step: another update of the last step, such as on groups of steps before. They have its learning rate,
                and ages are counted from the weights that it started with.

        Raises:
            ValueError: the batch does not fit the loss, or has nothing to train on.
            StaleWeights: a token is older than `max_policy_age`; names who sampled it.
            UnknownWeights: a token's weights are not those that were published under its version.
        """
        if self.ledger.repeated:
            return self.ledger.answer

        # The ranks train at the same time: only rank 0 records the time of the phase.
        with phase(self.report) if self.context.rank == 0 else nullcontext():
            batch = self._pack_items(batch, targets)
            if batch.unit != self.unit:
                raise ValueError(f"{type(self.loss).__name__} needs batches in units of {self.unit}, not {batch.unit}")
            # Additional updates are of the step that was counted last.
            self.staleness.check(batch, self.trainer.step - same_step)
            if self.identities is not None:
                self.identities.check(batch)
            with self._on_device():
                results = self.trainer.train_step(batch, self.loss, same_step=same_step)

        results["flops"] = 3 * self.trainer.passes.epochs * forward_flops(self.architecture, *_count_work(batch))
        metrics = {f"{self.report}/{name}": value for name, value in results.items()}

        # After the step, not before it: a batch that kills the trainer must not kill every trainer that follows.
        answer = metrics if targets is None else results["loss"]
        return self.ledger.complete((batch, answer, same_step), answer)

    @endpoint
    def recorded(self) -> dict[str, np.ndarray] | None:
        """Return numbers that the last step computed for the tokens that its batch lists in `recorded`, see
        `forge.training.step.TokenRecord`; None: it lists none."""
        return self.trainer.recorded if self.context.rank == 0 else None

    @endpoint
    def logprobs(self, batch: Batch) -> np.ndarray:
        """Return log-probabilities of the batch's trained tokens under the current weights, [tokens], 0 elsewhere.

        ValueError: this trainer has no policy head.
        """
        with phase("logprobs") if self.context.rank == 0 else nullcontext(), self._on_device():
            return self.trainer.logprobs(batch)

    @endpoint
    def predict(self, batch: Batch) -> np.ndarray:
        """Return predictions of a value or reward head for the batch's trained tokens, [tokens], 0 elsewhere.

        ValueError: this trainer has a policy head.
        """
        with phase("predict") if self.context.rank == 0 else nullcontext(), self._on_device():
            return self.trainer.predict(batch)

    @endpoint
    def push_weights(self, version: int) -> None:
        """Publish the current weights as `version`: every rank writes what it holds.

        Raises:
            IncompleteVersion, VersionConflict, OSError: see `VersionStore.put`; nothing was published.
        """
        import torch

        if self.store is None:
            raise ValueError("this trainer has no weight store to publish to: give it store=VersionStore.create()")
        with phase("push_weights") if self.context.rank == 0 else nullcontext():
            casts = self.trainer.lora is None and self.trainer.ranks.device.type != "cpu"
            dtype = getattr(torch, self.publish_dtype) if casts and self.publish_dtype else None
            self.store.put(self.weights_key, self.trainer.weights(), version, dtype=dtype)

    @endpoint
    def publish_step(self, version: int) -> None:
        """`push_weights`, if the trainer's step has this number."""
        if version == self.trainer.step:
            self.push_weights(version)

    @endpoint
    def save_checkpoint(
        self, folder: str, extra: dict[str, Any] | None = None, keep: int = 2, wait: bool = True
    ) -> str:
        """Write a checkpoint, see `forge.training.checkpoint.save_checkpoint`; returns its path.

        Args:
            wait: False copies the state in memory, and returns while the copy is being written: whatever comes next to
                save, load or export waits for it, and raises what went wrong.

        Raises:
            CheckpointFailed: this one, or the one before it that was not waited for, could not be written.
        """
        from ..training import checkpoint

        if self.ledger.repeated:
            return self.ledger.answer
        with phase("checkpoint") if self.context.rank == 0 else nullcontext():
            self._settle_write()
            published = self.identities
            recent = published.recent(self.trainer.step, self.staleness.max_policy_age) if published else {}
            write = Write(folder, {**(extra or {}), IDENTITIES: recent}, keep)
            if not wait:
                path = self._begin_write(write)
                self.ledger.complete(write, path)
                self.writing = write, path, self.ledger.now
                return path
            path = str(checkpoint.save_checkpoint(self.trainer, folder, extra=write.extra, keep=None))
            if Path(folder).resolve() == self.recovery:
                self.ledger.restart(str(Path(path).resolve()), path)
            self._prune_checkpoints(write, path)

        return path

    @endpoint
    def load_checkpoint(self, path: str) -> dict[str, Any]:
        """Restore a checkpoint; returns its `extra`."""
        from ..training import checkpoint

        if self.ledger.repeated:
            return checkpoint.read_extra(path)
        self._settle_write()
        extra = checkpoint.load_checkpoint(self.trainer, path)
        if self.identities is not None and self.context.rank == 0:
            self.identities.adopt(extra.get(IDENTITIES, {}))
        self.ledger.restart(str(Path(path).resolve()), None)
        return extra

    @endpoint
    def export_model(self, folder: str) -> None:
        """Write the policy and its tokenizer in Hugging Face format."""
        from ..training import checkpoint

        self._settle_write()
        checkpoint.export_model(self.trainer, folder, self.model)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Offload to host memory afterwards, also after an error."""
        try:
            yield
        except BaseException as error:
            try:
                self._leave_device()
            except Exception as second_error:  # the first error says what happened
                error.add_note(f"then the trainer could not leave the device: {second_error!r}")
            raise
        self._leave_device()

    def _leave_device(self) -> None:
        if self.colocated and hasattr(self, "trainer"):
            self.trainer.offload()

    def _begin_write(self, write: Write) -> str:
        """Copy the state, and write the copy while training continues."""
        from ..training.checkpoint import Background

        self.background = self.background or Background(self.trainer)
        return str(self.background.save(write.folder, extra=write.extra))

    def _settle_write(self) -> None:
        """Wait for the checkpoint that is being written, and stand on it from here on."""
        if self.writing is None or self.background is None:
            return
        (write, path, since), self.writing = self.writing, None
        self.background.wait()
        if Path(write.folder).resolve() == self.recovery:
            self.ledger.rebase(str(Path(path).resolve()), since)
        self._prune_checkpoints(write, path)

    def _prune_checkpoints(self, write: Write, path: str) -> None:
        """Not before the journal stands on `path`: until then it may stand on a checkpoint that is now to go."""
        from ..training import checkpoint

        if self.context.rank == 0:
            checkpoint.prune_checkpoints(write.folder, write.keep, path)

    def _pack_items(self, items: Any, targets: Sequence[Mapping[str, Any]] | None) -> Batch:
        shares: dict[str, Any] = {"aggregation": self.aggregation, "horizon": self.horizon, "unit": self.unit}
        if targets is not None:
            return pack_tensors(items, targets, **shares)
        if isinstance(items, Batch):
            return items
        algorithm: Any = self.loss
        if hasattr(algorithm, "advantages") and all(isinstance(item, Group) for item in items):
            from ..training.credit import make_batch

            return make_batch(items, algorithm, self.trainer.step, **shares)
        episodes = [e for item in items for e in (item.episodes if isinstance(item, Group) else [item])]
        for episode in episodes:
            if episode.advantage is None:
                if episode.outcome is None:
                    raise ValueError("an episode without a reward cannot be trained on: drop it, or score it first")
                episode.advantage = episode.outcome
        return pack(episodes, **shares)


def _count_work(batch: Batch) -> tuple[float, float, float]:
    """Return tokens, tokens attended to, and tokens predicted, of a forward pass."""
    lengths = batch.lengths.astype(float)
    return float(lengths.sum()), float((lengths * (lengths + 1) / 2).sum()), float(batch.mask.sum())
