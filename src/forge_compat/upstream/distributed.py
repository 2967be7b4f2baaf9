"""`forge.util.distributed` of torchforge."""

from __future__ import annotations

import torch.distributed as dist


def get_world_size_and_rank() -> tuple[int, int]:
    """The size of the default process group and this process's rank in it; (1, 0) without a group."""
    if not dist.is_available() or not dist.is_initialized():
        return 1, 0
    return dist.get_world_size(), dist.get_rank()
