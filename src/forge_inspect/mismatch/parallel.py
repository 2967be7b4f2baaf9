"""The trainer's forward pass over several ranks, as the run divided it: processes of this machine, joined by gloo."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from forge.system.devices import accelerator
from forge.training.build import build
from forge.training.distributed import join, leave
from forge.training.settings import LoraSettings, Parallelism
from forge.training.step import score

from .recorded import RecordedRun
from .weights import read_checkpoint

TIMEOUT = 600.0  # seconds for all ranks together: they read the model, and score one batch
REASON = "reason.txt"
NUMBERS = "logprobs.npy"


def ranks_of(run: RecordedRun) -> int:
    """The number of ranks that trained together; 1 on a machine with an accelerator, whose ranks would share it."""
    return int(run.settings.get("services.trainer.procs") or 1) if accelerator() is None else 1


def divided(run: RecordedRun) -> np.ndarray:
    """Log-probabilities of the compared tokens by as many ranks as trained, [compared].

    Raises:
        ValueError: a rank failed, or did not end in time; in one line.
    """
    count = ranks_of(run)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        processes = [
            context.Process(target=_rank, args=(rank, count, scratch, run), daemon=True) for rank in range(count)
        ]
        deadline = time.monotonic() + TIMEOUT
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
        reason, numbers = Path(scratch) / REASON, Path(scratch) / NUMBERS
        if reason.exists():
            raise ValueError(f"a rank of the trainer failed: {reason.read_text()}")
        if not numbers.exists():
            raise ValueError(f"the {count} ranks of the trainer did not end within {TIMEOUT:.0f} s")
        return np.asarray(np.load(numbers))


def _rank(rank: int, count: int, scratch: str, run: RecordedRun) -> None:
    """One rank's process: load, divide, read the checkpoint in the divided layout, and score."""
    try:
        _score(rank, count, Path(scratch), run)
    except Exception as error:  # any reason has to reach the process that waits
        (Path(scratch) / REASON).write_text(" ".join(f"{type(error).__name__}: {error}".split())[:300])


@torch.no_grad()
def _score(rank: int, count: int, scratch: Path, run: RecordedRun) -> None:
    prefix = "parallelism."
    degrees = {key.removeprefix(prefix): value for key, value in run.settings.items() if key.startswith(prefix)}
    ranks = join(rank, count, dist.FileStore(str(scratch / "store"), count), Parallelism(**degrees))
    lora = None if run.lora is None else LoraSettings(**run.lora)
    policy = build(run.start, "policy", ranks, lora=lora).requires_grad_(False)
    if run.version:
        read_checkpoint(policy, run.checkpoints[run.version])
    batch = run.batch()
    numbers = score(lambda part: policy(part, run.temperature)[0], batch, max_tokens=len(batch.tokens), ranks=ranks)
    if rank == 0:
        np.save(scratch / NUMBERS, numbers[batch.mask])
    leave()
