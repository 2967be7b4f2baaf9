"""Matrix products of an engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..system.devices import has_wide_products


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the device computes in bfloat16: some CPUs emulate it, at a quarter of float32's speed."""
    if device.type != "cpu":
        return True
    # The first asks the CPU, the second also what ONEDNN_MAX_CPU_ISA leaves of it.
    return torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_weight(weight: Tensor) -> Tensor:
    """Return a weight (out, in) for `Linear`: on a CPU repacked for oneDNN, else unchanged.

    PyTorch's default in float32, MKL, uses AVX-512 on Intel's processors only: on AMD's oneDNN takes less than half the
    time, with the same result up to rounding. In bfloat16 a weight that is not repacked takes up to twice the time.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return weight
    if weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bfloat16(weight.device)):
        return torch.ops.mkldnn._reorder_linear_weight(weight)
    return weight


@dataclass(slots=True)
class Linear:
    """A matrix product: x (N, in) -> (N, out)."""

    weight: Tensor  # (out, in), after `pack`
    bias: Tensor | None = None  # (out,)

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Make a product with this weight (out, in), packed for its device."""
        return cls(pack_weight(weight), bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def wide(self, x: Tensor) -> Tensor:
        """Return the product in at least float32. For half-precision matrices on CUDA the sums are not rounded to half
        precision, as a trainer's are not."""
        # Elsewhere the product is computed in the matrices' own precision, and only stored in float32.
        if not has_wide_products(x, self.weight):
            y = self(x)
            return y.to(torch.promote_types(y.dtype, torch.float32))
        y = torch.mm(x, self.weight.T, out_dtype=torch.float32)
        return y if self.bias is None else y + self.bias
