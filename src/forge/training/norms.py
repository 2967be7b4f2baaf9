"""RMSNorm in one kernel where a device has one."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..system.devices import type_of


class FusedNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) as one kernel; transformers' has seven, its gradient twelve.

    The parameters are the same under the same names. In half precision the result is rounded once, not twice, as in
    the embedded engine.
    """

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The norm over the last dimension, [..., dim] to [..., dim]."""
        if type_of(hidden_states.device) == "cpu":
            return super().forward(hidden_states)
        weight = self.weight.to(hidden_states.dtype)
        return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)


def fuse_norms(model: nn.Module) -> None:
    """Turn the norms of a model into `FusedNorm`, in place; not Gemma's, whose weights are offsets from 1."""
    for module in model.modules():
        kind = type(module)
        if issubclass(kind, FusedNorm):
            continue
        # A subclass of both, so that the module is still an instance of transformers' class.
        if kind.__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.__class__ = type(kind.__name__, (FusedNorm, kind), {})
