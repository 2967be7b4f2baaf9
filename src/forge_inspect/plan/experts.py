"""TorchTitan's mixture of experts for a plan: one rank's experts, and the exchange of tokens with other ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PlannedExperts(nn.Module):
    """One rank's experts of a layer, on the meta device, with the tensors of `forge_titan.policy.TitanExperts` and of
    TorchTitan's `AllToAllTokenDispatcher`. It stands in place of transformers' experts and has their weights' names.

    Tokens are taken to be divided equally: a rank receives as many rows as it sends.

    Args:
        experts: those of transformers, of all ranks.
        degree: number of ranks that divide the experts between them; must divide their number.
        has_grouped_kernel: all experts are one kernel, as on a GPU in bfloat16; otherwise each is computed by itself.
    """

    def __init__(self, experts: nn.Module, degree: int, has_grouped_kernel: bool) -> None:
        super().__init__()
        gate_up: Tensor = experts.get_parameter("gate_up_proj")
        down: Tensor = experts.get_parameter("down_proj")
        self.count = len(gate_up) // degree
        self.degree = degree
        self.has_grouped_kernel = has_grouped_kernel
        # Not views: those would hold the weights of all ranks.
        self.gate_up_proj = nn.Parameter(gate_up.new_empty(self.count, *gate_up.shape[1:]))
        self.down_proj = nn.Parameter(down.new_empty(self.count, *down.shape[1:]))

    def forward(self, hidden: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """[tokens, width] in and out; experts and gates are [tokens, k]."""
        tokens, k = experts.shape
        routes = torch.zeros(tokens, self.count * self.degree, dtype=torch.bool, device=hidden.device)
        order = experts.reshape(-1).argsort(stable=True)
        scores = gates.reshape(-1)[order]
        rows = order // k
        received, places = self._dispatch(hidden, rows)
        computed = self._experts(received)
        del received
        if self.degree > 1:
            ranked = computed.new_empty(computed.shape)
            ranked[places] = computed
            computed = _Exchange.apply(ranked)
            del ranked
        # The scores are multiplied in float32, whatever the dtype of the passes.
        weighted = (computed.to(torch.float32) * scores[:, None]).to(computed.dtype)
        result = torch.zeros_like(hidden).scatter_add(0, rows[:, None].expand(-1, hidden.shape[1]), weighted)
        del routes  # the map of tokens lives as long as the layer's forward pass
        return result

    def _dispatch(self, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that this rank's experts compute, [tokens * k, width], and their places before they were sorted."""
        sent = hidden[rows]
        if self.degree == 1:
            return sent, rows
        received = _Exchange.apply(sent)
        places = torch.empty_like(rows)
        # What was sent lives until the rows are sorted by expert.
        return received[places], places

    def _experts(self, x: Tensor) -> Tensor:
        if self.has_grouped_kernel:
            ends = torch.empty(self.count, dtype=torch.int32, device=x.device)
            gate, up = F.grouped_mm(x, self.gate_up_proj.transpose(-2, -1), offs=ends).chunk(2, -1)
            return F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(-2, -1), offs=ends)
        outputs = []
        for part, gate_up, down in zip(x.tensor_split(self.count), self.gate_up_proj, self.down_proj, strict=True):
            gate, up = F.linear(part, gate_up).chunk(2, -1)
            outputs.append(F.linear(F.silu(gate) * up, down))
        return torch.cat(outputs)


class _Exchange(torch.autograd.Function):
    """An all-to-all of equal parts, forward and backward: its result is a new tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty_like(gradients[0])


def divide_experts(model: nn.Module, degree: int, has_grouped_kernel: bool) -> None:
    """Leave one rank's experts in each mixture of a transformers model on the meta device; see `PlannedExperts`."""
    for module in list(model.modules()):
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.Module):
            module.register_module("experts", PlannedExperts(experts, degree, has_grouped_kernel))
