"""Checks before TorchTitan is imported: installation, model and process."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from forge.models.architecture import BIASES, MLP_BIASES, attention_kinds, check_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VERSION = "0.3.0"
FAMILIES = ("llama", "qwen3", "qwen3_moe")
KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


def check_installed() -> None:
    """Raises:
    ImportError: TorchTitan is not installed, or in another version.
    """
    if importlib.util.find_spec("torchtitan") is None:
        raise ImportError(f"trainer.backend titan needs TorchTitan {VERSION}: pip install torchtitan=={VERSION}")
    installed = version("torchtitan")
    if installed != VERSION:
        raise ImportError(f"trainer.backend titan is written for torchtitan {VERSION}, this is {installed}")


def check_model(config: PreTrainedConfig) -> None:
    """Raises:
    ValueError: a transformers config with a feature that TorchTitan's models lack.
    """
    check_config(config)
    family = config.model_type
    for supported, feature in (
        (family in FAMILIES, f"model_type {family!r} (it has {', '.join(FAMILIES)})"),
        (not (family in BIASES and config.attention_bias) and not (family in MLP_BIASES and config.mlp_bias), "biases"),
        (all(kind.window is None for kind in attention_kinds(config)), "sliding-window layers"),
        (getattr(config, "hidden_act", None) == "silu", f"hidden_act {getattr(config, 'hidden_act', None)!r}"),
    ):
        if not supported:
            raise ValueError(f"trainer.backend titan does not support {feature}: take fsdp")


def prepare_imports() -> None:
    """Make TorchTitan's modules importable here; to be called before their first import.

    Raises:
        ImportError: see `check_installed`.
    """
    check_installed()
    if importlib.util.find_spec("triton") is None:
        # All of its models import these kernels, those used here never run them. A fake triton would break
        # torch.compile.
        kernels = ModuleType(KERNELS)
        kernels.__getattr__ = lambda name: None  # type: ignore[method-assign]
        sys.modules.setdefault(KERNELS, kernels)

    if torch.accelerator.current_accelerator(check_available=True) is None:
        # Without an accelerator TorchTitan assumes CUDA when its modules are first imported.
        from torchtitan.tools import utils

        utils.device_type = "cpu"
        utils.device_module = torch.cpu
        # A warning of its routers, which ask for float32: they get it only where all else computes in it.
        warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype is not supported")
