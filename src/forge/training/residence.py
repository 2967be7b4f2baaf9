"""Where a trainer's tensors live, for those who take turns on one device."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def move(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    to: torch.device | torch.dtype,
    buffers: torch.device | None = None,
) -> None:
    """Move parameters with their gradients, the optimiser's state and buffers (to `buffers`, if given), in place; what
    is there stays as it is.

    The optimiser goes on with the parameters that it knows: they stay the same objects.
    """
    before = list(model.parameters())
    model.to(to)
    if any(a is not b for a, b in zip(before, model.parameters(), strict=True)):
        raise RuntimeError("moving a model gave it other parameters: its optimiser would train the old ones")
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(buffers or to)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(to)
