"""A mixture of experts for inference (Shazeer et al. 2017): each token goes through the k experts of largest gate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import Linear


@dataclass(slots=True)
class Experts:
    """The feed-forward of a layer as a mixture of E experts. C: hidden size, I: intermediate size of an expert."""

    router: Linear  # C -> E
    gate_up: Sequence[Linear]  # by expert, C -> 2I
    down: Sequence[Linear]  # by expert, I -> C
    k: int  # experts of a token
    normalised: bool  # whether the gates of a token are scaled to a sum of 1

    def __call__(self, x: Tensor, act: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the output (N, C) for x (N, C), and the experts of each token, (N, k), by descending gate.

        On a CPU a token's result does not depend on the others: its products have one of the numbers of rows that round
        alike (see `Decoder`), and its experts are added in the order of their gates.
        """
        gates, experts = self.router(x).float().softmax(-1).topk(self.k, -1)
        if self.normalised:
            gates = gates / gates.sum(-1, keepdim=True)
        gates = gates.to(x.dtype)

        # Pair i is token i // k with one of its experts; `pairs_by_expert` has the pairs expert by expert.
        pairs_by_expert = experts.flatten().argsort(stable=True)
        pair_counts = torch.bincount(experts.flatten(), minlength=len(self.down)).tolist()
        outputs = torch.empty(len(pairs_by_expert), x.shape[1], dtype=x.dtype, device=x.device)

        for expert, pairs in enumerate(pairs_by_expert.split(pair_counts)):
            if len(pairs):
                padding = pad_rows(len(pairs)) - len(pairs)
                inputs = F.pad(x[pairs // self.k], (0, 0, 0, padding))
                gate, up = self.gate_up[expert](inputs).chunk(2, -1)
                outputs[pairs] = self.down[expert](act(gate).mul_(up))[: len(pairs)]

        # Added one gate after the other: a sum over the dimension may add in another order and round differently.
        outputs = outputs.view(len(x), self.k, -1)
        mixed = outputs[:, 0] * gates[:, :1]
        for i in range(1, self.k):
            mixed.addcmul_(outputs[:, i], gates[:, i, None])

        return mixed, experts


def pad_rows(rows: int) -> int:
    """Return the number of rows to which the `rows` of a matrix product are padded: 2 to 8, then the next multiple of 8
    up to 64, then of 64. Kernels are prepared for every new number of rows, so there should be few.

    >>> pad_rows(9)
    16
    >>> pad_rows(65)
    128
    """
    if rows <= 8:
        return max(rows, 2)
    return -(-rows // 8) * 8 if rows <= 64 else -(-rows // 64) * 64
