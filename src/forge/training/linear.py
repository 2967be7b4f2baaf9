"""Linear layers whose float32 products on a CPU go to oneDNN, forward and backward.

PyTorch sends them to MKL, which leaves the wider vectors of other makers' processors unused: on an AMD one with AVX-512
oneDNN takes half the time, for the same result to rounding. PyTorch has no switch for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) and weight (out, in), float32 on a CPU and of any strides -> (..., out), without a gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            product(grad, weight.T) if ctx.needs_input_grad[0] else None,
            product(rows.T, x.reshape(-1, x.shape[-1]).T) if ctx.needs_input_grad[1] else None,
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )


class Linear(nn.Linear):
    """`nn.Linear`, with the same parameters and the same result."""

    def forward(self, input: Tensor) -> Tensor:
        plain = input.device.type == "cpu" and input.dtype == self.weight.dtype == torch.float32 and input.numel()
        if plain and torch.backends.mkldnn.is_available() and not torch.is_autocast_enabled("cpu"):
            return _Linear.apply(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias)


def adopt(model: nn.Module) -> None:
    """Turn the linear layers of a model into ours, in place: parameters and their names stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
