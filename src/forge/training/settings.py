"""Settings of training: sections of a configuration, and what the trainer's parts take. Imports no torch."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from ..config import Section

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class OptimizerSettings(Section):
    """AdamW (Loshchilov & Hutter 2019) with a schedule over optimiser steps."""

    learning_rate: float = Field(1e-6, ge=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Of AdamW, on matrices only."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the running mean of gradients."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the running mean of squared gradients."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the running mean of squares."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Clip the global gradient norm to this; 0: no clipping."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up from 0 to the peak, in steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, down to `min_lr_ratio` of the peak at `steps`."""
    min_lr_ratio: float = Field(0.1, ge=0)
    """Final learning rate as a share of the peak."""
    steps: int = Field(0, ge=0)
    """Optimiser steps of the run."""

    def _check(self) -> None:
        if self.schedule != "constant" and self.steps <= self.warmup_steps:
            raise ValueError(f"a {self.schedule} schedule needs steps > warmup_steps, got {self.steps}")

    def scale(self, step: int) -> float:
        """Share of the peak rate at optimiser step `step` (from 0)."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        shape = 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * shape


class PassSettings(Section):
    """How a step passes its batch through the model: the parts it is cut into, memory and precision."""

    seq_len: PositiveInt = 4096
    """Longest sequence, and most tokens of a packed micro-batch: lower it when memory runs out."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass; weights, gradient sums and optimiser stay float32. A CPU without bfloat16
    arithmetic computes in float32 and logs it."""
    gradient_accumulation_steps: PositiveInt = 1
    """Least number of micro-batches of an update on each rank."""
    mini_batches: PositiveInt = 1
    """Parts a batch is cut into, each with an update of its own."""
    epochs: PositiveInt = 1
    """Passes of a step over its batch: a step makes `mini_batches` * `epochs` updates. Policy versions count steps."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimiser in host memory; layers come to the GPU to compute. Needs a GPU."""
    compile: bool = False
    """torch.compile decoder layers but for attention; with `gradient_checkpointing` their norms and feed-forward."""


class LoraSettings(Section):
    """Train low-rank factors beside frozen weights (Hu et al. 2021): W + (alpha / rank) B A. Null trains all weights.
    Generators receive the adapters alone; exports are merged."""

    rank: PositiveInt = 16
    """Rank of each layer's update."""
    alpha: PositiveFloat = 32.0
    """The update is scaled by alpha / rank."""
    targets: list[str] | None = Field(None, min_length=1)
    """Names of linear layers, without the path to them; null: all of attention and feed-forward."""

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the linear layers that get an adapter."""
        return TARGETS if self.targets is None else tuple(self.targets)
