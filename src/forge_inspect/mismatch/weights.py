"""The weights of a version: the model that training began with, or a checkpoint in its place."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
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

Tensors = Mapping[str, Tensor]
NEAREST = 2  # versions beside the start that are tried in place of another


@dataclass(frozen=True)
class Version:
    """One version of the weights.

    policy: the trainer's model, in float32 and in one process, with its adapters. tensors: the weights that are
    published, adapters merged, by the names of transformers' models; tied ones once.
    """

    number: int
    policy: Policy
    tensors: Tensors


class Store:
    """The versions that a run's folder has, each read once."""

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self._versions: dict[int, Version] = {}

    def version(self, number: int) -> Version:
        """The weights of a version. ValueError: its checkpoint is not of this model."""
        if number not in self._versions:
            self._versions[number] = read_version(self.run, number)
        return self._versions[number]

    def others(self, number: int) -> list[Version]:
        """The versions that may stand in place of one: the nearest, and the start; earlier ones first."""
        numbers = sorted({*self.run.versions} - {number}, key=lambda other: (abs(other - number), other))
        nearest_numbers = {*numbers[:NEAREST], *numbers[-1:]} | ({0} - {number})
        return [self.version(other) for other in sorted(nearest_numbers, key=lambda other: (other > number, -other))]


@torch.no_grad()
def read_version(run: RecordedRun, number: int) -> Version:
    """Read the weights of a version. ValueError: the checkpoint is not of this model."""
    lora = None if run.lora is None else LoraSettings(**run.lora)
    policy = Policy.from_pretrained(run.start)
    if lora is not None:
        add_adapters(policy.model, lora)
    # Version 0 of a resumed run may have a checkpoint of the same weights: the folder of the model is as good.
    if number:
        try:
            check_files(run.checkpoints[number])
            read_checkpoint(policy, run.checkpoints[number])
        except (OSError, RuntimeError, KeyError, EOFError, pickle.UnpicklingError, CheckpointException) as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(f"{run.checkpoints[number]} cannot be read: {reason}") from error
    policy.requires_grad_(False).eval()
    return Version(number, policy, merged(policy, lora))


@torch.no_grad()
def merged(policy: Policy, lora: LoraSettings | None) -> dict[str, Tensor]:
    """The weights that a trainer publishes: W + (alpha / rank) B A of layers with adapters."""
    parameters = dict(policy.named_weights())
    if lora is None:
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}
    factors = adapters(parameters.items())
    scaled = {
        name: factor * (lora.alpha / lora.rank) if name.endswith(".lora_B.weight") else factor
        for name, factor in factors.items()
    }
    base = ((name, parameter.detach().clone()) for name, parameter in parameters.items() if name not in factors)
    return dict(merge_adapters(base, scaled))


def read_checkpoint(policy: nn.Module, folder: Path) -> None:
    """Read a checkpoint's weights into a model, in place; those that it lacks are frozen ones of the base. A
    divided model gets its parts, whatever the layout was that wrote them. ValueError: it is of another model."""
    reader = Reader(folder)
    stored: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {
        name: parameter.detach() for name, parameter in policy.named_parameters() if f"model.{name}" in stored
    }
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
