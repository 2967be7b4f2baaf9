"""What the same weights are called: by Hugging Face, by peft while LoRA trains, and fused in the engine.

Plain names are those of a Hugging Face checkpoint. All functions are pure; tensors stay on their device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"  # where embeddings are tied, another name for EMBEDDING

ADAPTER = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(\.(?P<adapter>[^.]+))?\.weight")
UNKNOWN = re.compile(r"(^|\.)(lora_|modules_to_save\.|original_module\.)")


class Part(NamedTuple):
    """A plain tensor and the rows that it fills of a fused one: with its own, or each with the same vector."""

    name: str
    rows: int
    inner: tuple[int, ...] = ()  # the shape of one row
    repeated: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the plain tensor."""
        return self.inner if self.repeated else (self.rows, *self.inner)


def head_size(config: Any) -> int:
    """The size of one attention head of a transformers config."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def follows(name: str, tied: bool) -> bool:
    """Whether a plain tensor says nothing new: rotary frequencies, or the head of a model with tied embeddings."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == HEAD)


def layout(config: Any) -> dict[str, tuple[Part, ...]]:
    """Every engine parameter of a Llama, Qwen2 or Qwen3 config with the plain tensors it is made of, in row order.

    Matrices and their biases end in `.weight` and `.bias`. There is no head where embeddings are tied.
    """
    C, I, D = config.hidden_size, config.intermediate_size, head_size(config)  # noqa: E741
    H, K = config.num_attention_heads, config.num_key_value_heads
    biased = config.model_type == "qwen2" or getattr(config, "attention_bias", False)
    table: dict[str, tuple[Part, ...]] = {"embed": (Part(EMBEDDING, config.vocab_size, (C,)),)}
    for i in range(config.num_hidden_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        attn, mlp = theirs + "self_attn.", theirs + "mlp."
        projections = (("q_proj", H * D), ("k_proj", K * D), ("v_proj", K * D))
        table[ours + "input_norm"] = (Part(theirs + "input_layernorm.weight", C),)
        table[ours + "qkv.weight"] = tuple(Part(f"{attn}{x}.weight", rows, (C,)) for x, rows in projections)
        table[ours + "output.weight"] = (Part(attn + "o_proj.weight", C, (H * D,)),)
        if biased:
            table[ours + "qkv.bias"] = tuple(Part(f"{attn}{x}.bias", rows) for x, rows in projections)
            if config.model_type != "qwen2":
                table[ours + "output.bias"] = (Part(attn + "o_proj.bias", C),)
        if config.model_type == "qwen3":
            norms = (("q_norm", H), ("k_norm", K))
            table[ours + "qk_norm"] = tuple(Part(f"{attn}{x}.weight", rows, (D,), True) for x, rows in norms)
        table[ours + "mlp_norm"] = (Part(theirs + "post_attention_layernorm.weight", C),)
        table[ours + "gate_up.weight"] = tuple(Part(f"{mlp}{x}_proj.weight", I, (C,)) for x in ("gate", "up"))
        table[ours + "down.weight"] = (Part(mlp + "down_proj.weight", C, (I,)),)
    table["norm"] = (Part("model.norm.weight", C),)
    if not config.tie_word_embeddings:
        table["head.weight"] = (Part(HEAD, config.vocab_size, (C,)),)
    return table


def plain(name: str) -> str:
    """The plain name of a tensor as peft calls it; an adapter's factors become `<module>.lora_A.weight` and `_B`.

    ValueError: a kind of adapter that cannot be merged as W + B A (embeddings, biases, DoRA, modules_to_save).
    """
    bare = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    match = ADAPTER.fullmatch(bare)
    if match:
        return f"{match['module']}.lora_{match['factor']}.weight"
    if UNKNOWN.search(bare):
        raise ValueError(f"tensor {name!r} is not a LoRA factor of a linear layer: it cannot be merged")
    return bare


def merge_lora(named: Iterable[tuple[str, Tensor]], *, alpha: float, rank: int) -> Iterator[tuple[str, Tensor]]:
    """(plain name, tensor) of a peft model with its LoRA adapter merged: W + (alpha / rank) * B @ A in float32.

    W: (out, in), A: (rank, in), B: (out, rank). What has no adapter is passed on as it is. A weight is held back
    only until both of its factors have come.

    ValueError, naming the tensor: a factor without the other or without its base layer, a base layer without
    factors, a wrong shape, a second adapter for a layer.
    """
    parts: dict[str, dict[str, tuple[str, Tensor]]] = {}  # by module: W, A and B with the names they came under
    merged: set[str] = set()
    for name, tensor in named:
        target = plain(name)
        module, factor = _factor(target)
        if factor is None and ".base_layer." in name and target.endswith(".weight"):
            module, factor = target.removesuffix(".weight"), "W"
        if factor is None:
            yield target, tensor
            continue
        found = parts.setdefault(module, {})
        if factor in found or module in merged:
            raise ValueError(f"tensor {name!r} is the second of its kind: one adapter can be merged")
        found[factor] = name, tensor
        if len(found) == 3:
            yield f"{module}.weight", _merged(found["W"], found["A"], found["B"], alpha, rank)
            del parts[module]
            merged.add(module)
    for found in parts.values():
        lacking = {"W": "base layer", "A": "lora_A", "B": "lora_B"}
        missing = " and ".join(word for key, word in lacking.items() if key not in found)
        raise ValueError(f"tensor {next(iter(found.values()))[0]!r} came without its {missing}")


def adapters(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The LoRA factors alone, under `<plain module>.lora_A.weight` and `.lora_B.weight`.

    ValueError, naming the tensor: a factor without the other, or a second adapter for a layer.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in named:
        target = plain(name)
        if _factor(target)[1] is None:
            continue
        if target in found:
            raise ValueError(f"tensor {name!r} is the second {target!r}: one adapter can be sent")
        found[target] = tensor
    _pairs(found)
    return found


def apply_adapters(
    base: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], alpha: float, rank: int
) -> Iterator[tuple[str, Tensor]]:
    """Plain weights with the factors that `adapters` returned merged into them, as `merge_lora` does it.

    ValueError, naming the tensor: a factor without the other or without its base weight, a wrong shape.
    """
    pairs = _pairs(adapters)
    for name, tensor in base:
        pair = pairs.pop(name.removesuffix(".weight"), None) if name.endswith(".weight") else None
        if pair is None:
            yield name, tensor
        else:
            a, b = ((label, adapters[label]) for label in pair)
            yield name, _merged((name, tensor), a, b, alpha, rank)
    for label, _ in pairs.values():
        raise ValueError(f"tensor {label!r} has no base weight")


def has_adapters(names: Iterable[str]) -> bool:
    """Whether there is a LoRA factor among tensors of these names."""
    return any(_factor(name)[1] is not None for name in names)


def apply_folded(base: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """`apply_adapters` of factors that have their scaling in B: W + B A, of whatever rank they all have.

    ValueError: as there.
    """
    rank = next((len(tensor) for name, tensor in adapters.items() if _factor(name)[1] == "A"), 1)
    return apply_adapters(base, adapters, alpha=rank, rank=rank)


def _factor(target: str) -> tuple[str, str | None]:
    match = ADAPTER.fullmatch(target)
    return (match["module"], match["factor"]) if match else (target, None)


def _pairs(factors: Mapping[str, Tensor]) -> dict[str, tuple[str, str]]:
    """By module, the names of A and B."""
    pairs: dict[str, tuple[str, str]] = {}
    for name in factors:
        module, factor = _factor(name)
        if factor is None:
            raise ValueError(f"tensor {name!r} is not a LoRA factor")
        pair = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
        other = pair[factor == "A"]
        if other not in factors:
            raise ValueError(f"tensor {name!r} came without {other!r}")
        pairs[module] = pair
    return pairs


def _merged(base: tuple[str, Tensor], a: tuple[str, Tensor], b: tuple[str, Tensor], alpha: float, rank: int) -> Tensor:
    if base[1].dim() != 2:
        raise ValueError(f"tensor {base[0]!r} has shape {tuple(base[1].shape)}: an adapter needs a matrix")
    rows, columns = base[1].shape
    for (name, tensor), shape in ((a, (rank, columns)), (b, (rows, rank))):
        if tensor.shape != shape:
            raise ValueError(f"tensor {name!r} has shape {tuple(tensor.shape)}, its base and rank ask for {shape}")
    return base[1].detach().float().addmm(b[1].detach().float(), a[1].detach().float(), alpha=alpha / rank)
