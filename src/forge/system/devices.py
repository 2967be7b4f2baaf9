"""The accelerator of this process, and what it can compute."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GRANTED = "FORGE_GPUS"  # environment variable: the GPUs that a component's process was granted


class NoAccelerator(RuntimeError):
    """GPUs were promised to this process, and torch sees none."""


def has_wide_products(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `torch.mm` can return the sums of two half-precision matrices in float32, which only CUDA can."""
    import torch

    halves = torch.bfloat16, torch.float16
    return a.device.type == "cuda" and torch.version.hip is None and a.dtype == b.dtype and a.dtype in halves


def accelerator() -> torch.device | None:
    """Return the accelerator that torch can use; None: it computes on the CPU.

    Raises:
        NoAccelerator: this process was given GPUs, and torch sees none.
    """
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    granted = os.environ.get(GRANTED)
    # Without this error a run would continue on the CPU, slowly and without a reason in its log.
    if device is None and granted:
        built = torch.version.cuda or torch.version.hip
        reason = "check the driver with nvidia-smi" if built else "it is built for CPUs: install a build for this GPU"
        raise NoAccelerator(
            f"this process was given GPU {granted}, and torch {torch.__version__} sees none: {reason}, or set "
            "with_gpus to false"
        )
    return device
