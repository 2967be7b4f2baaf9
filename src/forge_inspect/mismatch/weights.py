"""The weights of a recorded run: the model that training began with, or a checkpoint in its place."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from forge.models.weight_layouts import adapters, merge_adapters
from forge.system.checksums import check_files
from forge.training.checkpoint_reader import Planner, Reader
from forge.training.lora import add_adapters
from forge.training.policy import Policy
from forge.training.settings import LoraSettings

from .recorded import RecordedRun


@torch.no_grad()
def read_policy(run: RecordedRun) -> tuple[Policy, dict[str, Tensor]]:
    """Read the weights of the run's version.

    Returns:
        the trainer's model, in float32 and in one process, with its adapters; and the weights that are published,
        adapters merged, by the names of transformers' models; tied ones once.

    Raises:
        ValueError: the checkpoint is not of this model, or damaged.
    """
    settings = {key.removeprefix("lora."): value for key, value in run.settings.items() if key.startswith("lora.")}
    lora = LoraSettings(**settings) if settings else None
    policy = Policy.from_pretrained(run.start)
    if lora is not None:
        add_adapters(policy.model, lora)
    # Version 0 of a resumed run may have a checkpoint of the same weights: the folder of the model is as good.
    if run.version and run.checkpoint is not None:
        try:
            check_files(run.checkpoint)
            _read_checkpoint(policy, run.checkpoint)
        except (OSError, RuntimeError, KeyError, EOFError, pickle.UnpicklingError, CheckpointException) as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(f"{run.checkpoint} cannot be read: {reason}") from error
    policy.requires_grad_(False).eval()

    tensors = {name: parameter.detach() for name, parameter in policy.named_weights()}
    if lora is not None:
        # W + (alpha / rank) B A, as a trainer publishes layers with adapters.
        factors = adapters(tensors.items())
        base = [(name, tensor) for name, tensor in tensors.items() if name not in factors]
        scales = {name: lora.alpha / lora.rank if name.endswith(".lora_B.weight") else 1.0 for name in factors}
        tensors = dict(merge_adapters(base, {name: factor * scales[name] for name, factor in factors.items()}))
    return policy, tensors


def _read_checkpoint(policy: nn.Module, folder: Path) -> None:
    """Read a checkpoint's weights into a model, in place; those that it lacks are frozen ones of the base. A divided
    model gets its parts, whatever the layout was that wrote them. ValueError: it is of another model."""
    reader = Reader(folder)
    stored: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    wanted = {name: weight for name, weight in policy.named_parameters() if f"model.{name}" in stored}
    if not wanted:
        raise ValueError(f"{folder} has no weights of the model that the run began with")
    # In the checkpoint's own dtype: bfloat16 weights are read without rounding and widened.
    buffers = {
        name: torch.empty_like(tensor, dtype=stored[f"model.{name}"].properties.dtype)
        for name, tensor in wanted.items()
    }
    dcp.load({"model": buffers}, storage_reader=reader, planner=Planner())
    for name, tensor in wanted.items():
        tensor.copy_(buffers[name])
