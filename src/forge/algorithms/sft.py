"""Supervised fine-tuning: cross-entropy of given tokens."""

from torch import Tensor

from .terms import to_wide, weighted_sum


class SFTLoss:
    """Maximum likelihood: the weighted cross-entropy of given tokens, `-sum(weights * logprobs)`."""

    def __call__(self, logprobs: Tensor, weights: Tensor) -> Tensor:
        """Return the loss, a scalar, in nats. `logprobs` and `weights` have one shape."""
        return -weighted_sum(to_wide(logprobs), weights)
