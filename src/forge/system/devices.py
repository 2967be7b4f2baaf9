"""The accelerator that this process uses, and what a device can compute."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_planned_type = ""  # the device type that the meta device stands for, see `planning_for`; empty outside of a plan

GRANTED = "FORGE_GPUS"  # environment variable: the GPUs that a component's process was granted


class NoAccelerator(RuntimeError):
    """Error: this process was assigned GPUs, but torch sees none."""


def type_of(device: "torch.device") -> str:
    """Return the type of a device, such as "cpu"; for the meta device, within `planning_for` the type it stands for."""
    return (_planned_type or device.type) if device.type == "meta" else device.type


@contextmanager
def planning_for(device_type: str) -> Iterator[None]:
    """Treat tensors on the meta device, within the block, as if they were on a device of this type, e.g. "cuda".

    A plan runs a model without memory this way.
    """
    global _planned_type
    outer_type, _planned_type = _planned_type, device_type
    try:
        yield
    finally:
        _planned_type = outer_type


def has_wide_products(a: "torch.Tensor", b: "torch.Tensor") -> bool:
    """Return whether `torch.mm(a, b, out_dtype=torch.float32)` works for two half-precision matrices: only on CUDA."""
    import torch

    halves = torch.bfloat16, torch.float16
    return type_of(a.device) == "cuda" and torch.version.hip is None and a.dtype == b.dtype and a.dtype in halves


def has_bfloat16(device: "torch.device") -> bool:
    """Return whether the device has bfloat16 arithmetic: other CPUs emulate it at a quarter of float32's speed."""
    import torch

    if device.type != "cpu":
        return True
    # The first asks the CPU, the second also what ONEDNN_MAX_CPU_ISA leaves of it.
    return torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def find_accelerator() -> "torch.device | None":
    """Return the accelerator that torch can use; None if it computes on the CPU.

    Raises:
        NoAccelerator: this process was given GPUs, and torch sees none; says what to check.
    """
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    granted = os.environ.get(GRANTED)

    # Without this error a run would continue on the CPU, slowly and without a reason in its log.
    if device is None and granted:
        built = torch.version.cuda or torch.version.hip
        reason = "check the driver with nvidia-smi" if built else "it is built for CPUs: install a build for this GPU"
        raise NoAccelerator(
            f"this process was assigned GPU {granted}, but torch {torch.__version__} sees no GPU: {reason}, or set "
            "with_gpus to false"
        )
    return device


def repeat_bits() -> None:
    """Make computations of this process bit-reproducible for equal inputs, on a GPU as well."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling what `torch.empty` returns is for finding faults, and takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
