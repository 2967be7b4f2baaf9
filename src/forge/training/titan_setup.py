"""What has to be true before TorchTitan is used: of the installation, of the model, and of the process."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch

VERSION = "0.3.0"
FAMILIES = ("llama", "qwen3")
KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


def check_installed() -> None:
    """ImportError: there is no TorchTitan, or another one than this was written for."""
    if importlib.util.find_spec("torchtitan") is None:
        raise ImportError(f"trainer.backend titan needs TorchTitan {VERSION}: pip install 'torchforge[titan]'")
    if (found := version("torchtitan")) != VERSION:
        raise ImportError(f"trainer.backend titan is written for torchtitan {VERSION}, this is {found}")


def check_model(config: Any) -> None:
    """ValueError: a transformers config of something that TorchTitan's models do not have."""
    for fits, what in (
        (config.model_type in FAMILIES, f"model_type {config.model_type!r} (it has {', '.join(FAMILIES)})"),
        (not getattr(config, "attention_bias", False) and not getattr(config, "mlp_bias", False), "biases"),
        (
            set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"},
            "sliding-window layers",
        ),
        (config.hidden_act == "silu", f"hidden_act {config.hidden_act!r}"),
    ):
        if not fits:
            raise ValueError(f"trainer.backend titan does not support {what}: take fsdp")


def prepare() -> None:
    """Make its modules importable here. Call this before their first import.

    ImportError: as of `check_installed`.
    """
    check_installed()
    if importlib.util.find_spec("triton") is None:
        # All of its models import these kernels and none of those used here runs them. A triton that only looks like
        # one would break torch.compile.
        kernels = ModuleType(KERNELS)
        kernels.__getattr__ = lambda name: None  # type: ignore[method-assign]
        sys.modules.setdefault(KERNELS, kernels)
    if torch.accelerator.current_accelerator() is None:
        # It takes the absence of every accelerator for CUDA, when its modules are first imported.
        from torchtitan.tools import utils

        utils.device_type, utils.device_module = "cpu", torch.cpu
