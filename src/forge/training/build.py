"""Builds the models of `policy`: loaded, with adapters, sharded over ranks and compiled; and their dtypes."""

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ..config.plugin import resolve
from ..system.devices import has_bfloat16
from .distributed import Ranks, sum_gradients
from .loading import fill_model
from .lora import add_adapters
from .policy import Policy, ScalarModel
from .settings import Backend, Head, LoraSettings, Parallelism
from .tensor_parallel import parallelize_model

log = logging.getLogger(__name__)


def load_model(path: str | Path, head: Head, **options: Any) -> Policy | ScalarModel:
    """Load the model of a folder or hub id with this head.

    Args:
        options: `dtype`, `gradient_checkpointing` and `meta`, as in `Policy.from_pretrained`.

    Raises:
        ValueError: the head is unknown, or the model does not suit it.
    """
    if head == "policy":
        return Policy.from_pretrained(path, **options)
    if head not in ("value", "reward"):
        raise ValueError(f"head must be policy, value or reward, got {head!r}")
    return ScalarModel.from_pretrained(path, head, **options)


def build_policy(
    path: str | Path,
    head: Head,
    ranks: Ranks,
    *,
    backend: Backend = "fsdp",
    seq_len: int = 4096,
    lora: LoraSettings | None = None,
    dtype: torch.dtype = torch.float32,
    weights_dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    cpu_offload: bool = False,
    compile: bool = False,
    exact: bool = False,
) -> Any:
    """Return the model ready to train on the device of `ranks`: loaded, with adapters, sharded and compiled.

    If `ranks` have a mesh, each rank reads only its part of the weights (see `loading.build_on_meta`).

    Args:
        backend: "fsdp" is a transformers model with this library's parallelisation, "titan" TorchTitan's, "tinker" one
            without weights, which a server has.
        seq_len: length of the longest sequence.
        lora: adapters to add; None: train all weights.
        dtype: of the forward and backward pass.
        weights_dtype: of the parameters.
        compile: compile each decoder layer; with `gradient_checkpointing` only its norms and feed-forward.
        exact: compute log-probabilities with the engine's bits.

    Raises:
        ValueError: an unknown backend or head, an unsuitable model, sizes that are not a multiple of a degree, or
            invalid adapters.
        ImportError: TorchTitan is not installed.
    """
    if backend == "tinker":
        return load_model(path, head, meta=True)
    if backend == "titan":
        if head != "policy" or lora is not None or weights_dtype != torch.float32:
            raise ValueError(
                "trainer.backend titan supports only full training of policies in float32: use fsdp for LoRA "
                "adapters, scalar heads and bfloat16 weights"
            )

        return resolve("forge_titan.build:build_titan", "trainer.backend")(
            path,
            ranks,
            seq_len=seq_len,
            dtype=dtype,
            gradient_checkpointing=gradient_checkpointing,
            cpu_offload=cpu_offload,
            compile=compile,
        )

    if backend != "fsdp" or ranks.stages > 1:
        raise ValueError(
            "parallelism.pipeline_parallel_degree above 1 needs trainer.backend titan and a trained policy: set it to 1"
            if backend == "fsdp"
            else f"trainer.backend must be fsdp or titan, got {backend!r}"
        )

    # Where there is a mesh the weights are read after sharding.
    policy = load_model(
        path,
        head,
        dtype=weights_dtype,
        gradient_checkpointing=gradient_checkpointing,
        meta=ranks.mesh is not None and not (lora and lora.quantize),
    )
    Parallelism(tensor_parallel_degree=ranks.tensor.size, context_parallel_degree=ranks.context.size).check(
        policy.model.config
    )
    if lora is not None:
        add_adapters(policy.model, lora)
        if lora.quantize:
            resolve("forge_families.four_bits:quantize_base", "lora.quantize")(policy, path)

    if exact and head == "policy":
        resolve("forge_families.exact:replace_modules", "training.exact")(policy.model, ranks.device, dtype)
        policy.use_exact()
    if ranks.tensor.size > 1:
        parallelize_model(policy.model, ranks)
    layers = find_layers(policy.model)

    # Before sharding, which wraps the compiled layers.
    if compile:
        for layer in layers:
            # A checkpointed layer does not trace across the graph break of its attention, only the parts around it.
            parts = [part for name, part in layer.named_children() if name != "self_attn"]
            for part in parts if gradient_checkpointing else (layer,):
                part.compile(dynamic=True)

    policy.ranks = ranks
    policy.train()
    if ranks.mesh is None:
        return policy.to(ranks.device)

    # FSDP2: one group per decoder layer, one for embedding, final norm and head (which may be tied).
    mesh = ranks.mesh[tuple(name for name in ranks.mesh.mesh_dim_names or () if name != "tensor")]
    precision = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=False)
    fill_model(policy.model, path, torch.device("cpu") if cpu_offload else ranks.device)

    sum_gradients(policy)
    return policy


def find_layers(model: Any) -> list[nn.Module]:
    """Return the decoder layers of a transformers model: the outermost list of as many modules as its config has."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return list(next((found for found in lists if len(found) == model.config.get_text_config().num_hidden_layers), ()))


def precision_context(ranks: Ranks, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return the context manager of a forward pass in `dtype`.

    Autocast in one process; under FSDP2, which has its own mixed precision, a context that does nothing.
    """
    mixed = dtype != torch.float32 and ranks.mesh is None
    return torch.autocast(ranks.device.type, dtype) if mixed else nullcontext()


def round_products(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the matrices of linear layers to `dtype`, in place.

    Autocast would round them at every product: this gives the same results with half the memory. Embeddings (and a head
    that is tied to them), norms, biases and experts stay as they are.
    """
    embedding = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight not in embedding:
            module.weight.data = module.weight.data.to(dtype)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of this name, for the forward pass; float32 instead of bfloat16 on a CPU without its
    arithmetic."""
    if name == "bfloat16" and not has_bfloat16(device):
        log.info("training.dtype: this CPU has no bfloat16 arithmetic; computing in float32")
        return torch.float32
    return getattr(torch, name)
