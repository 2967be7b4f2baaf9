"""Reading Hugging Face checkpoints and laying their weights out for decoding: q, k, v and gate, up are fused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def load_config(folder: Path) -> Any:
    """The transformers config of a checkpoint folder.

    FileNotFoundError: no such folder, or no config.json in it. ValueError: a model this engine cannot run exactly.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no model folder at {folder}")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no config.json in {folder}")
    model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported: the embedded engine runs {', '.join(FAMILIES)}")
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    rope = config.rope_parameters or {}
    for fits, what in (
        (
            set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"},
            "sliding-window layers",
        ),
        (config.hidden_act == "silu", f"hidden_act {config.hidden_act!r}"),
        (not getattr(config, "mlp_bias", False), "mlp_bias"),
        (rope.get("rope_type", "default") in ROPE_TYPES, f"rope_type {rope.get('rope_type')!r}"),
        (rope.get("partial_rotary_factor", 1.0) == 1.0, "a partial rotary embedding"),
    ):
        if not fits:
            raise ValueError(f"{folder}: the embedded engine does not support {what}")
    return config


def load_eos(folder: Path, config: Any) -> tuple[int, ...]:
    """The end-of-sequence ids: of generation_config.json where it names any, else of the model config."""
    path = folder / "generation_config.json"
    eos = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    eos = config.eos_token_id if eos is None else eos
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def read_checkpoint(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight in a folder of safetensors, one file or shards.

    FileNotFoundError: no safetensors file in the folder, or a shard that the index names is missing.
    """
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no weights (*.safetensors) in {folder}")
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{index.name} names {file.name}, which is not in {folder}")
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a safe_open handle cannot be iterated)
                yield name, tensors.get_tensor(name)


class Linear:
    """A matrix product: x (N, in) -> (N, out)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        """weight: (out, in), bias: (out,)."""
        self.weight, self.bias = weight, bias
        self.packed = False

    def pack(self) -> None:
        """Repack the weight for oneDNN where that is possible; call it once, when the weight is filled.

        In float32 on a CPU PyTorch multiplies with MKL, which leaves the wider vectors of other makers' processors
        unused: on an AMD one with AVX-512 oneDNN takes less than half the time, for the same result to rounding.
        """
        weight = self.weight
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
            self.packed = True

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class Layer:
    """One transformer block. C: hidden size, H: heads, K: key-value heads, D: head size, I: intermediate size."""

    input_norm: Tensor  # (C,)
    qkv: Linear  # C -> (H + 2K) * D
    qk_norm: Tensor | None  # (H + K, D): the q norm for each head, then the k norm for each key-value head
    output: Linear  # H * D -> C
    mlp_norm: Tensor  # (C,)
    gate_up: Linear  # C -> 2I
    down: Linear  # I -> C


class Weights:
    """All weights of one policy version, filled from tensors under their Hugging Face names.

    A new version is a new `Weights`, made aside while the old one still decodes: taking it into use is an
    assignment, and one that fails to load was never in use.
    """

    def __init__(self, config: Any, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device):
        """ValueError, naming the tensor: an unknown name, a wrong shape, a name given twice, a weight missing."""
        self._places: dict[str, Tensor] = {}
        self._new: dict[str, Any] = {"dtype": dtype, "device": device}
        self.embed = self._place((config.vocab_size, config.hidden_size), "model.embed_tokens.weight")
        self.layers = [self._layer(config, f"model.layers.{i}.") for i in range(config.num_hidden_layers)]
        self.norm = self._place((config.hidden_size,), "model.norm.weight")
        tied = config.tie_word_embeddings
        self.head = Linear(self.embed if tied else self._place(tuple(self.embed.shape), "lm_head.weight"))
        self._fill(named, tied)
        for linear in (self.head, *(x for y in self.layers for x in (y.qkv, y.output, y.gate_up, y.down))):
            linear.pack()

    def _layer(self, config: Any, at: str) -> Layer:
        C, I, D = config.hidden_size, config.intermediate_size, head_size(config)  # noqa: E741
        H, K = config.num_attention_heads, config.num_key_value_heads
        attn, mlp = at + "self_attn.", at + "mlp."
        q, kv, gate = (f"{attn}q_proj", H * D), [(f"{attn}{x}_proj", K * D) for x in "kv"], f"{mlp}gate_proj"
        biased = config.model_type == "qwen2" or getattr(config, "attention_bias", False)
        output_biased = config.model_type != "qwen2" and biased
        qk_norm = None
        if config.model_type == "qwen3":
            qk_norm = torch.empty(H + K, D, **self._new)
            self._places |= {f"{attn}q_norm.weight": qk_norm[:H], f"{attn}k_norm.weight": qk_norm[H:]}
        return Layer(
            input_norm=self._place((C,), f"{at}input_layernorm.weight"),
            qkv=Linear(
                self._fused((C,), [q, *kv], ".weight"),
                self._fused((), [q, *kv], ".bias") if biased else None,
            ),
            qk_norm=qk_norm,
            output=Linear(
                self._place((C, H * D), f"{attn}o_proj.weight"),
                self._place((C,), f"{attn}o_proj.bias") if output_biased else None,
            ),
            mlp_norm=self._place((C,), f"{at}post_attention_layernorm.weight"),
            gate_up=Linear(self._fused((C,), [(gate, I), (f"{mlp}up_proj", I)], ".weight")),
            down=Linear(self._place((C, I), f"{mlp}down_proj.weight")),
        )

    def _place(self, shape: tuple[int, ...], name: str) -> Tensor:
        self._places[name] = torch.empty(shape, **self._new)
        return self._places[name]

    def _fused(self, inner: tuple[int, ...], parts: list[tuple[str, int]], suffix: str) -> Tensor:
        whole = torch.empty(sum(rows for _, rows in parts), *inner, **self._new)
        views = whole.split([rows for _, rows in parts])
        self._places |= {name + suffix: view for (name, _), view in zip(parts, views, strict=True)}
        return whole

    @torch.no_grad()
    def _fill(self, named: Iterable[tuple[str, Tensor]], tied: bool) -> None:
        places = self._places
        for name, tensor in named:
            if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
                continue  # both follow from what else is loaded
            place = places.pop(name, None)
            if place is None:
                raise ValueError(f"weight {name!r} is unknown to this model, or given twice")
            # A norm is one vector, even where its place holds it once per head.
            shape = place.shape[-1:] if name.endswith("norm.weight") else place.shape
            if tensor.shape != shape:
                raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}, the model has {tuple(shape)}")
            place.copy_(tensor)
        if places:
            first, more = next(iter(places)), len(places) - 1
            raise ValueError(f"weight {first!r} is missing" + (f", and {more} more" if more else ""))


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
