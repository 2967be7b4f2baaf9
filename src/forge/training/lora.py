"""Low-rank adapters (Hu et al. 2021, LoRA): a frozen linear layer learns W + (alpha / rank) B A."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .cpu_linear import FastLinear
from .heads import SCORE
from .policy import Packed
from .settings import LoraSettings


class LoraLinear(FastLinear):
    """A linear layer with its adapter. The layer's own parameters keep their names; the factors are `lora_A.weight`
    (rank, in) and `lora_B.weight` (out, rank)."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    scaling: float

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scaling * self.lora_B(self.lora_A(x))


def add_adapters(model: Packed, settings: LoraSettings) -> None:
    """Give every target of the backbone an adapter, in place, and freeze all else but a value or reward head.

    A is drawn from a generator of the layer's own, equal on every rank and in every run; B is 0, so that the model is
    at first what it was.

    ValueError: a target is not a linear layer of the backbone; names those that are.
    """
    linear = {name: module for name, module in model.model.named_modules() if isinstance(module, nn.Linear)}
    inner = {name: module for name, module in linear.items() if name.startswith("model.")}
    there = sorted({name.rpartition(".")[2] for name in inner})
    if unknown := sorted(set(settings.layers) - set(there)):
        raise ValueError(f"lora.targets: the model has no linear layers {unknown}; its linear layers are {there}")
    for name, parameter in model.model.named_parameters():
        parameter.requires_grad_(name == SCORE)
    for name, module in inner.items():
        if name.rpartition(".")[2] in settings.layers:
            _wrap(name, module, settings)


def trained(named: Iterable[tuple[str, Tensor]], settings: LoraSettings) -> dict[str, Tensor]:
    """The parameters that train: factors as `forge.names.adapters` names them, with alpha / rank in B, so that W + B A
    is the layer; and a head."""
    scaling = settings.alpha / settings.rank
    return {
        name: parameter.detach() * scaling if name.endswith(".lora_B.weight") else parameter.detach()
        for name, parameter in named
        if parameter.requires_grad
    }


def _wrap(name: str, module: nn.Linear, settings: LoraSettings) -> None:
    place = module.weight.device
    a = nn.utils.skip_init(FastLinear, module.in_features, settings.rank, bias=False, device=place)
    b = nn.utils.skip_init(FastLinear, settings.rank, module.out_features, bias=False, device=place)
    nn.init.kaiming_uniform_(a.weight, math.sqrt(5), generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    nn.init.zeros_(b.weight)
    module.__class__ = LoraLinear
    assert isinstance(module, LoraLinear)
    module.lora_A, module.lora_B, module.scaling = a, b, settings.alpha / settings.rank
