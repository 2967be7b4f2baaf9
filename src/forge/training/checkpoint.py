"""Checkpoints of a trainer: sharded state through torch.distributed.checkpoint, renamed into place when complete."""

import os
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ..system.checksums import CHECKSUMS, DamagedFile, check_files, write_checksums
from ..system.files import free_bytes, removed_on_error, room_for, sync_path
from .checkpoint_reader import Planner, Reader, dump_plain, load_plain
from .distributed import Ranks
from .loading import write_weights
from .optimizers import begin_state, tensor_bytes
from .trainer import PolicyTrainer

UNFINISHED = ".unfinished"
REPLACED = ".replaced"
DAMAGED = ".damaged"
TIMEOUT = timedelta(hours=1)  # of collectives of background checkpoints, which wait for the slowest disk


class CheckpointFailed(OSError):
    """A checkpoint could not be written; earlier ones are unchanged."""


def save_checkpoint(
    trainer: PolicyTrainer, folder: str | Path, *, extra: dict[str, Any] | None = None, keep: int | None = 2
) -> Path:
    """Write weights, optimiser, step and random state of every rank to `folder/step_<n>`; every rank must call it.

    Args:
        extra: state of other components (data position, replay buffer), stored by rank 0: plain data, arrays,
            tensors and rollouts (`checkpoint_reader.ALLOWED`).
        keep: number of newest checkpoints to keep; None keeps all.

    Returns:
        the checkpoint's path. The path exists only once the checkpoint is complete and on the disk. A checkpoint that
        it replaces stays readable until then, also after a kill or a power cut.

    Raises:
        CheckpointFailed: it could not be written, on every rank with the reason.
        UnsafeCheckpoint: `extra` holds an object of another type.
    """
    final = CheckpointPart.from_trainer(trainer, folder, extra).write()
    if keep is not None and trainer.ranks.rank == 0:
        prune_checkpoints(folder, keep, final)
    if trainer.ranks.mesh is not None:
        dist.barrier()
    return final


@dataclass
class CheckpointPart:
    """One rank's part of a checkpoint."""

    ranks: Ranks
    final: Path  # of the complete checkpoint
    shards: dict[str, Any]  # "model" and "optimizer": the trainer's own tensors, not copies
    files: dict[str, bytes]  # this rank's other files, by name

    @classmethod
    def from_trainer(cls, trainer: PolicyTrainer, folder: str | Path, extra: dict[str, Any] | None) -> "CheckpointPart":
        """Return this rank's part of the trainer's current state and, on rank 0, `extra`; every rank must call it."""
        rank, device = trainer.ranks.rank, trainer.ranks.device
        state: dict[str, Any] = {
            "step": trainer.step,
            "rng": torch.get_rng_state(),
            "optimizer": _optimizer_name(trainer),
            "path": trainer.save_state() if hasattr(trainer, "save_state") else None,  # at a server
        }
        if device.type != "cpu":
            state["device"] = torch.get_device_module(device).get_rng_state()

        contents = {f"rank_{rank}.pt": state} | ({"extra.pt": extra or {}} if rank == 0 else {})
        files = {name: dump_plain(content, name) for name, content in contents.items()}
        return cls(trainer.ranks, Path(folder) / f"step_{trainer.step:06d}", _trained_state(trainer), files)

    @property
    def size(self) -> int:
        """Return the bytes of this rank's tensors and files."""
        return tensor_bytes(self.shards) + sum(map(len, self.files.values()))

    def write(self, group: dist.ProcessGroup | None = None) -> Path:
        """Write the checkpoint and return its path; every rank must call it. `group` is for the ranks' collectives.

        Raises:
            CheckpointFailed: it could not be written, on every rank with the reason.
        """
        unfinished = self.final.with_suffix(UNFINISHED)

        def prepare_folder() -> None:
            for leftover in self.final.parent.glob(f"step_*{UNFINISHED}"):
                shutil.rmtree(leftover)
            unfinished.mkdir(parents=True)

        def write_files() -> None:
            for name, data in self.files.items():
                with (unfinished / name).open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())

        def files_of(rank: int) -> set[str]:
            return {path.name for path in unfinished.glob(f"__{rank}_*")} | {f"rank_{rank}.pt"}

        def write_rank_checksums() -> None:
            if rank := self.ranks.rank:
                write_checksums(unfinished, files_of(rank), f"rank_{rank}.{CHECKSUMS}")

        def rename_folder() -> None:
            # Rank 0 lists the files that the other ranks have not listed.
            listed = {name for rank in range(1, self.ranks.world_size) for name in files_of(rank)}
            write_checksums(unfinished, {path.name for path in unfinished.iterdir()} - listed)
            sync_path(unfinished)
            # Renames are atomic: at any time there is a complete checkpoint of this name, or the one that it replaces.
            replaced = self.final.with_suffix(REPLACED)
            if self.final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                os.replace(self.final, replaced)
            os.replace(unfinished, self.final)
            sync_path(self.final.parent)
            shutil.rmtree(replaced, ignore_errors=True)

        # Stage by stage on all ranks: none continues where another has failed.
        self._run_stage(prepare_folder, group, lead=True)
        self._run_stage(lambda: dcp.save(self.shards, checkpoint_id=unfinished, process_group=group), group)
        self._run_stage(write_files, group)
        self._run_stage(write_rank_checksums, group)
        self._run_stage(rename_folder, group, lead=True)

        return self.final

    def _run_stage(self, stage: Callable[[], Any], group: dist.ProcessGroup | None, lead: bool = False) -> None:
        """Run a stage on every rank, or with `lead` on rank 0; if it fails on any, all ranks raise CheckpointFailed."""
        error: BaseException | None = None
        try:
            if not lead or self.ranks.rank == 0:
                stage()
        except (Exception, CheckpointException) as raised:  # the latter is a BaseException
            error = raised

        # Every rank learns which others failed, and the size of their parts.
        report = (None if error is None else _describe_error(error), self.size)
        reports = [report] * self.ranks.world_size
        if self.ranks.mesh is not None:
            dist.all_gather_object(reports, report, group=group)
        if (reason := next((text for text, _ in reports if text), None)) is None:
            return

        if self.ranks.rank == 0:
            # Free its space for the rest of the run.
            shutil.rmtree(self.final.with_suffix(UNFINISHED), ignore_errors=True)
        complete = list_checkpoints(self.final.parent)
        hint = f"the newest is {complete[-1]}" if complete else "there is no other"
        with suppress(OSError):  # the folder itself may not exist
            free, size = free_bytes(self.final.parent), sum(size for _, size in reports)
            hint += f"; it needs {size:,} bytes, and its disk has {free:,} free"
        raise CheckpointFailed(f"checkpoint {self.final} could not be written: {reason}; {hint}") from error


def _describe_error(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return next(_describe_error(cause) for cause, _ in error.failures.values())
    # On a full disk torch's file writer reports a wrong position; the cause is in its context.
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        error = error.__context__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}".splitlines()[0]


class Background:
    """Asynchronous checkpoints: copies a trainer's state in memory and writes the copy in a thread.

    Every rank must construct one and make the same calls. The threads' collectives have their own process group, so
    that they never mix with those in training.
    """

    def __init__(self, trainer: PolicyTrainer) -> None:
        self._trainer = trainer
        self._group = None if trainer.ranks.mesh is None else dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, folder: str | Path, *, extra: dict[str, Any] | None = None) -> Path:
        """Start to write a checkpoint as `save_checkpoint`; return its path, which exists once `wait` has returned.

        Raises:
            CheckpointFailed: the previous checkpoint failed, and `wait` has not raised that yet.
        """
        self.wait()
        snapshot = CheckpointPart.from_trainer(self._trainer, folder, extra)
        snapshot.shards = BlockingAsyncStager().stage(snapshot.shards)

        def write_snapshot() -> None:
            try:
                snapshot.write(self._group)
            except BaseException as error:  # raised by `wait`
                self._error = error

        # A daemon thread: the end of the process does not wait for a disk.
        self._thread = threading.Thread(target=write_snapshot, name="checkpoint", daemon=True)
        self._thread.start()
        return snapshot.final

    def wait(self) -> None:
        """Wait for the checkpoint in progress, if any. If it could not be written, raise CheckpointFailed once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error if isinstance(error, CheckpointFailed) else CheckpointFailed(repr(error)) from error


def prune_checkpoints(folder: str | Path, keep: int, written: str | Path) -> None:
    """Remove all but the newest `keep` checkpoints and the one just `written`."""
    for old in list_checkpoints(folder)[:-keep]:
        if old != Path(written):
            # Renamed first, so that a half-removed checkpoint does not count as one.
            shutil.rmtree(old.rename(old.with_suffix(UNFINISHED)))


def load_checkpoint(trainer: PolicyTrainer, checkpoint: str | Path) -> dict[str, Any]:
    """Restore a trainer from a checkpoint, on any number of ranks; return its `extra`. Every rank must call it.

    Raises:
        FileNotFoundError: there is no complete checkpoint at this path.
        DamagedFile: a file differs from its checksum.
        UnsafeCheckpoint: a file holds more than tensors, plain data and rollouts.
        ValueError: it was written with another optimiser.
    """
    checkpoint = _complete_folder(checkpoint)
    _check_together(checkpoint, trainer.ranks)
    rank_file = checkpoint / f"rank_{trainer.ranks.rank}.pt"

    # A rank that the checkpoint has no random state for keeps its own.
    rank_state = load_plain(rank_file if rank_file.exists() else checkpoint / "rank_0.pt")
    if (saved_name := rank_state.get("optimizer", "adamw")) != (own_name := _optimizer_name(trainer)):
        raise ValueError(
            f"{checkpoint} was written with the optimizer {saved_name}, training.optimizer is {own_name}: keep it"
        )
    if hasattr(trainer, "load_state"):
        trainer.load_state(rank_state["path"])
    else:
        _load_shards(trainer, checkpoint)
    trainer.step = rank_state["step"]
    if rank_file.exists():
        torch.set_rng_state(rank_state["rng"])
        if "device" in rank_state and trainer.ranks.device.type != "cpu":
            torch.get_device_module(trainer.ranks.device).set_rng_state(rank_state["device"])

    return read_extra(checkpoint)


def _load_shards(trainer: PolicyTrainer, checkpoint: Path) -> None:
    state = _trained_state(trainer)
    reader = Reader(checkpoint)
    reader.read_metadata()  # dcp.load would hide what this raises
    try:
        dcp.load(state, storage_reader=reader, planner=Planner())
    except CheckpointException as error:
        raise next(cause for cause, _ in error.failures.values()) from error
    options = StateDictOptions(strict=not _frozen_names(trainer))
    weights, optimizer = state["model"], state["optimizer"]
    set_state_dict(
        trainer.policy, trainer.optimizer, model_state_dict=weights, optim_state_dict=optimizer, options=options
    )


def _check_together(checkpoint: Path, ranks: Ranks) -> None:
    """Compare a checkpoint's files with their checksums on rank 0; if one differs, raise DamagedFile on every rank."""
    damage: list[str | None] = [None]
    if ranks.rank == 0:
        try:
            check_files(checkpoint)
        except OSError as error:
            damage = [str(error)]
    if ranks.mesh is not None:
        dist.broadcast_object_list(damage, src=0)
    if damage[0]:
        raise DamagedFile(damage[0])


def _trained_state(trainer: PolicyTrainer) -> dict[str, Any]:
    """Return "model", the trained weights by name, and "optimizer", its state; frozen weights are in the base model.
    It is empty for a trainer whose weights are at a server."""
    if hasattr(trainer, "save_state"):
        return {}
    begin_state(trainer.optimizer)
    weights, optimizer = get_state_dict(trainer.policy, trainer.optimizer)
    if trainer.ranks.stages > 1:
        trainer.policy.join_groups(optimizer["param_groups"])
    frozen = _frozen_names(trainer)
    return {"model": {name: values for name, values in weights.items() if name not in frozen}, "optimizer": optimizer}


def _optimizer_name(trainer: PolicyTrainer) -> str:
    return trainer.settings.kind(trainer.passes.weights_dtype)


def _frozen_names(trainer: PolicyTrainer) -> set[str]:
    parameters = trainer.policy.named_parameters(remove_duplicate=False)
    return {name for name, parameter in parameters if not parameter.requires_grad}


def read_extra(checkpoint: str | Path) -> dict[str, Any]:
    """Return the `extra` that was saved. This compares no checksums; else it raises as `load_checkpoint`."""
    return load_plain(_complete_folder(checkpoint) / "extra.pt")


def step_of(checkpoint: str | Path) -> int:
    """Return the number of steps in a checkpoint, from its name: 6 for "run/checkpoints/step_000006"."""
    return int(Path(checkpoint).stem.removeprefix("step_"))


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Return the paths of the complete checkpoints of a folder, oldest first."""
    complete: dict[int, Path] = {}
    for path in sorted(Path(folder).glob("step_*")):  # a checkpoint sorts before the one it replaced
        if match := re.fullmatch(rf"step_(\d+)({re.escape(REPLACED)})?", path.name):
            complete.setdefault(int(match[1]), path)
    return [path for _, path in sorted(complete.items())]


def export_model(
    trainer: PolicyTrainer, folder: str | Path, tokenizer: str | Path, template: str | None = None
) -> None:
    """Write a trainer's weights and its tokenizer, with a chat template or (None) its own, in Hugging Face format,
    atomically; every rank must call it. A model with a scalar head becomes a sequence classifier of one class.

    Raises:
        FileExistsError: the folder exists, is not empty and is not a model.
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").exists():
        raise FileExistsError(f"{folder} exists and is not a model directory: choose another directory")
    weights = trainer.policy.plain_weights(trainer.export_weights())

    if trainer.ranks.rank != 0:
        deque(weights, maxlen=0)  # iterates, as every rank must to gather each tensor
    else:
        unfinished = folder.with_name(folder.name + UNFINISHED)
        shutil.rmtree(unfinished, ignore_errors=True)
        loaded_tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
        loaded_tokenizer.chat_template = template or loaded_tokenizer.chat_template
        planned = list(trainer.policy.plain_weights(trainer.export_weights(meta=True)))

        with room_for(folder, sum(tensor.nbytes for _, tensor in planned)), removed_on_error(unfinished):
            trainer.policy.save_config(unfinished, loaded_tokenizer)
            write_weights(unfinished, planned, weights)
            loaded_tokenizer.save_pretrained(unfinished)
            files = [path for path in unfinished.rglob("*") if path.is_file()]  # chat templates may have a folder
            for path in unfinished.rglob("*"):
                sync_path(path)
            write_checksums(unfinished, [str(path.relative_to(unfinished)) for path in files])
            sync_path(unfinished)

        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
        sync_path(folder.parent)

    if trainer.ranks.mesh is not None:
        dist.barrier()


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, e.g. to `step_000006.damaged`, so that it is not listed; return the new path."""
    damaged = checkpoint.with_name(f"{checkpoint.name}{DAMAGED}")
    shutil.rmtree(damaged, ignore_errors=True)
    return checkpoint.rename(damaged)


def _complete_folder(checkpoint: str | Path) -> Path:
    """Return the folder of a checkpoint: if it was killed while it replaced one of the same name, that one's."""
    checkpoint = Path(checkpoint)
    replaced = checkpoint.with_suffix(REPLACED)
    folder = replaced if replaced.exists() and not checkpoint.exists() else checkpoint
    if folder.suffix == UNFINISHED or not folder.is_dir():
        raise FileNotFoundError(f"{checkpoint} is not a complete checkpoint")
    return folder
