"""AdamW and gradient clipping."""

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
