"""FSDP2's settings of a sharded model: how gradients are summed, and when gathered parameters are dropped."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from .distributed import Ranks


def sum_gradients(model: nn.Module) -> None:
    """Make FSDP2 sum gradients instead of averaging them: weights of the loss are already shares of the batch."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo can only sum


def reduce_over_copies(model: nn.Module, ranks: Ranks, now: bool) -> None:
    """Set whether the next backward pass sums gradients over the copies of shards (HSDP), or a later one of the same
    update does: a network between hosts then carries them once.

    A mixture of experts always sums: the later pass would not sum the gradients of experts that it does not use.
    """
    copies = ranks.mesh is not None and "replicate" in (ranks.mesh.mesh_dim_names or ())
    if copies and getattr(model, "routers", None) is None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_all_reduce(now, recurse=False)


def reshard(model: nn.Module) -> None:
    """Drop the gathered copies, in the dtype of the forward pass, that it leaves without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
