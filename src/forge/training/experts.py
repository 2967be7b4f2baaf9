"""Mixtures of experts in training: replay of the engine's routing, the load of experts, and the loss that balances it.

Router replay (Ma et al. 2025, arXiv 2510.11370): the engine and the trainer compute with different kernels, a router
close to a tie then picks another expert, and the token's log-probability jumps. The trainer takes the experts that the
engine recorded. The gates come from its own router, so that the router learns.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from ..types import UNKNOWN_EXPERT


class Routers:
    """Replay of recorded experts in a model's routers, with a record of the experts' load, for transformers' Qwen3-MoE
    and OLMoE, which return logits, gates and experts.

    Call `begin` before a forward pass and `take` after it. A backward pass that recomputes activations routes as the
    forward pass before it.

    Args:
        routers: the router modules by number of the layer.
        k: experts of a token.
        normalised: whether the gates of a token add up to 1.
    """

    def __init__(self, routers: Mapping[int, nn.Module], k: int, normalised: bool) -> None:
        self.k, self.normalised = k, normalised
        self.layers = list(routers)
        self._replayed: Tensor | None = None
        self._real = 0
        self._routed: list[tuple[Tensor, Tensor]] | None = None  # probabilities and experts of each layer
        for number, router in enumerate(routers.values()):
            router.register_forward_hook(partial(self._record_choice, number))

    def begin(self, replayed: Tensor | None, real: int) -> None:
        """Prepare for a forward pass.

        Args:
            replayed: [tokens, layers with experts, k], the experts to take; tokens with `UNKNOWN_EXPERT`, or all if it
                is None, are routed freely.
            real: tokens after the first `real` are padding, which does not count as load.

        Raises:
            ValueError: the experts were recorded with another model.
        """
        if replayed is not None and replayed.shape[1:] != (len(self.layers), self.k):
            layers, k = replayed.shape[1:]
            raise ValueError(
                f"{k} experts in each of {layers} layers were recorded, but the model has {self.k} in "
                f"{len(self.layers)}"
            )
        self._replayed = replayed
        self._routed = []
        self._real = real

    def take(self) -> Tensor:
        """Return the load of E experts over this rank's tokens (without padding) in the last forward pass, [2, layers,
        E], float32.

        [0] is the number of tokens of each expert, [1] the sum of its probabilities; only the latter has a gradient.
        """
        assert self._routed is not None
        probabilities = torch.stack([probs[: self._real].sum(0) for probs, _ in self._routed])
        experts = torch.stack([experts[: self._real].flatten() for _, experts in self._routed])
        self._routed = None  # a recomputation in the backward pass is not counted

        # Not `bincount`, which reads the largest number from the device: the host would wait in every layer.
        ones = torch.ones_like(experts, dtype=torch.float32)
        counts = torch.zeros_like(probabilities).scatter_add_(1, experts, ones)
        return torch.stack([counts, probabilities])

    def _record_choice(
        self, number: int, _router: nn.Module, _inputs: object, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, gates, experts = output
        return logits, *self.route(number, logits.float().softmax(-1), gates, experts)

    def route(self, layer_index: int, probabilities: Tensor, gates: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gates and experts, both [tokens, k], that a layer uses instead of its router's output.

        Args:
            layer_index: the layer's index among the layers with experts.
            probabilities: the router's, [tokens, E], float32.
            gates, experts: the router's, [tokens, k].
        """
        if self._replayed is not None:
            recorded = self._replayed[:, layer_index]
            experts = torch.where(recorded == UNKNOWN_EXPERT, experts, recorded)
            replayed_gates = probabilities.gather(-1, experts)
            if self.normalised:
                replayed_gates = replayed_gates / replayed_gates.sum(-1, keepdim=True)
            gates = replayed_gates.to(gates.dtype)

        if self._routed is not None:
            self._routed.append((probabilities, experts))
        return gates, experts


def balance_loss(local: Tensor, total: Tensor, k: int) -> Tensor:
    """Return a rank's share of the loss that balances experts, a scalar; shares add up to the loss over all ranks'
    tokens.

    The loss follows Fedus et al. 2021 (Switch Transformer, equations 4 to 6) as transformers computes it, over all
    layers together: E * sum over experts of (tokens per expert / rows) * (probability / rows), where each token is a
    row in each layer. The first factor has no gradient: it is taken from the load of all ranks (Qiu et al. 2025,
    arXiv 2501.11873).

    Args:
        local: this rank's load, the result of `Routers.take`.
        total: its sum over all ranks.
        k: experts of a token.

    >>> load = torch.tensor([[[2.0, 2.0]], [[2.0, 2.0]]])  # a layer, whose two experts have the same load
    >>> balance_loss(load, load, k=1).item()
    1.0
    """
    token_counts = total[0].sum(0)
    rows = (token_counts.sum() / k).clamp(min=1)
    token_shares = (token_counts / rows).to(local.dtype)
    return (token_shares * local[1].sum(0)).sum() * (local.shape[2] / rows).to(local.dtype)


def load_metrics(load: Tensor, layers: list[int], k: int) -> dict[str, float]:
    """Return metrics of a load of E experts by name.

    For each layer `experts/max_share_<layer>`, the share of tokens that went to the busiest expert (k / E to 1), and
    `experts/entropy_<layer>` of the load, in nats (at most log E); `router_aux_loss` over all layers.

    Args:
        load: in host memory; see `Routers.take`.
        layers: the numbers of the layers with experts.
        k: experts of a token.
    """
    shares = load[0] / load[0].sum(1, keepdim=True)
    metrics = {"router_aux_loss": float(balance_loss(load, load, k))}
    largest_shares = shares.amax(1).tolist()
    entropies = torch.special.entr(shares).sum(1).tolist()
    for layer, share, entropy in zip(layers, largest_shares, entropies, strict=True):
        metrics |= {f"experts/max_share_{layer}": share * k, f"experts/entropy_{layer}": entropy}

    return metrics
