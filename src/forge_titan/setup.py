"""Checks before TorchTitan is imported: installation, model and process."""

import importlib.util
import sys
import warnings
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from forge.models.architecture import BIASES, MLP_BIASES, attention_kinds, check_config, sparse_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from forge.training.settings import Parallelism

VERSION = "0.3.0"
FAMILIES = ("llama", "qwen3", "qwen3_moe")
KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


def check_installed() -> None:
    """Raise ImportError if TorchTitan is not installed, or in another version than the supported one."""
    if importlib.util.find_spec("torchtitan") is None:
        raise ImportError(f"trainer.backend titan needs TorchTitan {VERSION}: pip install torchtitan=={VERSION}")
    installed = version("torchtitan")
    if installed != VERSION:
        raise ImportError(
            f"trainer.backend titan supports torchtitan {VERSION}, but {installed} is installed: pip install "
            f"torchtitan=={VERSION}"
        )


def check_model(config: "PreTrainedConfig") -> None:
    """Check that TorchTitan's models have all features of a transformers config.

    Raises:
        ValueError: they do not support one.
    """
    check_config(config)
    family = config.model_type
    activation = getattr(config, "hidden_act", None)
    for is_used, feature in (
        (family not in FAMILIES, f"model_type {family!r} (it has {', '.join(FAMILIES)})"),
        (family in BIASES and config.attention_bias, "biases"),
        (family in MLP_BIASES and config.mlp_bias, "biases"),
        (any(kind.window is not None for kind in attention_kinds(config)), "sliding-window layers"),
        (activation != "silu", f"hidden_act {activation!r}"),
    ):
        if is_used:
            raise ValueError(f"trainer.backend titan does not support {feature}: use fsdp")


def check_layout(layout: "Parallelism", config: "PreTrainedConfig") -> None:
    """Check that TorchTitan can divide a model of this config by these degrees, filled in by `Parallelism.over`.

    Raises:
        ValueError: the model cannot be divided into stages, or its experts over ranks, or it has none.
    """
    degree, is_sparse = layout.expert_parallel_degree, bool(sparse_layers(config))
    layers, experts = config.num_hidden_layers, config.num_experts if is_sparse else 0
    ranks = layout.data_parallel_shard_degree * layout.context_parallel_degree
    if degree == 1:  # TorchTitan counts the copies as well, and would divide within experts
        ranks *= layout.data_parallel_replicate_degree or 1
    stages = f".pipeline_parallel_degree = {layout.pipeline_parallel_degree}"

    for is_obstacle, reason in (
        (
            layout.stages > 1 and config.tie_word_embeddings,
            f"{stages}: embedding and head of this model are one matrix: set it to 1",
        ),
        (layout.stages > 1 and is_sparse, f"{stages}: mixtures of experts have none: set expert_parallel_degree"),
        (
            1 < layout.stages > layers,
            f"{stages}: the model's {layers} layers are too few for {layout.stages} stages: lower it",
        ),
        (
            degree > 1 and not is_sparse,
            f".expert_parallel_degree needs a mixture of experts, this is {config.model_type}",
        ),
        (
            experts % degree,
            f": the model's num_experts = {experts} is not a multiple of expert_parallel_degree = {degree}",
        ),
        (
            is_sparse and ranks > experts,
            f": the model's {experts} experts cannot be divided over {ranks} ranks: "
            + ("set expert_parallel_degree" if degree == 1 else "raise data_parallel_replicate_degree"),
        ),
    ):
        if is_obstacle:
            raise ValueError(f"parallelism{reason}")


def prepare_imports() -> None:
    """Prepare this process so that TorchTitan's modules can be imported; call it before their first import.

    Raises:
        ImportError: TorchTitan is not installed, or in another version than the supported one.
    """
    check_installed()
    if importlib.util.find_spec("triton") is None:
        # All of TorchTitan's models import these kernels, which need Triton; the models that are used here never run
        # them. A fake module triton instead would break torch.compile.
        kernels = ModuleType(KERNELS)
        kernels.__getattr__ = lambda name: None  # type: ignore[method-assign]
        sys.modules.setdefault(KERNELS, kernels)

    if torch.accelerator.current_accelerator(check_available=True) is None:
        # Without an accelerator TorchTitan assumes CUDA when its modules are first imported.
        from torchtitan.tools import utils

        utils.device_type = "cpu"
        utils.device_module = torch.cpu
        # Its routers ask autocast for float32, of which a CPU warns: they get it only if all else computes in float32.
        warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype is not supported")
