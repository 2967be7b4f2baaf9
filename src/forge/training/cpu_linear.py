"""Float32 matrix products through oneDNN where that is faster.

torch gives float32 products on CPU to MKL, which keeps to AVX2 on processors that are not Intel's; oneDNN uses AVX-512
on all of them, at more than twice the speed (`benchmarks/cpu_linear.py`). The results differ by rounding only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# oneDNN builds a kernel for every shape and keeps it: callers round their number of rows up to a multiple of this, or
# memory grows with every new length of a batch.
ROWS = 64

AVAILABLE = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b.T` for matrices a [m, k] and b [n, k], outside autograd."""
    if not _suits(a, b):
        return a @ b.T
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        grad_x = product(flat, weight.T).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_weight = product(flat.T, x.flatten(0, -2).T) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


class FastLinear(nn.Linear):
    """nn.Linear whose products go through `product`; the same parameters under the same names."""

    def forward(self, x: Tensor) -> Tensor:
        if not _suits(x, self.weight):
            return super().forward(x)
        y = _Linear.apply(x, self.weight)
        return y if self.bias is None else y + self.bias


def speed_up(model: nn.Module) -> None:
    """Let every nn.Linear of a model compute as FastLinear, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear


def _suits(a: Tensor, b: Tensor) -> bool:
    return (
        AVAILABLE
        and a.numel() > 0 < b.numel()
        and a.device.type == b.device.type == "cpu"
        and a.dtype == b.dtype == torch.float32
        and type(b) in (Tensor, nn.Parameter)  # a DTensor has operators of its own
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()  # inductor takes products of another layout for oneDNN's own
    )
