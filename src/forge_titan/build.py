"""Builds TorchTitan's models: sharded without memory, in stages if there is a pipeline, then filled from a folder."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import Shard
from transformers import AutoConfig

from forge.training.distributed import Ranks, sum_gradients
from forge.training.loading import read_weights
from forge.training.settings import Parallelism

from .pipeline import StagedPolicy, keep_stage
from .policy import TitanPolicy, plain_name, titan_config
from .setup import check_layout

# isort: split
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.moe_sharding import expert_param_placement_sparse
from torchtitan.protocols.sharding import ShardingConfig


def build_titan(
    path: str | Path,
    ranks: Ranks,
    *,
    seq_len: int,
    dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    cpu_offload: bool = False,
    compile: bool = False,
) -> TitanPolicy:
    """Return the model of a local folder ready to train on the device of `ranks`, with the arguments of
    `forge.training.build.build_policy`. No rank ever holds the whole model: it is sharded before it is read.

    Raises:
        ValueError: TorchTitan does not support the model, a size is not a multiple of a degree, or a tensor is missing.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    sizes = titan_config(config, seq_len)
    checkpointing = FullAC.Config().build(dump_folder="")
    placement: Any = None  # of the states between layers, if tensor parallelism divides them

    # Built and sharded without memory, then filled from the folder.
    with torch.device("meta"):
        if ranks.mesh is None:
            parts = [sizes.build()]
            if gradient_checkpointing:
                checkpointing.apply(parts[0])
        else:
            degrees = dict(zip(ranks.mesh.mesh_dim_names or (), ranks.mesh.shape, strict=True))
            parallelism = ParallelismConfig(
                data_parallel_replicate_degree=degrees.get("replicate", 1),
                # `PackedAttention` does context parallelism; for the weights its ranks are data-parallel ones.
                data_parallel_shard_degree=degrees["shard"],
                tensor_parallel_degree=degrees.get("tensor", 1),
                expert_parallel_degree=ranks.experts,
                pipeline_parallel_degree=ranks.pipeline.size,
                spmd_backend="partial_dtensor",  # the default does not work with torch 2.13's fully_shard
            )
            set_spmd_backend(parallelism.spmd_backend)
            check_layout(
                Parallelism(
                    data_parallel_replicate_degree=degrees.get("replicate", 1),
                    data_parallel_shard_degree=degrees["shard"],
                    expert_parallel_degree=ranks.experts,
                    pipeline_parallel_degree=ranks.pipeline.size,
                    pipeline_parallel_schedule="1F1B" if ranks.stages == ranks.pipeline.size else "Interleaved1F1B",
                ),
                config,
            )

            # TorchTitan sets the sharding of each module in its configuration.
            sizes.update_from_config(config=SimpleNamespace(parallelism=parallelism))

            # The head gets only this rank's trained tokens: its weight is sharded, its input is not.
            head = sizes.lm_head.sharding_config
            sizes.lm_head.sharding_config = ShardingConfig(state_shardings=head.state_shardings)
            for layer in sizes.layers:
                if layer.moe is not None:
                    by_expert = dict.fromkeys(("gate_up_proj", "down_proj"), expert_param_placement_sparse())
                    layer.moe.routed_experts.inner_experts.sharding_config = ShardingConfig(state_shardings=by_expert)

            dims = ParallelDims.from_config(parallelism, ranks.world_size)
            parts = [
                keep_stage(sizes.build(), stage, ranks.stages)
                for stage in range(ranks.pipeline.rank, ranks.stages, ranks.pipeline.size)
            ]
            if dims.tp_enabled:
                placement = dims.get_mesh("tp"), [Shard(1)]
            for model in parts:
                if dims.tp_enabled or dims.ep_enabled:
                    model.parallelize(dims)
                    if config.tie_word_embeddings and dims.tp_enabled:
                        # TorchTitan makes two sharded tensors of them; FSDP2 must find one.
                        model.tok_embeddings.weight = model.lm_head.weight

                if gradient_checkpointing:
                    checkpointing.apply(model)
                copies = ["dp_replicate"] if dims.dp_replicate_enabled else []
                apply_fsdp_to_decoder(
                    model,
                    dims.get_mesh([*copies, "fsdp"]),
                    ep_degree=dims.ep,
                    edp_mesh=dims.get_mesh([*copies, "efsdp"]) if dims.ep_enabled else None,
                    param_dtype=dtype,
                    reduce_dtype=torch.float32,
                    pp_enabled=False,  # gathered weights of a layer are freed after its forward pass, as without stages
                    # Else FSDP2 keeps norm and head gathered after a pass without gradients, as the head is called by
                    # itself: they would be published as if only rank 0 had them.
                    reshard_after_forward_policy="always" if ranks.stages > 1 else "default",
                    cpu_offload=cpu_offload,
                )

    # Allocate memory, compute buffers, and read this rank's part of the weights.
    for model in parts:
        model.to_empty(device="cpu" if cpu_offload else ranks.device)
        model.init_states(buffer_device=ranks.device)
        read_weights({plain_name(name): parameter for name, parameter in model.named_parameters()}, Path(path))
        sum_gradients(model)
        if compile:
            for layer in model.layers.values():
                layer.compile(dynamic=True)

    if ranks.stages > 1:
        return StagedPolicy(parts, Path(path), ranks, dtype, placement).train()
    return TitanPolicy(parts[0], Path(path), ranks).train()
