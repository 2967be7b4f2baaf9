"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from .checkpoint import CheckpointFailed, Content
from .trainer import PolicyTrainer

# The ranks wait for the slowest disk, not for one another's arithmetic.
TIMEOUT = timedelta(hours=1)


class Background:
    """Copies the trainer's state in memory and writes the copy in a thread, one checkpoint at a time.

    Every rank must make one, and make the same calls: the threads of the ranks agree over a process group of their own,
    so that their messages are never mixed up with those of training.
    """

    def __init__(self, trainer: PolicyTrainer) -> None:
        self._trainer = trainer
        self._group = None if trainer.ranks.mesh is None else dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, folder: str | Path, *, extra: dict[str, Any] | None = None) -> Path:
        """Begin a checkpoint as `forge.training.checkpoint.save` writes it, and return its path. It is there once
        `wait` has returned.

        Raises:
            CheckpointFailed: the one before it, which nobody had waited for, could not be written.
        """
        self.wait()
        content = Content.of(self._trainer, folder, extra)
        content.shards = BlockingAsyncStager().stage(content.shards)

        def write() -> None:
            try:
                content.write(self._group)
            except BaseException as error:  # raised by `wait`
                self._error = error

        # A daemon: a process that is told to end does not wait for a disk.
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()
        return content.final

    def wait(self) -> None:
        """Return once nothing is being written.

        Raises:
            CheckpointFailed: it could not be written; said once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error if isinstance(error, CheckpointFailed) else CheckpointFailed(repr(error)) from error
