"""Low-rank adapters (Hu et al. 2021, LoRA): a frozen linear layer learns W + (alpha / rank) B A."""

import math
import zlib

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .linear import FastLinear
from .settings import LoraSettings

SCORE = "score.weight"  # the scalar head, which trains alongside the adapters


class LoraLinear(FastLinear):
    """A linear layer with its adapter. The layer's own parameters keep their names; the factors are `lora_A.weight`
    (rank, in) and `lora_B.weight` (out, rank)."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    scaling: float

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + scaling * B(A(x)) (Hu et al. 2021, eq. 3), [..., out] for x [..., in]."""
        return super().forward(x) + self.scaling * self.lora_B(self.lora_A(x))


def add_adapters(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Add an adapter to every target of a transformers model's backbone, in place, and freeze all other weights but the
    scalar head.

    The factor A is drawn with a seed from the layer's name, equal on every rank and in every run; B is 0, so that the
    model's outputs are unchanged at first.

    Raises:
        ValueError: a target is not a linear layer of the backbone; the message lists those.
    """
    linear_layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    backbone_layers = {
        name: module for name, module in linear_layers.items() if name.startswith(f"{model.base_model_prefix}.")
    }
    layer_names = sorted({path.rpartition(".")[2] for path in backbone_layers})
    targets = settings.layers(layer_names)
    if unknown_layers := sorted(set(targets) - set(layer_names)):
        raise ValueError(
            f"lora.targets: the model has no linear layers {unknown_layers}; its linear layers are {layer_names}"
        )

    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == SCORE)

    for path, module in backbone_layers.items():
        if path.rpartition(".")[2] not in targets:
            continue

        # The adapter is never on the meta device: `loading.fill_model` reads only the layer's weights.
        device = torch.device("cpu") if module.weight.is_meta else module.weight.device
        dtype = module.weight.dtype
        factor_a = nn.utils.skip_init(
            FastLinear, module.in_features, settings.rank, bias=False, device=device, dtype=dtype
        )
        factor_b = nn.utils.skip_init(
            FastLinear, settings.rank, module.out_features, bias=False, device=device, dtype=dtype
        )
        generator = torch.Generator().manual_seed(zlib.crc32(path.encode()))
        nn.init.kaiming_uniform_(factor_a.weight, math.sqrt(5), generator=generator)
        nn.init.zeros_(factor_b.weight)

        # The module keeps its place in the model and its parameters' names.
        module.__class__ = LoraLinear
        assert isinstance(module, LoraLinear)
        module.lora_A, module.lora_B = factor_a, factor_b
        module.scaling = settings.alpha / settings.rank
