"""AdamW and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW (Loshchilov & Hutter 2019) with a schedule over optimiser steps.

    Args:
        learning_rate: peak rate.
        warmup_steps: linear from 0 to the peak.
        schedule: after the warm-up: constant, linear or cosine down to `min_lr_ratio` of the peak at `total_steps`.
        max_grad_norm: clip the global gradient norm to this; 0 turns clipping off.
    """

    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = 0.1
    total_steps: int = 0

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ValueError(f"schedule must be constant, linear or cosine, got {self.schedule!r}")
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(f"a {self.schedule} schedule needs total_steps > warmup_steps, got {self.total_steps}")
        for name in ("learning_rate", "max_grad_norm", "weight_decay", "warmup_steps", "min_lr_ratio"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"beta1 and beta2 must be in [0, 1), got {self.beta1} and {self.beta2}")

    def scale(self, step: int) -> float:
        """Share of the peak rate at optimiser step `step` (from 0)."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        shape = 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * shape


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW with decay on matrices only: decaying norms and biases pulls them to zero for no benefit."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), eps=settings.epsilon, fused=True
    )


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], bound: float) -> float:
    """Scale all gradients so that their common norm is at most `bound`; the norm before.

    However they lie: each element counts once, on as many ranks as it may be. The norm is the same on every rank; all
    must call this.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return float(torch.nn.utils.clip_grad_norm_(parameters, bound))
    own = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    squares = torch.stack(torch._foreach_norm(own)).double().square()
    shares = squares.new_tensor([_parts(gradient) / dist.get_world_size() for gradient in gradients])
    dist.all_reduce(total := (squares * shares).sum())
    norm = math.sqrt(total) if math.isfinite(total) else math.nan
    torch._foreach_mul_(own, min(1.0, bound / (norm + 1e-6)))
    return norm


def _parts(gradient: Tensor) -> int:
    """How many ranks an element of each copy of a tensor is divided over."""
    if not isinstance(gradient, DTensor):
        return 1
    places = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return math.prod(size for place, size in places if not isinstance(place, Replicate))
