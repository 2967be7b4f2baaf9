"""A model made ready to train: read, given adapters, compiled, divided over the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from .distributed import Ranks
from .heads import Head, Scalar, load
from .layout import Parallelism
from .lora import add_adapters
from .policy import Policy
from .settings import LoraSettings
from .tensor_parallel import parallelize

if TYPE_CHECKING:
    from .titan import TitanPolicy

Backend = Literal["fsdp", "titan"]


def build(
    path: str | Path,
    head: Head,
    ranks: Ranks,
    *,
    backend: Backend = "fsdp",
    seq_len: int = 4096,
    lora: LoraSettings | None = None,
    dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    cpu_offload: bool = False,
    compile: bool = False,
) -> Policy | Scalar | TitanPolicy:
    """The model of a folder or hub id with this head, on the device of `ranks` and in training mode.

    Args:
        backend: whose model it is, transformers' or TorchTitan's.
        seq_len: of the longest sequence.
        dtype: of the forward and backward pass; parameters stay float32.
        compile: each decoder layer; with `gradient_checkpointing` its norms and feed-forward.

    ValueError: no such backend or head, a model that does not suit them or cannot be divided so, adapters that will not
    do. ImportError: TorchTitan is not installed.
    """
    if backend == "titan":
        if head != "policy" or lora is not None:
            raise ValueError("trainer.backend titan trains whole policies: for adapters and other heads take fsdp")
        from .titan import build_titan

        return build_titan(
            path,
            ranks,
            seq_len=seq_len,
            dtype=dtype,
            gradient_checkpointing=gradient_checkpointing,
            cpu_offload=cpu_offload,
            compile=compile,
        )
    if backend != "fsdp":
        raise ValueError(f"trainer.backend must be fsdp or titan, got {backend!r}")
    policy = load(path, head, gradient_checkpointing=gradient_checkpointing)
    degrees = Parallelism(tensor_parallel_degree=ranks.tensor.size, context_parallel_degree=ranks.context.size)
    degrees.check(policy.model.config)
    if lora is not None:
        add_adapters(policy, lora)
    if ranks.tensor.size > 1:
        parallelize(policy.model, ranks)
    if compile:
        for layer in policy.model.model.layers:
            # A layer that is computed again cannot be traced past its attention, but what lies around that can.
            parts = (layer.input_layernorm, layer.post_attention_layernorm, layer.mlp)
            for part in parts if gradient_checkpointing else (layer,):
                part.compile(dynamic=True)
    policy.ranks = ranks
    policy.train()
    if ranks.mesh is None:
        return policy.to(ranks.device)
    shard(policy, list(policy.model.model.layers), ranks, dtype, cpu_offload=cpu_offload)
    return policy


def shard(
    policy: nn.Module, layers: list[nn.Module], ranks: Ranks, dtype: torch.dtype, *, cpu_offload: bool = False
) -> None:
    """Apply FSDP2 in place: one group a decoder layer, one for embedding, final norm and head (which may be tied).

    Args:
        dtype: of the forward and backward pass; parameters and reductions stay float32.
    """
    assert ranks.mesh is not None and ranks.mesh.mesh_dim_names is not None
    names = tuple(name for name in ranks.mesh.mesh_dim_names if name != "tensor")
    mesh = ranks.mesh[names]
    precision = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=False)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # Weights of the loss are already shares of the whole batch: gradients add up, and gloo can only add.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
