"""Tensor and sequence parallelism of a transformers decoder (Shoeybi et al. 2019, Korthikanti et al. 2022).

Every parameter becomes a DTensor for FSDP2, checkpoints and the weight store; the forward pass computes with plain
local tensors. Between layers each rank has its own tokens, so that a replicated parameter (norms, replicated factors
of adapters) gets a partial gradient: by the placement `Partial` FSDP2 sums it before it reduces it.
"""

from functools import cache
from typing import Any, TypeGuard

from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from transformers import PreTrainedModel

from .attention import gather_tokens, scatter_tokens
from .distributed import Ranks

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")
# Sharded along the hidden size, which is a multiple of the degree; the vocabulary may not be.
TABLES = ("embed_tokens", "lm_head")


class LocalParameters(nn.Module):
    """A module that computes with this rank's part of each parameter."""

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if not _is_gathered(value):
            return value
        return value.to_local(grad_placements=[p if isinstance(p, Shard) else Partial() for p in value.placements])


class FullParameters(nn.Module):
    """A module that computes with full parameters, gathered on use."""

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        return value.full_tensor(grad_placements=[Partial()]) if _is_gathered(value) else value


def _is_gathered(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a parameter that FSDP2 has gathered: before that its mesh has one more dimension."""
    return isinstance(value, DTensor) and value.device_mesh.ndim == 1


def parallelize_model(model: PreTrainedModel, ranks: Ranks) -> None:
    """Shard a decoder and its head over the tensor-parallel ranks, in place. Call `Parallelism.check` before."""
    tensor = ranks.tensor
    mesh = ranks.mesh["tensor"]  # type: ignore[index]
    sharded: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay one

    for path, module in list(model.named_modules()):
        # The last part of the path is the layer's name; a factor of its adapter, lora_A or lora_B, is below it.
        name = next((segment for segment in reversed(path.split(".")) if not segment.startswith("lora_")), "")

        placement: Placement = Replicate()
        if name in TABLES or (name in ROW and not path.endswith(".lora_B")):
            placement = Shard(1)
        elif name in COLUMN and not path.endswith(".lora_A"):
            placement = Shard(0)  # of an adapter, only the factor on the sharded side is sharded

        parameters = dict(module.named_parameters(recurse=False))
        for attribute, parameter in parameters.items():
            if parameter not in sharded:
                local_part = parameter.detach()
                if isinstance(placement, Shard):
                    local_part = local_part.chunk(tensor.size, placement.dim)[tensor.rank].contiguous().clone()
                if not local_part.is_meta:  # else `loading.fill_model` follows
                    local_part = local_part.to(ranks.device)
                dtensor = DTensor.from_local(local_part, mesh, [placement], run_check=False)
                sharded[parameter] = nn.Parameter(dtensor, parameter.requires_grad)
            setattr(module, attribute, sharded[parameter])

        if parameters:
            mixin = FullParameters if name in TABLES else LocalParameters
            kind: Any = type(module)
            module.__class__ = _combine_class(mixin, kind)

    # Norms work on this rank's tokens; attention and feed-forward on all, with this rank's heads and columns.
    for layer in model.model.layers:
        # Gemma's norm before the feed-forward has another name; its norms after both work on this rank's tokens.
        feed_forward_norm = getattr(layer, "pre_feedforward_layernorm", None) or layer.post_attention_layernorm
        for norm in (layer.input_layernorm, feed_forward_norm):
            norm.register_forward_hook(lambda _module, _inputs, output: gather_tokens(output, tensor))
        for output_layer in (layer.self_attn.o_proj, layer.mlp.down_proj):
            output_layer.register_forward_hook(lambda _module, _inputs, output: scatter_tokens(output, tensor))


@cache
def _combine_class(mixin: Any, kind: Any) -> type[nn.Module]:
    return type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {})
