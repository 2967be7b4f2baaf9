"""A mixture of experts for inference (Shazeer et al. 2017): each token goes through the k experts of largest gate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import Linear


@dataclass(slots=True)
class Experts:
    """Feed-forward of a layer as a mixture. E: experts, C: hidden size, I: intermediate size of an expert."""

    router: Linear  # C -> E
    gate_up: Sequence[Linear]  # by expert, C -> 2I
    down: Sequence[Linear]  # by expert, I -> C
    k: int  # experts of a token
    normalised: bool  # whether the gates of a token are scaled to a sum of 1

    def __call__(self, x: Tensor, act: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """x (N, C) -> (N, C), and the experts of each token, (N, k).

        On a CPU a token's result does not depend on the others: its products have one of the numbers of rows that round
        alike (see `Decoder`), and its experts are added in the order of their gates.
        """
        gates, experts = self.router(x).float().softmax(-1).topk(self.k, -1)
        if self.normalised:
            gates = gates / gates.sum(-1, keepdim=True)
        gates = gates.to(x.dtype)
        order = experts.flatten().argsort(stable=True)  # the pairs of token and expert, expert by expert
        counts = torch.bincount(experts.flatten(), minlength=len(self.down)).tolist()
        outputs = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)

        for expert, pairs in enumerate(order.split(counts)):
            if len(pairs):
                rows = F.pad(x[pairs // self.k], (0, 0, 0, pad_rows(len(pairs)) - len(pairs)))
                gate, up = self.gate_up[expert](rows).chunk(2, -1)
                outputs[pairs] = self.down[expert](act(gate).mul_(up))[: len(pairs)]

        # Added one gate after the other: a sum over the dimension may round in another order.
        outputs = outputs.view(len(x), self.k, -1)
        out = outputs[:, 0] * gates[:, :1]
        for i in range(1, self.k):
            out.addcmul_(outputs[:, i], gates[:, i, None])

        return out, experts


def pad_rows(rows: int) -> int:
    """Return number of rows of a product: 2 to 8, a multiple of 8 up to 64, and of 64 beyond. Kernels are prepared for
    every new number of rows.

    >>> pad_rows(9)
    16
    >>> pad_rows(65)
    128
    """
    if rows <= 8:
        return max(rows, 2)
    return -(-rows // 8) * 8 if rows <= 64 else -(-rows // 64) * 64
