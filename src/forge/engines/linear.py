"""Matrix products of an engine."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..system.devices import has_bfloat16, has_wide_products


def pack_weight(weight: Tensor) -> Tensor:
    """Return a weight (out, in) in the format of `Linear`: on a CPU repacked for oneDNN, else unchanged.

    In float32 PyTorch uses MKL by default, which has AVX-512 kernels on Intel's processors only: on AMD's, oneDNN takes
    less than half the time, with the same result up to rounding. In bfloat16 oneDNN takes up to twice the time for a
    weight that is not repacked.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return weight
    if weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bfloat16(weight.device)):
        return torch.ops.mkldnn._reorder_linear_weight(weight)
    return weight


@dataclass(slots=True)
class Linear:
    """A matrix product with a fixed weight: calling it with x (N, in) returns (N, out)."""

    weight: Tensor  # (out, in), after `pack_weight`
    bias: Tensor | None = None  # (out,)

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None = None) -> "Linear":
        """Return a product with a weight (out, in), which is packed for its device."""
        return cls(pack_weight(weight), bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def wide(self, x: Tensor) -> Tensor:
        """Return the product in float32 or a wider type.

        For half-precision matrices on CUDA its sums are never rounded to half precision, as in a trainer.
        """
        if has_wide_products(x, self.weight):
            product = torch.mm(x, self.weight.T, out_dtype=torch.float32)
            return product if self.bias is None else product + self.bias
        # Elsewhere the product is computed in the matrices' own precision, and only stored in float32.
        product = self(x)
        return product.to(torch.promote_types(product.dtype, torch.float32))
