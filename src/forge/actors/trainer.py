"""The trainer as an actor: one process for each rank, and every endpoint runs on all of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..config.plugin import resolve
from ..data.packing import pack, pack_tensors
from ..models.flops import forward_flops
from ..models.hub import check_model_name
from ..observability import phase
from ..runtime.controller import ForgeActor, Service, endpoint
from ..runtime.store import Store
from ..system.extras import find_foreign_name as __getattr__  # noqa: F401  (other names of torchforge)
from ..training.settings import OptimizerSettings, Parallelism, PolicySettings
from ..types import Batch, Episode, Group
from .identity import POLICY, Identities
from .ledger import Ledger
from .publication import connect_store, controller_store
from .staleness import Staleness

if TYPE_CHECKING:
    from ..algorithms.base import Aggregation
    from ..training.checkpoint import Background

JOURNAL = "trainer.journal"  # file in the recovery folder
IDENTITIES = "identities"  # key in a checkpoint's `extra`


class Write(NamedTuple):
    """Arguments of the checkpoint that is being written, see `Trainer.save_checkpoint`."""

    folder: str
    extra: dict[str, Any] | None
    keep: int


class Trainer(ForgeActor):
    """Component that trains a policy and publishes its weight versions, or trains a critic or reward model.

    Args:
        model: Hugging Face folder or hub id of the first weights.
        loss: an algorithm such as `forge.algorithms.GRPO()`, or a callable over named tensors, see `forge.losses`.
        store: where versions are published, by `push_weights` or by a fanout of `Generator.update_weights` with the
            number of the trainer's step; None for a trainer that publishes nothing.
        weights_key: key of the versions in the store, the same as the generators'.
        optimizer: fields of `forge.training.settings.OptimizerSettings`.
        aggregation: how the tokens of a batch of episodes or tensors are weighted in the loss, see
            `forge.data.packing.pack`; None is the loss's own, or "token_mean" if it has none.
        horizon: length that the aggregation "fixed_horizon" divides by.
        parallelism: fields of `forge.training.settings.Parallelism`; by default the weights are sharded over all ranks.
        recovery: a checkpoint folder on a file system that all ranks share. A trainer that replaces a lost one loads
            the checkpoint that was last saved there, or restored, and trains the batches since then again, from a
            journal in the folder. None makes the loss of a process the end of the run.
        report: prefix of the names of its metrics and phases: `<report>/loss`.
        max_policy_age: maximum age of a trained token, in versions; an older one is an error. None is any age.
        colocated: free the device after each call, by moving the weights to host memory, for processes that share it.
        publish_dtype: "float32" or "bfloat16" (half the bytes), to which a trainer on a GPU casts published weights
            (not adapters); None casts nothing.
        chat_template: of the tokenizer of exported models; None: the model's own.
        **settings: settings of `forge.training.trainer.PolicyTrainer`: `head` ("policy", "value" or "reward"),
            `backend`, `lora` (train adapters only), `temperature`, and the fields of `PassSettings`, such as `seq_len`.
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
        aggregation: "Aggregation | None" = None,
        horizon: int | None = None,
        parallelism: Mapping[str, Any] | None = None,
        recovery: str | None = None,
        report: str = "train",
        max_policy_age: int | None = None,
        colocated: bool = False,
        publish_dtype: str | None = None,
        chat_template: str | None = None,
        **settings: Any,
    ) -> None:
        check_model_name(model)
        if not callable(loss):
            raise TypeError(f"loss must be an algorithm, e.g. forge.algorithms.GRPO(), or a function, got {loss!r:.60}")
        PolicySettings(**settings)  # a wrong setting raises here, before a process loads the model
        self.publish_dtype, self.chat_template = publish_dtype, chat_template
        self.model, self.loss, self.store_ref = model, loss, store
        self.weights_key, self.horizon = weights_key, horizon

        loss_aggregation: Aggregation = getattr(loss, "aggregation", "token_mean")
        self.aggregation: Aggregation = aggregation or loss_aggregation
        self.optimizer = OptimizerSettings(**(optimizer or {}))
        self.layout = Parallelism(**(parallelism or {}))
        self.settings = settings
        self.staleness = Staleness(max_policy_age)
        self.report, self.colocated = report, colocated

        self.unit = getattr(loss, "unit", 1)
        if self.aggregation != loss_aggregation and getattr(loss, "fixed_aggregation", False):
            raise ValueError(f"{type(loss).__name__} supports only aggregation {loss_aggregation}, got {aggregation}")
        is_fixed = self.aggregation == "fixed_horizon" and horizon is not None and horizon > 0
        if (aggregation == "fixed_horizon" or horizon is not None) and not is_fixed:
            raise ValueError(
                "horizon must be at least 1 with aggregation fixed_horizon and None with any other, got aggregation "
                f"{self.aggregation} and horizon {horizon}"
            )

        self.recovery = None if recovery is None else Path(recovery).resolve()
        journal = None if self.recovery is None else str(self.recovery / JOURNAL)
        lost = "what it had learned is lost: set checkpoint.every, or give Trainer a recovery= folder"
        self.ledger = Ledger(self, journal, lost=lost)
        self.background: Background | None = None  # writes checkpoints
        self.writing: tuple[Write, str, int] | None = None  # with its path, and `ledger.records` when it started

    @classmethod
    def started(cls, service: Service, kwargs: Mapping[str, Any]) -> None:
        """Register the trainer as the store's publisher: it publishes versions that the store does not have."""
        if (store := controller_store(kwargs.get("store"))) is not None:
            key = kwargs.get("weights_key", POLICY)
            store.publishers = {**store.publishers, key: service.publish_step.call}

    def setup(self) -> None:
        """Join the process group, and load model and optimizer."""
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
            is_remote = self.settings.get("backend") == "tinker"
            kind = resolve("forge_tinker.remote:TinkerTrainer", "trainer.backend") if is_remote else PolicyTrainer
            self.trainer = kind(self.model, ranks, self.optimizer, **self.settings)

    @cached_property
    def architecture(self) -> Any:
        """Return the transformers configuration of the model, loaded on first use."""
        from ..models.tokenizer import model_config

        return model_config(self.model)

    def on_respawn(self) -> None:
        """Load the last checkpoint and train the batches since then again; Unrecoverable: there is no journal."""
        from ..training import checkpoint

        def redo_change(change: tuple[Batch, Any, bool] | Write) -> Any:
            if isinstance(change, Write):  # it was being written when the process was lost
                path = self._begin_write(change)
                self.writing = change, path, self.ledger.records
                return path
            batch, answer, same_step = change
            self.trainer.train_step(batch, self.loss, same_step=same_step)
            return answer

        with self._on_device():
            self.ledger.replay(lambda path: checkpoint.load_checkpoint(self.trainer, path), redo_change)

    def teardown(self) -> None:
        """Wait for a checkpoint that is being written, close the trainer, and leave the process group."""
        from ..training.distributed import leave_ranks

        try:
            self._settle_write()
            if hasattr(self, "trainer") and hasattr(self.trainer, "close"):
                self.trainer.close()
        finally:
            leave_ranks()

    @endpoint
    def train_step(
        self,
        batch: Batch | Sequence[Episode | Group] | Sequence[Mapping[str, Any]],
        targets: Sequence[Mapping[str, Any]] | None = None,
        same_step: bool = False,
    ) -> dict[str, float] | float:
        """Train one step, of one update or several, and return its metrics as {"<report>/<name>": value}.

        See `PolicyTrainer.train_step` for the metrics. With `targets` it returns only the loss.

        Args:
            batch: a packed Batch, or episodes or groups, which are packed here. If the loss is an algorithm it computes
                the advantages of groups; otherwise an episode without an advantage trains on its whole reward
                (REINFORCE without a baseline). With `targets`, dicts of tensors, see `forge.data.packing.pack_tensors`.
            same_step: train more updates of the last step, for example on groups of earlier steps: with its learning
                rate, and with ages counted from the weights that it started with.

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
                raise ValueError(
                    f"{type(self.loss).__name__} needs batches packed with unit = {self.unit}, got unit = {batch.unit}"
                )
            # Additional updates belong to the step that was counted last.
            self.staleness.check(batch, self.trainer.step - same_step)
            if self.identities is not None:
                self.identities.check(batch)
            with self._on_device():
                results = self.trainer.train_step(batch, self.loss, same_step=same_step)

        # Of all tokens, attended tokens and predicted tokens. 3: both passes together cost three forward passes.
        lengths = batch.lengths.astype(float)
        token_counts = float(lengths.sum()), float((lengths * (lengths + 1) / 2).sum()), float(batch.mask.sum())
        results["flops"] = 3 * self.trainer.passes.epochs * forward_flops(self.architecture, *token_counts)
        metrics = {f"{self.report}/{name}": value for name, value in results.items()}

        # Recorded after the step, not before it: a batch that kills the trainer must not kill its replacements as well.
        answer = metrics if targets is None else results["loss"]
        return self.ledger.complete((batch, answer, same_step), answer)

    @endpoint
    def recorded(self) -> dict[str, np.ndarray] | None:
        """Return what the last step computed for the tokens that its batch lists in `recorded`: arrays by name, see
        `forge.training.step.TokenRecord`. None if the batch lists none, and on all ranks but the first."""
        return self.trainer.recorded if self.context.rank == 0 else None

    @endpoint
    def logprobs(self, batch: Batch) -> np.ndarray:
        """Return the log-probabilities of the batch's trained tokens under the current weights, [tokens], 0 elsewhere.

        ValueError: this trainer has no policy head.
        """
        with phase("logprobs") if self.context.rank == 0 else nullcontext(), self._on_device():
            return self.trainer.logprobs(batch)

    @endpoint
    def predict(self, batch: Batch) -> np.ndarray:
        """Return the predictions of a value or reward head for the batch's trained tokens, [tokens], 0 elsewhere.

        ValueError: this trainer has a policy head.
        """
        with phase("predict") if self.context.rank == 0 else nullcontext(), self._on_device():
            return self.trainer.predict(batch)

    @endpoint
    def push_weights(self, version: int) -> None:
        """Publish the current weights as `version`; every rank writes the blocks that it holds.

        Raises:
            IncompleteVersion, VersionConflict, OSError: nothing was published, see `VersionStore.put`.
        """
        import torch

        if self.store is None:
            raise ValueError("this trainer has no weight store to publish to: give it store=VersionStore.create()")
        with phase("push_weights") if self.context.rank == 0 else nullcontext():
            is_cast = self.trainer.lora is None and self.trainer.ranks.device.type != "cpu"
            dtype = getattr(torch, self.publish_dtype) if is_cast and self.publish_dtype else None
            self.store.put(self.weights_key, self.trainer.weights(), version, dtype=dtype)

    @endpoint
    def publish_step(self, version: int) -> None:
        """Publish the current weights as `version` if that is the trainer's step; otherwise do nothing."""
        if version == self.trainer.step:
            self.push_weights(version)

    @endpoint
    def save_checkpoint(
        self, folder: str, extra: dict[str, Any] | None = None, keep: int = 2, wait: bool = True
    ) -> str:
        """Write a checkpoint and return its path, see `forge.training.checkpoint.save_checkpoint`.

        Args:
            extra: state of the run to save with it, which `load_checkpoint` returns.
            wait: if False, copy the state in memory, and return while the copy is being written: the next call that
                saves, loads or exports waits for it, and raises its error.

        Raises:
            CheckpointFailed: this checkpoint, or the one before that was not waited for, could not be written.
        """
        from ..training import checkpoint

        if self.ledger.repeated:
            return self.ledger.answer
        with phase("checkpoint") if self.context.rank == 0 else nullcontext():
            self._settle_write()
            age = self.staleness.max_policy_age
            recent = self.identities.recent(self.trainer.step, age) if self.identities else {}
            write = Write(folder, {**(extra or {}), IDENTITIES: recent}, keep)
            if not wait:
                path = self._begin_write(write)
                self.ledger.complete(write, path)
                self.writing = write, path, self.ledger.records
                return path
            path = str(checkpoint.save_checkpoint(self.trainer, folder, extra=write.extra, keep=None))
            if Path(folder).resolve() == self.recovery:
                self.ledger.restart(str(Path(path).resolve()), path)
            self._prune_checkpoints(write, path)

        return path

    @endpoint
    def load_checkpoint(self, path: str) -> dict[str, Any]:
        """Restore the checkpoint at `path`, and return the additional values `extra` that were saved with it."""
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
        """Write the model and its tokenizer into a folder in Hugging Face format."""
        from ..training import checkpoint

        self._settle_write()
        checkpoint.export_model(self.trainer, folder, self.model, self.chat_template)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Load the trainer onto its device within the block; a colocated one leaves it afterwards, also on errors."""
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
        """Copy the state in memory, and start to write the copy while training continues; return the path."""
        from ..training.checkpoint import Background

        self.background = self.background or Background(self.trainer)
        return str(self.background.save(write.folder, extra=write.extra))

    def _settle_write(self) -> None:
        """Wait for the checkpoint that is being written, if any, and start the journal from that checkpoint."""
        if self.writing is None or self.background is None:
            return
        (write, path, since), self.writing = self.writing, None
        self.background.wait()
        if Path(write.folder).resolve() == self.recovery:
            self.ledger.rebase(str(Path(path).resolve()), since)
        self._prune_checkpoints(write, path)

    def _prune_checkpoints(self, write: Write, path: str) -> None:
        """Remove old checkpoints once the journal starts from `path`: until then recovery may need one of them."""
        from ..training import checkpoint

        if self.context.rank == 0:
            checkpoint.prune_checkpoints(write.folder, write.keep, path)

    def _pack_items(self, items: Any, targets: Sequence[Mapping[str, Any]] | None) -> Batch:
        settings: dict[str, Any] = {"aggregation": self.aggregation, "horizon": self.horizon, "unit": self.unit}
        if targets is not None:
            return pack_tensors(items, targets, **settings)
        if isinstance(items, Batch):
            return items

        algorithm: Any = self.loss  # it computes the advantages of groups, if it is an algorithm
        if hasattr(algorithm, "advantages") and all(isinstance(item, Group) for item in items):
            from ..training.credit import make_batch

            return make_batch(items, algorithm, self.trainer.step, **settings)

        episodes = [episode for item in items for episode in (item.episodes if isinstance(item, Group) else [item])]
        for episode in (episode for episode in episodes if episode.advantage is None):
            if episode.outcome is None:
                raise ValueError("cannot train an episode without a reward: score or drop it first")
            episode.advantage = episode.outcome
        return pack(episodes, **settings)
