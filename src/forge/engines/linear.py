"""Matrix products of an engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..system.devices import has_wide_products
from .settings import Quantization

LARGEST = {"int8": 127.0, "fp8": 448.0}  # int8 symmetric, and float8_e4m3fn
HALF_BIAS = 2.0**8  # between the exponents of float8_e4m3fn and float16


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16: some CPUs emulate it, at a quarter of float32's speed."""
    if device.type != "cpu":
        return True
    # The first asks the CPU, the second also what ONEDNN_MAX_CPU_ISA leaves of it.
    return torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack(weight: Tensor) -> Tensor:
    """A weight (out, in) for `Linear`: on a CPU repacked for oneDNN, else unchanged.

    PyTorch's default in float32, MKL, uses AVX-512 on Intel's processors only: on AMD's oneDNN takes less than half the
    time, with the same result up to rounding. In bfloat16 a weight that is not repacked takes up to twice the time.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return weight
    if weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bfloat16(weight.device)):
        return torch.ops.mkldnn._reorder_linear_weight(weight)
    return weight


def quantize(weight: Tensor, kind: Quantization) -> tuple[Tensor, Tensor]:
    """A weight (out, in) in 8 bits, and the scale (out,), in float32, of each output channel: its largest magnitude
    becomes the largest number. Rounded to nearest. A channel with NaN or infinity is NaN."""
    values = weight.float()
    scale = values.abs().amax(1) / LARGEST[kind]
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    scaled = values / torch.where(scale == 0, 1.0, scale)[:, None]
    return (scaled.round().to(torch.int8) if kind == "int8" else scaled.to(torch.float8_e4m3fn)), scale


def widened(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight of `quantize` in the dtype of a product, without its scale.

    A CPU converts float8 one by one, 8.9 ms for 2304 x 768. Shifted into float16, whose exponent has another bias, it
    takes 1.2 ms; its NaN is not converted, which the scale of its channel is then.
    """
    if weight.dtype == torch.float8_e4m3fn and weight.device.type == "cpu":
        sign_extended = weight.view(torch.int8).to(torch.int16) << 7
        return (sign_extended & ~(1 << 14)).view(torch.float16).to(dtype).mul_(HALF_BIAS)
    return weight.to(dtype)


@dataclass(slots=True)
class Linear:
    """A matrix product: x (N, in) -> (N, out)."""

    weight: Tensor  # (out, in), after `pack` or `quantize`
    bias: Tensor | None = None  # (out,)
    scale: Tensor | None = None  # (out,), of a quantised weight

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None, quantization: Quantization | None = None) -> Linear:
        """A product with this weight (out, in), packed for its device or quantised."""
        if quantization is None:
            return cls(pack(weight), bias)
        quantized, scale = quantize(weight, quantization)
        return cls(quantized, bias, scale)

    def __call__(self, x: Tensor) -> Tensor:
        if self.scale is not None:
            # Eight bits save memory and the time to load them: the product is that of x's dtype. The scale is applied
            # to its result, which is smaller than the weight.
            y = (_product(x, widened(self.weight, x.dtype)) * self.scale).to(x.dtype)
            return y if self.bias is None else y + self.bias
        if self.weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def wide(self, x: Tensor) -> Tensor:
        """The product in at least float32. For half-precision matrices on CUDA the sums are not rounded to half
        precision, as a trainer's are not."""
        # Elsewhere the product is computed in the matrices' own precision, and only stored in float32.
        if self.scale is not None or not has_wide_products(x, self.weight):
            y = self(x)
            return y.to(torch.promote_types(y.dtype, torch.float32))
        y = torch.mm(x, self.weight.T, out_dtype=torch.float32)
        return y if self.bias is None else y + self.bias


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x (N, in) by a weight (out, in) that is not packed. On a CPU in float32 by oneDNN, whose result does not depend
    on the number of rows, and is that of a packed weight."""
    if x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)
