"""Names and layouts of the same weights: in a Hugging Face checkpoint, in peft's LoRA models, and fused in the engine.

Plain names are a Hugging Face checkpoint's. All functions are pure; tensors stay on their device.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .architecture import BIASES, sparse_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"  # where embeddings are tied, another name for EMBEDDING

ADAPTER = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(\.(?P<adapter>[^.]+))?\.weight")
# Transformers' names of a layer's norms by the engine's: of inputs of attention and feed-forward, and of their outputs.
PRE_NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
NORMS = {
    "olmo2": {"attended_norm": "post_attention_layernorm", "fed_norm": "post_feedforward_layernorm"},
    "gemma3_text": {
        "input_norm": "input_layernorm",
        "attended_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "fed_norm": "post_feedforward_layernorm",
    },
}
STACKED = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<matrix>gate_up_proj|down_proj)")
UNKNOWN = re.compile(r"(^|\.)(lora_|modules_to_save\.|original_module\.)")


class FusedPart(NamedTuple):
    """A plain tensor that fills some rows of a fused tensor."""

    name: str
    rows: int
    inner: tuple[int, ...] = ()  # the shape of one row
    repeated: bool = False  # the plain tensor is one row, which fills all of them

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the plain (unfused) tensor."""
        return self.inner if self.repeated else (self.rows, *self.inner)


def head_size(config: "PreTrainedConfig") -> int:
    """Return the size of one attention head of a transformers config."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def is_derived(name: str, tied: bool) -> bool:
    """Return whether a plain tensor follows from others, so that an engine does not need it: rotary frequencies, or the
    head of a model with tied embeddings.

    >>> is_derived("lm_head.weight", tied=True)
    True
    """
    return name.endswith("rotary_emb.inv_freq") or (tied and name == HEAD)


def engine_layout(config: "PreTrainedConfig") -> dict[str, tuple[FusedPart, ...]]:
    """Return the plain tensors that are fused into each parameter of an engine, in the order of rows, by its name.

    The names of matrices and their biases end in `.weight` and `.bias`, of norms in `norm`. With tied embeddings there
    is not a head. The config is one of `forge.models.FAMILIES`.
    """
    C, D = config.hidden_size, head_size(config)
    H, K = config.num_attention_heads, config.num_key_value_heads
    family = config.model_type
    has_bias = family == "qwen2" or (family in BIASES and getattr(config, "attention_bias", False))
    table: dict[str, tuple[FusedPart, ...]] = {"embed": (FusedPart(EMBEDDING, config.vocab_size, (C,)),)}

    for i in range(config.num_hidden_layers):
        engine = f"layers.{i}."
        checkpoint = f"model.layers.{i}."
        attn = checkpoint + "self_attn."
        mlp = checkpoint + "mlp."

        # Phi-3's checkpoints have q, k and v fused already, in this order.
        projections = [("q_proj", H * D), ("k_proj", K * D), ("v_proj", K * D)]
        if family == "phi3":
            projections = [("qkv_proj", (H + 2 * K) * D)]

        for norm, name in NORMS.get(family, PRE_NORMS).items():
            table[engine + norm] = (FusedPart(f"{checkpoint}{name}.weight", C),)
        table[engine + "qkv.weight"] = tuple(FusedPart(f"{attn}{x}.weight", rows, (C,)) for x, rows in projections)
        table[engine + "output.weight"] = (FusedPart(attn + "o_proj.weight", C, (H * D,)),)

        # Qwen2 has biases of q, k and v only.
        if has_bias:
            table[engine + "qkv.bias"] = tuple(FusedPart(f"{attn}{x}.bias", rows) for x, rows in projections)
            if family != "qwen2":
                table[engine + "output.bias"] = (FusedPart(attn + "o_proj.bias", C),)

        norms = (("q_norm", H), ("k_norm", K))
        if family in ("qwen3", "qwen3_moe", "gemma3_text"):  # of each head
            table[engine + "qk_norm"] = tuple(FusedPart(f"{attn}{x}.weight", rows, (D,), True) for x, rows in norms)
        elif family in ("olmo2", "olmoe"):  # of all heads together
            table[engine + "qk_norm"] = tuple(FusedPart(f"{attn}{x}.weight", rows * D) for x, rows in norms)

        table |= (
            _expert_layout(engine, mlp, config) if i in sparse_layers(config) else _dense_layout(engine, mlp, config)
        )

    table["norm"] = (FusedPart("model.norm.weight", C),)
    if not config.tie_word_embeddings:
        table["head.weight"] = (FusedPart(HEAD, config.vocab_size, (C,)),)
    return table


def _dense_layout(engine: str, mlp: str, config: "PreTrainedConfig") -> dict[str, tuple[FusedPart, ...]]:
    C, I = config.hidden_size, config.intermediate_size  # noqa: E741
    halves = [("gate_up", 2 * I)] if config.model_type == "phi3" else [("gate", I), ("up", I)]
    return {
        engine + "gate_up.weight": tuple(FusedPart(f"{mlp}{x}_proj.weight", rows, (C,)) for x, rows in halves),
        engine + "down.weight": (FusedPart(mlp + "down_proj.weight", C, (I,)),),
    }


def _expert_layout(engine: str, mlp: str, config: "PreTrainedConfig") -> dict[str, tuple[FusedPart, ...]]:
    """Return the plain tensors of a mixture's parameters, in each of which the experts' matrices follow one another."""
    C, experts = config.hidden_size, range(config.num_experts)
    I = config.moe_intermediate_size if config.model_type == "qwen3_moe" else config.intermediate_size  # noqa: E741

    # Expert by expert, each with gate and up.
    halves = [f"{mlp}experts.{e}.{x}_proj.weight" for e in experts for x in ("gate", "up")]
    return {
        engine + "router.weight": (FusedPart(mlp + "gate.weight", len(experts), (C,)),),
        engine + "experts.gate_up": tuple(FusedPart(name, I, (C,)) for name in halves),
        engine + "experts.down": tuple(FusedPart(f"{mlp}experts.{e}.down_proj.weight", C, (I,)) for e in experts),
    }


def split_experts(named_tensors: Iterable[tuple[str, Tensor]], first: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield (plain name, tensor) for the tensors of a transformers model, which stacks the experts of a layer.

    Each expert comes as separate tensors; other tensors are unchanged.

    Args:
        first: the number of the first expert of a stack.

    >>> import torch
    >>> stacked = {"model.layers.0.mlp.experts.down_proj": torch.zeros(2, 3, 4)}
    >>> [(name, *tensor.shape) for name, tensor in split_experts(stacked.items())]  # doctest: +NORMALIZE_WHITESPACE
    [('model.layers.0.mlp.experts.0.down_proj.weight', 3, 4),
     ('model.layers.0.mlp.experts.1.down_proj.weight', 3, 4)]
    """
    for name, tensor in named_tensors:
        # Gate and up are halves of one matrix in transformers.
        if (match := STACKED.fullmatch(name)) is None:
            yield name, tensor
            continue

        names = ("gate_proj", "up_proj") if match["matrix"] == "gate_up_proj" else ("down_proj",)
        for expert, stacked in enumerate(tensor, first):
            for name, matrix in zip(names, stacked.chunk(len(names)), strict=True):
                yield f"{match['experts']}.{expert}.{name}.weight", matrix


def plain_name(name: str) -> str:
    """Return the plain name of a tensor of a peft model; factors of adapters become `<module>.lora_A.weight` and `_B`.

    >>> plain_name("base_model.model.lm_head.lora_A.default.weight")
    'lm_head.lora_A.weight'

    Raises:
        ValueError: an adapter that cannot be merged as W + B A (embeddings, biases, DoRA, modules_to_save).
    """
    stripped = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    if match := ADAPTER.fullmatch(stripped):
        return f"{match['module']}.lora_{match['factor']}.weight"
    if UNKNOWN.search(stripped):
        raise ValueError(f"tensor {name!r} cannot be merged: only LoRA factors of linear layers can")
    return stripped


def has_adapters(names: Iterable[str]) -> bool:
    """Return whether any of the given tensor names is the name of a LoRA factor.

    >>> has_adapters(["q_proj.lora_A.weight"])
    True
    """
    return any(map(ADAPTER.fullmatch, names))


def read_adapters(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return only the LoRA factors among the given tensors, by `<plain module>.lora_A.weight` and `.lora_B.weight`.

    Raises:
        ValueError: a factor without the other, or a second adapter for a layer; the message names the tensor.
    """
    factors: dict[str, Tensor] = {}
    for name, tensor in named_tensors:
        target = plain_name(name)
        if not ADAPTER.fullmatch(target):
            continue
        if target in factors:
            raise ValueError(f"tensor {name!r} is a second {target!r}: send one adapter only")
        factors[target] = tensor
    _by_module(factors)
    return factors


def merge_adapters(base: Iterable[tuple[str, Tensor]], factors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) of each weight of `base`, with its adapter merged as W + B A in float32.

    A weight without an adapter is unchanged. All adapters have the same rank.

    Args:
        base: plain weights W (out, in), and others.
        factors: A (rank, in) and B (out, rank), which has alpha / rank already, by the names of `read_adapters`.

    Raises:
        ValueError: a factor without the other or without its base weight, or a wrong shape; the message names the
            tensor.
    """
    modules = _by_module(factors)
    rank = next((len(factors[a]) for a, _ in modules.values()), 1)
    for name, weight in base:
        # Each pair of factors is used once: those that are left at the end have no base weight.
        pair = modules.pop(name.removesuffix(".weight"), None) if name.endswith(".weight") else None
        if pair is None:
            yield name, weight
            continue

        if weight.dim() != 2:
            raise ValueError(
                f"tensor {name!r} has shape {tuple(weight.shape)}, but only matrices can have LoRA adapters"
            )
        rows, columns = weight.shape
        for factor, shape in zip(pair, ((rank, columns), (rows, rank)), strict=True):
            if (actual := tuple(factors[factor].shape)) != shape:
                raise ValueError(f"tensor {factor!r} has shape {actual}, but its base weight and rank need {shape}")

        a, b = (factors[factor].detach().float() for factor in pair)
        yield name, weight.detach().float().addmm(b, a)

    for factor, _ in modules.values():
        raise ValueError(f"LoRA tensor {factor!r} has no base weight in this model")


def _by_module(factors: Mapping[str, Tensor]) -> dict[str, tuple[str, str]]:
    """Return the names of the factors A and B of each module, by the module's name."""
    pairs: dict[str, tuple[str, str]] = {}
    for name in factors:
        if (match := ADAPTER.fullmatch(name)) is None:
            raise ValueError(f"tensor {name!r} is not a LoRA factor (MODULE.lora_A.weight or MODULE.lora_B.weight)")
        pair = f"{match['module']}.lora_A.weight", f"{match['module']}.lora_B.weight"
        if (partner := pair[match["factor"] == "A"]) not in factors:
            raise ValueError(f"LoRA tensor {name!r} needs {partner!r}, which is missing")
        pairs[match["module"]] = pair
    return pairs
