"""Mixtures of experts in training: replay of the engine's routing, the load of experts, and the loss that balances it.

Router replay (Ma et al. 2025, arXiv 2510.11370): the engine and the trainer compute with different kernels, a router
close to a tie then picks another expert, and the token's log-probability jumps. The trainer takes the experts that the
engine recorded. The gates are those of its own router, so that the router learns.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..types import UNKNOWN_EXPERT


class Routers:
    """The routers of a model: those of transformers' Qwen3-MoE and OLMoE, which return logits, gates and experts.

    `begin` before a forward pass, `take` after it; a backward pass that recomputes activations routes as the forward
    pass before it.

    Args:
        routers: by layer.
        k: experts of a token.
        normalised: whether the gates of a token add up to 1.
    """

    def __init__(self, routers: Mapping[int, nn.Module], k: int, normalised: bool) -> None:
        self.k, self.normalised, self.layers = k, normalised, list(routers)
        self._replayed: Tensor | None = None
        self._seen: list[tuple[Tensor, Tensor]] | None = None  # probabilities and experts of each layer
        for number, router in enumerate(routers.values()):
            router.register_forward_hook(partial(self._hook, number))

    def begin(self, replayed: Tensor | None, real: int) -> None:
        """Replay these experts, [tokens, layers with experts, k], or route freely where they are `UNKNOWN_EXPERT`.
        The tokens after the first `real` are padding. ValueError: they are another model's."""
        if replayed is not None and replayed.shape[1:] != (len(self.layers), self.k):
            layers, k = replayed.shape[1:]
            raise ValueError(
                f"{k} experts in each of {layers} layers were recorded, the model has {self.k} in {len(self.layers)}"
            )
        self._replayed, self._seen, self._real = replayed, [], real

    def take(self) -> Tensor:
        """The load of experts over this rank's real tokens, [2, layers, E], float32: how many tokens went to each, and
        the sums of its probabilities, which alone have a gradient."""
        assert self._seen is not None
        probabilities = torch.stack([each[: self._real].sum(0) for each, _ in self._seen])
        chosen = torch.stack([each[: self._real].flatten() for _, each in self._seen])
        self._seen = None  # a recomputation is not noted
        # Not `bincount`, which reads the largest number from the device: a wait of the host in every layer.
        counts = torch.zeros_like(probabilities).scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float32))
        return torch.stack([counts, probabilities])

    def _hook(self, number: int, _router: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, gates, chosen = output
        return logits, *self.route(number, logits.float().softmax(-1), gates, chosen)

    def route(self, number: int, probabilities: Tensor, gates: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The gates and experts that a layer takes, both [tokens, k], in place of those that its router chose.
        probabilities: [tokens, E], float32."""
        if self._replayed is not None:
            wanted = self._replayed[:, number]
            chosen = torch.where(wanted == UNKNOWN_EXPERT, chosen, wanted)
            replayed = probabilities.gather(-1, chosen)
            if self.normalised:
                replayed = replayed / replayed.sum(-1, keepdim=True)
            gates = replayed.to(gates.dtype)
        if self._seen is not None:
            self._seen.append((probabilities, chosen))
        return gates, chosen


def balance(own: Tensor, everyone: Tensor, k: int) -> Tensor:
    """A rank's share in the loss that balances experts, a scalar; shares add up to the loss over all ranks' tokens.

    The loss is that of Fedus et al. 2021 (Switch Transformer, equations 4 to 6) as transformers computes it, over all
    layers together: E * sum over experts of (tokens per expert / rows) * (probability / rows), where each token is a
    row in each layer. The first factor has no gradient: it is taken from `everyone`, the load of all ranks in a
    micro-batch (Qiu et al. 2025, arXiv 2501.11873).
    """
    counts = everyone[0].sum(0)
    rows = (counts.sum() / k).clamp(min=1)
    return ((counts / rows).to(own.dtype) * own[1].sum(0)).sum() * (own.shape[2] / rows).to(own.dtype)


def load_metrics(load: Tensor, layers: list[int], k: int) -> dict[str, float]:
    """By layer, `experts/max_share_<layer>`, the share of tokens that went to the busiest expert (k / E to 1), and
    `experts/entropy_<layer>` of the load, in nats (at most log E); and `router_aux_loss` of all. The load is in host
    memory."""
    shares = load[0] / load[0].sum(1, keepdim=True)
    found = {"router_aux_loss": float(balance(load, load, k))}
    largest, entropies = shares.amax(1).tolist(), torch.special.entr(shares).sum(1).tolist()
    for layer, share, entropy in zip(layers, largest, entropies, strict=True):
        found |= {f"experts/max_share_{layer}": share * k, f"experts/entropy_{layer}": entropy}
    return found
