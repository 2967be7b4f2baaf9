"""Free space on disk and in shared memory for what a run is certain to write, checked before anything starts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.store.versions import memory_folder
from ..system.files import free_bytes
from ..system.scratch import sweep
from .memory import BYTES, count_parameters, state_bytes

if TYPE_CHECKING:
    from .schema import TrainingRecipe

VERSIONS = 3  # of the weights: two that are published, and one that is being written


def check_space(cfg: TrainingRecipe, model: str, start: int, overwrite: bool) -> None:
    """Reject a run that its disk or its shared memory has no room for.

    Args:
        model: folder of the model that is trained.
        start: step at which the run starts.
        overwrite: whether an earlier run in its folder is removed.

    Raises:
        ValueError: names the path, the bytes that are needed and those that are free.
    """
    count = count_parameters(model)
    if not count:
        return
    folder = Path(cfg.run.root) / cfg.run.name
    size = count * BYTES[cfg.training.weights_dtype]
    # What is overwritten is removed first, and counts as free.
    replaced = [path.stat().st_size for path in folder.rglob("*") if path.is_file()] if overwrite else []
    needed = cfg.trained * _most(cfg, model, size, start)
    free = free_bytes(folder) + sum(replaced)
    if needed > free:
        raise ValueError(
            f"{folder} needs {needed:,} bytes for checkpoints and the trained model, and its disk has {free:,} free: "
            "set run.root to another disk, or checkpoint.every to 0"
        )
    # Supervised training publishes weights for evaluations alone; other hosts have their own memory.
    samples = getattr(cfg.services, "generator", None) is not None and not hasattr(cfg.eval, "stop_at")
    if not samples or cfg.lora is not None or cfg.cluster.configured_hosts:
        return
    sweep()  # of what dead processes left there, which a start removes
    memory = memory_folder()
    versions = 1 + math.ceil((cfg.training.steps - start) / cfg.training.sync_interval)
    versions = min(VERSIONS, versions) * cfg.trained
    free = free_bytes(memory)
    if versions * size > free:
        raise ValueError(
            f"{memory} needs {versions * size:,} bytes for {versions} versions of the weights, and has {free:,} free: "
            "make it larger (docker run --shm-size), or remove what is in it"
        )


def _most(cfg: TrainingRecipe, model: str, size: int, start: int) -> int:
    """Bytes that checkpoints and the trained model take at once; those that a resumed run has are there already."""
    every = cfg.checkpoint.every
    remaining = cfg.training.steps - start
    if start or not every or cfg.lora is not None:
        return size
    count = count_parameters(model)
    matrices = count_parameters(model, matrices=True) / count
    checkpoint = size + int(count * state_bytes(cfg.training, matrices))
    saves = 1 if hasattr(cfg.eval, "stop_at") else math.ceil(remaining / every)  # it may end at its first
    keep = cfg.checkpoint.keep
    # One more than are kept, while it is written; the model is written beside those that are kept.
    return max(min(keep + 1, saves) * checkpoint, min(keep, saves) * checkpoint + size)
