"""What a configuration needs in memory for the weights of a model and what trains them, before anything starts."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

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


def state_bytes(training: Any, matrices: float) -> float:
    """The optimiser's state, in bytes a parameter, where this share of all parameters are matrices of layers."""
    held, state = training.weights_dtype, training.optimizer_dtype or training.weights_dtype
    if training.optimizer == "adamw8bit":
        return 2 * (1 + 4 / 256)  # a scale for each block
    moments = 2 - matrices if training.optimizer == "muon" else 2
    return moments * BYTES[state] + (2 if (held, state) == ("bfloat16", "float32") else 0)


def memory_report(cfg: Any, model: str) -> list[str]:
    """One line for each component that holds the model. Activations, caches and libraries come on top.

    Args:
        cfg: configuration of a recipe.
    """
    count, lines = count_parameters(model), []
    if not count:
        return []

    def gb(size: float) -> str:
        return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"

    services, training = cfg.services, cfg.training
    held = training.weights_dtype
    for name in ("trainer", "critic"):
        if getattr(services, name, None) is None or (name == "critic" and not cfg.load_algorithm().needs_critic):
            continue
        shares = cfg.layout(name).shares(services[name].procs)
        weights = count * BYTES[held] / shares
        needed = state_bytes(training, count_parameters(model, matrices=True) / count)
        state = needed * count / shares
        parts = f"weights {gb(weights)}, gradients {gb(weights)}, {NAMES[training.optimizer]} {gb(state)}"
        if training.kind(held) != "adamw":
            dtype = "8 bits" if training.optimizer == "adamw8bit" else training.optimizer_dtype or held
            parts += f" in {dtype}, together {2 * BYTES[held] + needed:.3g} bytes a parameter"
        parts += f": {gb(2 * weights + state)}"
        if cfg.lora is not None:
            parts = f"frozen weights {gb(weights)}, and adapters"
        where = "in host memory, " if training.cpu_offload else ""
        lines.append(
            f"{name}: {where}{parts} in {held} in each of {services[name].procs} process(es), "
            f"which compute in {training.dtype}"
        )
    if (placed := getattr(services, "generator", None)) is not None and hasattr(cfg, "generator"):
        dtype = cfg.generator.dtype
        each = gb(count * BYTES[dtype] / placed.procs)
        lines.append(
            f"generator: weights {each} in {dtype} in each of {placed.num_replicas * placed.procs} process(es)"
        )
    if (placed := getattr(services, "ref_model", None)) is not None:
        shares = 1 if placed.procs == 1 else cfg.layout("ref_model").shares(placed.procs)
        size, dtype, there = count * BYTES[training.dtype] / shares, training.dtype, placed.num_replicas * placed.procs
        if dtype != held and placed.procs == services.trainer.procs == 1:
            size = count * BYTES[held] - 2 * count_parameters(model, matrices=True, experts=False)
            dtype = f"{dtype} (matrices of layers) and {held}"
        lines.append(f"ref_model: weights {gb(size)} in {dtype} in each of {there} process(es)")
    return [f"{count:,} parameters", *lines]
