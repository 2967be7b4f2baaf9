"""Tensor and sequence parallelism of a transformers decoder (Shoeybi et al. 2019, Korthikanti et al. 2022).

Every parameter becomes a DTensor over the ranks, which is what FSDP2, checkpoints and the weight store know how to
handle; the forward pass computes with plain local tensors. Between the layers each rank has its own tokens, so whatever
a rank has whole (norms, the factors of an adapter that are not divided) gets only a part of its gradient there:
`Partial` has FSDP2 sum it before it is reduced.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from transformers import PreTrainedModel

from .distributed import Group, Ranks
from .sequence import gather_tokens, scatter_tokens

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")
# Cut along the model's width, which is a multiple of the degree; the vocabulary may not be.
TABLES = ("embed_tokens", "lm_head")


class Local(nn.Module):
    """Computes with this rank's part of each parameter, or of one that it has whole the whole."""

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if not _gathered(value):
            return value
        return value.to_local(grad_placements=[p if isinstance(p, Shard) else Partial() for p in value.placements])


class Whole(nn.Module):
    """Computes with all of each parameter that its ranks share, gathered for as long as it is used."""

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        return value.full_tensor(grad_placements=[Partial()]) if _gathered(value) else value


def _gathered(value: Any) -> bool:
    """Whether this is a parameter to compute with: what FSDP2 has not gathered has a dimension of its mesh more."""
    return isinstance(value, DTensor) and value.device_mesh.ndim == 1


def parallelize(model: PreTrainedModel, ranks: Ranks) -> None:
    """Divide a decoder and its head, which `Parallelism.check` lets pass, over the ranks of the tensor group, in
    place."""
    done: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay one
    for path, module in list(model.named_modules()):
        name = next((part for part in reversed(path.split(".")) if not part.startswith("lora_")), "")
        own = dict(module.named_parameters(recurse=False))
        for key, parameter in own.items():
            if parameter not in done:
                done[parameter] = _divided(parameter, _placement(name, path), ranks)
            setattr(module, key, done[parameter])
        if own:
            kind: Any = type(module)
            module.__class__ = _kind(Whole if name in TABLES else Local, kind)
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_hook(_after(gather_tokens, ranks.tensor))
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.register_forward_hook(_after(scatter_tokens, ranks.tensor))


def _placement(name: str, path: str) -> Placement:
    if name in TABLES:
        return Shard(1)
    # Of an adapter, the factor at the divided side is divided with it.
    if name in COLUMN and not path.endswith(".lora_A"):
        return Shard(0)
    if name in ROW and not path.endswith(".lora_B"):
        return Shard(1)
    return Replicate()


def _divided(parameter: nn.Parameter, placement: Placement, ranks: Ranks) -> nn.Parameter:
    assert ranks.mesh is not None
    local = parameter.detach()
    if isinstance(placement, Shard):
        local = local.chunk(ranks.tensor.size, placement.dim)[ranks.tensor.rank].contiguous().clone()
    divided = DTensor.from_local(local.to(ranks.device), ranks.mesh["tensor"], [placement], run_check=False)
    return nn.Parameter(divided, parameter.requires_grad)


@cache
def _kind(how: Any, kind: Any) -> type[nn.Module]:
    return type(f"{how.__name__}{kind.__name__}", (how, kind), {})


def _after(move: Any, group: Group) -> Any:
    def hook(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        return move(output, group)

    return hook
