"""The memory that a configuration needs for weights, gradients and optimiser state, before anything starts."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from ..runtime.controller import Options
from .schema import RecipeConfig, TrainingConfig, TrainingRecipe

BYTES = {"float32": 4, "bfloat16": 2}
NAMES = {"adamw": "AdamW", "muon": "Muon and AdamW", "adamw8bit": "AdamW"}


def count_parameters(model: str, matrices: bool = False, experts: bool = True) -> int:
    """Parameters in the safetensors files of a folder, by their headers, or those of decoder layers' matrices alone,
    with or without those of experts; 0 if there are none."""
    total = 0
    for path in Path(model).glob("*.safetensors"):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        shapes = {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
        if matrices:
            shapes = {name: shape for name, shape in shapes.items() if ".layers." in name and len(shape) >= 2}
        if not experts:
            shapes = {name: shape for name, shape in shapes.items() if ".experts." not in name}
        total += sum(map(math.prod, shapes.values()))
    return total


def state_bytes(training: TrainingConfig, matrices: float) -> float:
    """The optimiser's state, in bytes a parameter, where this share of all parameters are matrices of layers."""
    weights_dtype = training.weights_dtype
    state_dtype = training.optimizer_dtype or training.weights_dtype
    if training.optimizer == "adamw8bit":
        return 2 * (1 + 4 / 256)  # a scale for each block
    moments = 2 - matrices if training.optimizer == "muon" else 2
    return moments * BYTES[state_dtype] + (2 if (weights_dtype, state_dtype) == ("bfloat16", "float32") else 0)


def memory_report(cfg: TrainingRecipe, model: str) -> list[str]:
    """One line for each component that holds the model. Activations, caches and libraries come on top."""
    parameters = count_parameters(model)
    if not parameters:
        return []
    trainers = [name for name in ("trainer", "critic") if cfg.service(name) is not None and name not in cfg.idle]
    lines = [f"{parameters:,} parameters", *(_trainer_line(cfg, model, name, parameters) for name in trainers)]
    generator = cfg.service("generator")
    if generator is not None and isinstance(cfg, RecipeConfig):
        dtype: str = cfg.generator.dtype
        size = parameters * BYTES[dtype] / generator.procs
        if cfg.generator.quantization is not None:  # one byte for each element of layers' matrices
            size -= count_parameters(model, matrices=True) * (BYTES[dtype] - 1)
            dtype = f"{cfg.generator.quantization} and {dtype}"
        weights = readable(size)
        processes = generator.num_replicas * generator.procs
        lines.append(f"generator: weights {weights} in {dtype} in each of {processes} process(es)")
    reference = cfg.service("ref_model")
    if reference is not None:
        lines.append(_reference_line(cfg, model, reference, parameters))
    return lines


def readable(size: float) -> str:
    """A number of bytes in GB, or in MB below a tenth of one."""
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


def _trainer_line(cfg: TrainingRecipe, model: str, name: str, parameters: int) -> str:
    training = cfg.training
    dtype = training.weights_dtype
    procs = cfg.services[name].procs
    shares = cfg.layout(name).shares(procs)
    weights = parameters * BYTES[dtype] / shares
    state_per_parameter = state_bytes(training, count_parameters(model, matrices=True) / parameters)
    state = state_per_parameter * parameters / shares
    optimizer = f"{NAMES[training.optimizer]} {readable(state)}"
    if training.kind(dtype) != "adamw":  # its state has another width than the weights
        width = "8 bits" if training.optimizer == "adamw8bit" else training.optimizer_dtype or dtype
        optimizer += f" in {width}, together {2 * BYTES[dtype] + state_per_parameter:.3g} bytes a parameter"
    total = readable(2 * weights + state)
    parts = f"weights {readable(weights)}, gradients {readable(weights)}, {optimizer}: {total}"
    if cfg.lora is not None:
        parts = f"frozen weights {readable(weights)}, and adapters"
    location = "in host memory, " if training.cpu_offload else ""
    return f"{name}: {location}{parts} in {dtype} in each of {procs} process(es), which compute in {training.dtype}"


def _reference_line(cfg: TrainingRecipe, model: str, reference: Options, parameters: int) -> str:
    training = cfg.training
    dtype: str = training.dtype
    shares = 1 if reference.procs == 1 else cfg.layout("ref_model").shares(reference.procs)
    size = parameters * BYTES[training.dtype] / shares
    # Undivided, it rounds its products as the trainer does: matrices of layers alone are held in the narrow dtype.
    if dtype != training.weights_dtype and reference.procs == cfg.services.trainer.procs == 1:
        size = parameters * BYTES[training.weights_dtype] - 2 * count_parameters(model, matrices=True, experts=False)
        dtype = f"{dtype} (matrices of layers) and {training.weights_dtype}"
    processes = reference.num_replicas * reference.procs
    return f"ref_model: weights {readable(size)} in {dtype} in each of {processes} process(es)"
