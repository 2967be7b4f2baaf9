"""The process group, mesh and device of one training rank, its settings of FSDP2, and copies to its device."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from ..system.devices import find_accelerator
from .settings import Parallelism

COLLECTIVE_TIMEOUT = timedelta(minutes=5)  # after this a rank in a collective has lost a peer


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Process group with its size and this rank's index in it; `group` is None for a single rank."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


ALONE = RankGroup()


@dataclass(frozen=True, slots=True)
class Ranks:
    """Position of this rank in the device mesh. Rank indices count tensor parallelism first, then context, shards,
    replicas and the pipeline.

    mesh: for the parameters, with dimensions "pipeline" (only with a pipeline), "replicate" (only with HSDP), "shard"
        (context parallelism included) and "tensor" (only with tensor parallelism); None for a single process without a
        mesh.
    data: the data-parallel ranks, over which batches are divided.
    context, tensor: the context- and tensor-parallel ranks.
    sequence: both together, the ranks that share the tokens of a pack.
    experts: the number of ranks that divide the experts of a layer between them.
    pipeline: the ranks that compute the stages of the same sequences, one after another.
    results: the data-parallel ranks of the whole pipeline, whose sums and maxima are those of the batch.
    stages: number of stages of the pipeline.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh | None
    data: RankGroup = ALONE
    context: RankGroup = ALONE
    tensor: RankGroup = ALONE
    sequence: RankGroup = ALONE
    experts: int = 1
    pipeline: RankGroup = ALONE
    results: RankGroup = ALONE
    stages: int = 1

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over the ranks of `results`, which changes them in place.

        Each data-parallel rank has another part of the batch. Ranks that share sequences must have the same values, but
        for those without the last stage of a pipeline, which have 0.
        """
        if self.results.group is not None:
            dist.all_reduce(values, group=self.results.group)
        return values


def join_ranks(
    rank: int = 0,
    world_size: int = 1,
    store: dist.Store | None = None,
    parallelism: Parallelism | None = None,
    *,
    cpu_offload: bool = False,
    mesh: bool = False,
) -> Ranks:
    """Join the process group of `world_size` ranks, make its mesh, and return this rank's position in it.

    Args:
        store: the rendezvous of the ranks, which no other process group used; not needed for one process.
        parallelism: the degrees; None: all ranks shard the weights.
        cpu_offload: parameters will be in host memory, for which FSDP needs a mesh even with a single process.
        mesh: make a mesh for a single process as well: in bfloat16 FSDP casts weights and keeps states in bfloat16,
            where autocast keeps states in float32.

    Raises:
        ValueError: the product of the degrees is not `world_size`, several ranks have no store, or there is
            `cpu_offload` without an accelerator.
    """
    layout = (parallelism or Parallelism()).over(world_size)
    if (kind := find_accelerator()) is None:
        if cpu_offload:
            raise ValueError("training.cpu_offload has no effect, because this trainer runs on a CPU: omit it")
        device = torch.device("cpu")
    else:
        device = torch.device(kind.type, rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)

    if world_size == 1 and not (cpu_offload or mesh):
        return Ranks(0, 1, device, None)

    # FSDP2 needs a process group even for a single process.
    if world_size == 1:
        store = dist.HashStore()
    elif store is None:
        raise ValueError(f"{world_size} ranks need the argument store, a torch.distributed store that they share")

    store.set_timeout(COLLECTIVE_TIMEOUT)
    backend = dist.get_default_backend_for_device(device)

    # gloo sums offloaded gradients in host memory, for their norm.
    backend = f"cpu:gloo,{device.type}:{backend}" if cpu_offload else backend

    # NCCL would otherwise guess the device of a rank from its number.
    nccl_device = device if device.type == "cuda" else None
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT, device_id=nccl_device
    )
    return lay_out(layout, device)


def lay_out(layout: Parallelism, device: torch.device) -> Ranks:
    """Create a device mesh of the ranks of the default process group, and return this rank's position in it. Every rank
    must call this with the same degrees.

    Raises:
        ValueError: as `Parallelism.over`.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = layout.over(world_size)
    copies = layout.data_parallel_replicate_degree
    shards = layout.data_parallel_shard_degree
    context, tensor = layout.context_parallel_degree, layout.tensor_parallel_degree
    assert copies is not None

    # Context parallelism divides tokens only: for the weights its ranks are data-parallel ones.
    dims = {
        "pipeline": layout.pipeline_parallel_degree,
        "replicate": copies,
        "shard": shards * context,
        "tensor": tensor,
    }
    dims = {name: size for name, size in dims.items() if size > 1 or name == "shard"}
    mesh = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))

    # A group has the ranks that differ in one of these dimensions, or in two of them (`sequence` and `results`).
    rank_ids = torch.arange(world_size).view(-1, copies * shards, context, tensor)  # [pipeline, data, context, tensor]
    data = _make_group(rank_ids.transpose(1, 3).flatten(0, 2), rank)
    return Ranks(
        rank,
        world_size,
        device,
        mesh,
        data=data,
        context=_make_group(rank_ids.transpose(2, 3).flatten(0, 2), rank),
        tensor=_make_group(rank_ids.flatten(0, 2), rank),
        sequence=_make_group(rank_ids.flatten(0, 1).flatten(1), rank),
        experts=layout.expert_parallel_degree,
        pipeline=_make_group(rank_ids.flatten(1).T, rank),
        results=data if len(rank_ids) == 1 else _make_group(rank_ids.flatten(0, 1).flatten(1).T, rank),
        stages=layout.stages,
    )


def _make_group(rows: torch.Tensor, rank: int) -> RankGroup:
    """Make a process group of each row of ranks [groups, size]; return the group of `rank`. Every rank must call this
    with the same rows."""
    if rows.shape[1] == 1:
        return ALONE
    if len(rows) == 1:
        return RankGroup(rank, rows.shape[1], dist.group.WORLD)
    group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=COLLECTIVE_TIMEOUT)
    return RankGroup(dist.get_rank(group), rows.shape[1], group)


def leave_ranks() -> None:
    """Leave the process group, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_gradients(model: nn.Module) -> None:
    """Make FSDP2 sum gradients over ranks instead of averaging them: tokens' weights in the loss are already shares of
    the whole batch."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo can only sum


def reduce_over_copies(model: nn.Module, ranks: Ranks, now: bool) -> None:
    """Set whether the next backward pass sums gradients over the copies of shards (HSDP).

    Args:
        now: False if a later pass of the same update does, so that a network between hosts carries gradients only once.
            A mixture of experts sums in every pass: the last one would not sum the gradients of experts that it does
            not use.
    """
    has_copies = ranks.mesh is not None and "replicate" in (ranks.mesh.mesh_dim_names or ())
    if has_copies and getattr(model, "routers", None) is None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_all_reduce(now, recurse=False)


def reshard_model(model: nn.Module) -> None:
    """Free the gathered parameters of a model with FSDP2: a forward pass without a backward pass leaves them behind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


ALIGNMENT = 16  # bytes: a multiple of every element's size, which views need
PINNED = ("cuda", "xpu")  # devices that copy from page-locked memory by themselves


def to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy host tensors to `device` in one transfer, and return them by the same names; on a CPU return the same
    objects.

    A copy from pageable memory waits until the device has completed all earlier work: with one copy for each tensor, an
    H100 was idle 18 times a micro-batch, while the host prepared the next.
    """
    if device.type == "cpu":
        return dict(tensors)

    # One buffer of bytes has all tensors, each at a different offset.
    offsets = dict[str, int]()
    size = 0
    for name, tensor in tensors.items():
        offsets[name] = size
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type in PINNED)

    def view_part(memory: Tensor, name: str) -> Tensor:
        tensor = tensors[name]
        return memory[offsets[name] : offsets[name] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    for name, tensor in tensors.items():
        view_part(host, name).copy_(tensor)
    memory = host.to(device, non_blocking=True)
    return {name: view_part(memory, name) for name in tensors}


def move_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    to: torch.device | torch.dtype,
    buffers: torch.device | None = None,
) -> None:
    """Move parameters with their gradients, the optimiser's state and buffers in place, to a device or dtype.

    This does not wait for the copies. Those to host memory are complete once the device is synchronised: torch puts
    them into page-locked memory, which it keeps for the next time. `buffers` is another device for the buffers.

    Raises:
        RuntimeError: the move created new parameters, which the optimiser does not have.
    """
    old_parameters = list(model.parameters())
    model.to(to, non_blocking=True)
    if any(old is not new for old, new in zip(old_parameters, model.parameters(), strict=True)):
        raise RuntimeError(
            "moving the model to another device replaced its parameters, so the optimiser would train the old ones"
        )

    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(buffers or to, non_blocking=True)

    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(to, non_blocking=True)
