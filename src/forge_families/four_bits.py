"""Frozen weights in four bits, next to which adapters train (Dettmers et al. 2023, QLoRA, arXiv:2305.14314).

A weight is one of the 16 levels of NF4 times the largest magnitude of its block of 64. The model that a run starts from
is rounded to such values once, as a folder that every engine and trainer reads: they compute with the same weights.
The trainer then holds the levels, half a byte a weight, and makes a layer's matrix when it computes.
"""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forge.models.tokenizer import model_config
from forge.system.checksums import CHECKSUMS, write_checksums
from forge.system.files import removed_on_error, room_for
from forge.training.lora import LoraLinear
from forge.training.policy import Policy
from forge.training.settings import FUSED, TARGETS

try:
    import bitsandbytes
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit
except ImportError as error:
    raise ImportError("lora.quantize needs bitsandbytes: pip install 'torchforge-rl[four-bits]'") from error

BLOCK = 64  # weights that share a scale


class QuantizedLoraLinear(LoraLinear):
    """A `LoraLinear` whose frozen matrix is `packed`, two weights a byte, and its `state`, the scales."""

    packed: Tensor
    state: Any

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + scaling * B(A(x)), [..., out] for x [..., in]."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        self.state.to(x.device)  # it is not a buffer, which would move with its module
        product = bitsandbytes.matmul_4bit(x.to(dtype), self.packed.t(), quant_state=self.state, bias=self.bias)
        return product + self.scaling * self.lora_B(self.lora_A(x))


def round_model(model: str, folder: str, targets: list[str] | None, *, keep: bool = False) -> str:
    """Write a copy of a model folder whose linear layers have the values of four bits; return its path.

    Args:
        targets: names of the linear layers, as in `lora.targets`; None: all of attention and feed-forward.
        keep: keep a copy that is there: a resumed run reads the same weights.
    """
    names = tuple(targets or (*TARGETS, *FUSED))
    source, rounded = Path(model), Path(folder)
    if keep and (rounded / CHECKSUMS).exists():
        return folder
    shutil.rmtree(rounded, ignore_errors=True)
    with (
        room_for(rounded, sum(path.stat().st_size for path in source.glob("*.safetensors"))),
        removed_on_error(rounded),
    ):
        shutil.copytree(source, rounded, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", CHECKSUMS))
        for file in sorted(source.glob("*.safetensors")):
            tensors = load_file(file)
            for name, tensor in tensors.items():
                if tensor.dim() == 2 and name.endswith(tuple(f".{target}.weight" for target in names)):
                    # The values that four bits stand for, in its dtype; rounding twice changes nothing.
                    tensors[name] = dequantize_4bit(
                        *quantize_4bit(tensor.contiguous(), blocksize=BLOCK, quant_type="nf4")
                    )
            save_file(tensors, rounded / file.name, metadata={"format": "pt"})
        write_checksums(rounded, [path.name for path in rounded.iterdir() if path.is_file()])
    return folder


def quantize_base(policy: Policy, folder: str | Path) -> None:
    """Hold the frozen matrices of all layers with adapters in four bits, in place.

    Args:
        folder: of the model, in whose dtype the matrices are made.
    """
    dtype = getattr(model_config(folder), "dtype", None) or torch.float32
    for module in [module for module in policy.model.modules() if isinstance(module, LoraLinear)]:
        packed, state = quantize_4bit(module.weight.detach().contiguous(), blocksize=BLOCK, quant_type="nf4")
        state.dtype = dtype
        del module.weight
        module.__class__ = QuantizedLoraLinear
        # Not a part of checkpoints: the folder has it.
        module.register_buffer("packed", packed, persistent=False)
        module.state = state
    policy.named_weights = partial(_name_weights, policy.model)  # type: ignore[method-assign]


def _name_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of each weight, those in four bits as matrices."""
    yield from model.named_parameters()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLoraLinear):
            module.state.to(module.packed.device)
            yield f"{name}.weight", dequantize_4bit(module.packed, module.state)
