"""Checkpoints of a trainer: sharded state through torch.distributed.checkpoint, written aside and renamed."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from .trainer import PolicyTrainer

UNFINISHED = ".unfinished"
REPLACED = ".replaced"


def save(
    trainer: PolicyTrainer, folder: str | Path, *, extra: dict[str, Any] | None = None, keep: int | None = 2
) -> Path:
    """Write weights, optimiser, step and random state of every rank to `folder/step_<n>`; every rank must call it.

    Args:
        extra: picklable state of other components (data position, replay buffer), stored by rank 0.
        keep: how many of the newest checkpoints stay; None leaves them all, for `prune` to remove.

    Returns:
        the checkpoint's path. It exists under this name only once it is complete, and what it replaces stays readable
        until then: a process that is killed here loses neither.
    """
    folder = Path(folder)
    final = folder / f"step_{trainer.step:06d}"
    aside = final.with_suffix(UNFINISHED)
    lead = trainer.ranks.rank == 0
    if lead:
        for left in folder.glob(f"step_*{UNFINISHED}"):
            shutil.rmtree(left)
        aside.mkdir(parents=True)
    _barrier(trainer)
    weights, optimizer = get_state_dict(trainer.policy, trainer.optimizer)
    dcp.save({"model": weights, "optimizer": optimizer}, checkpoint_id=aside)
    torch.save({"step": trainer.step, "rng": torch.get_rng_state()}, aside / f"rank_{trainer.ranks.rank}.pt")
    if lead:
        torch.save(extra or {}, aside / "extra.pt")
    _barrier(trainer)
    if lead:
        replaced = final.with_suffix(REPLACED)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(final, replaced)
        os.replace(aside, final)
        shutil.rmtree(replaced, ignore_errors=True)
        if keep is not None:
            prune(folder, keep, final)
    _barrier(trainer)
    return final


def prune(folder: str | Path, keep: int, written: str | Path) -> None:
    """Remove all but the newest `keep` checkpoints, and never the one that was just written."""
    for old in checkpoints(folder)[:-keep]:
        if old != Path(written):
            # Renamed first, so that a half-removed checkpoint does not look like one.
            shutil.rmtree(old.rename(old.with_suffix(UNFINISHED)))


def load(trainer: PolicyTrainer, checkpoint: str | Path) -> dict[str, Any]:
    """Restore a checkpoint in place, on any number of ranks; returns its `extra`. Every rank must call it.

    Raises:
        FileNotFoundError: there is no complete checkpoint at this path.
    """
    checkpoint = _complete(checkpoint)
    weights, optimizer = get_state_dict(trainer.policy, trainer.optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(
        trainer.policy,
        trainer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=True),
    )
    own = checkpoint / f"rank_{trainer.ranks.rank}.pt"
    # A rank that did not exist when the checkpoint was written keeps its own random state.
    saved = torch.load(own if own.exists() else checkpoint / "rank_0.pt", weights_only=True)
    trainer.step = saved["step"]
    if own.exists():
        torch.set_rng_state(saved["rng"])
    return extra(checkpoint)


def extra(checkpoint: str | Path) -> dict[str, Any]:
    """The state of other components that was stored with a checkpoint; FileNotFoundError as in `load`."""
    return torch.load(_complete(checkpoint) / "extra.pt", weights_only=False)


def checkpoints(folder: str | Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    complete: dict[int, Path] = {}
    for path in sorted(Path(folder).glob("step_*")):  # a checkpoint comes before what it replaced
        if match := re.fullmatch(rf"step_(\d+)({re.escape(REPLACED)})?", path.name):
            complete.setdefault(int(match[1]), path)
    return [path for _, path in sorted(complete.items())]


def export(trainer: PolicyTrainer, folder: str | Path, tokenizer: str | Path) -> None:
    """Write the weights and tokenizer in Hugging Face format, aside and renamed; every rank must call it.

    Raises:
        FileExistsError: the folder holds something else than a model.
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").exists():
        raise FileExistsError(f"{folder} exists and is no model: it is not replaced")
    weights = {name: tensor.cpu().clone() for name, tensor in trainer.export_weights()}
    if trainer.ranks.rank == 0:
        aside = folder.with_name(folder.name + UNFINISHED)
        shutil.rmtree(aside, ignore_errors=True)
        trainer.policy.model.save_pretrained(aside, state_dict=weights)
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(aside)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(aside, folder)
    _barrier(trainer)


def _complete(checkpoint: str | Path) -> Path:
    """The checkpoint of this name, or what it was about to replace when its writer was killed."""
    checkpoint = Path(checkpoint)
    replaced = checkpoint.with_suffix(REPLACED)
    found = replaced if replaced.exists() and not checkpoint.exists() else checkpoint
    if found.suffix == UNFINISHED or not (found / "extra.pt").exists():
        raise FileNotFoundError(f"{checkpoint} is not a complete checkpoint")
    return found


def _barrier(trainer: PolicyTrainer) -> None:
    if trainer.ranks.mesh is not None:
        dist.barrier()
