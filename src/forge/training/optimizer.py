"""AdamW, gradient clipping, and the optimiser's offload."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from .settings import OptimizerSettings


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
    """Scale all gradients so that their common norm is at most `bound`; returns the norm before, equal on every rank.

    Gradients may be sharded in any layout: each element counts once. All ranks must call this.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return float(torch.nn.utils.clip_grad_norm_(parameters, bound))
    # Each rank sums the squares that it holds, divided by the number of ranks that hold the same elements.
    own, shares = [], []
    for gradient in gradients:
        local, parts = gradient, 1
        if isinstance(gradient, DTensor):
            places = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
            parts = math.prod(size for place, size in places if not isinstance(place, Replicate))
            local = gradient.to_local()
        own.append(local)
        shares.append(parts / dist.get_world_size())
    squares = torch.stack(torch._foreach_norm(own)).double().square()
    dist.all_reduce(total := (squares * squares.new_tensor(shares)).sum())
    norm = math.sqrt(total) if math.isfinite(total) else math.nan
    torch._foreach_mul_(own, min(1.0, bound / (norm + 1e-6)))
    return norm


def move(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    to: torch.device | torch.dtype,
    buffers: torch.device | None = None,
) -> None:
    """Move parameters with their gradients, the optimiser's state and buffers (to `buffers`, if given), in place.

    Raises:
        RuntimeError: the model got new parameter objects, which its optimiser does not know.
    """
    before = list(model.parameters())
    model.to(to)
    if any(a is not b for a, b in zip(before, model.parameters(), strict=True)):
        raise RuntimeError("moving a model gave it other parameters: its optimiser would train the old ones")
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(buffers or to)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(to)
