"""Weights of an engine: read from a checkpoint, fused for decoding (q, k, v and gate, up), handed over to vLLM."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from ..config.plugin import resolve
from ..models.architecture import LAYER_WINDOWS, MLP_BIASES, check_config, is_native, rotary_parameters, sparse_layers
from ..models.files import read_json
from ..models.tokenizer import model_config
from ..models.weight_layouts import EMBEDDING, HEAD, FusedPart, engine_layout, head_size, is_derived, split_experts
from ..types import UNKNOWN_EXPERT
from .experts import Experts
from .linear import Linear

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
ACTIVATIONS = {"gemma3_text": "gelu_pytorch_tanh"}  # of other families: silu
NORMS = ("input_norm", "attended_norm", "mlp_norm", "fed_norm", "qk_norm")


def load_config(folder: Path) -> PreTrainedConfig:
    """Return the transformers config of a checkpoint folder, checked for the embedded engine.

    Raises:
        FileNotFoundError: no such folder, or no config.json in it.
        ValueError: a model with an unsupported feature.
    """
    config = read_config(folder)
    check_head(folder, config)
    if not is_decodable(config):
        resolve("forge_families.engine:find_tier", "model")(config)
    return config


def is_decodable(config: PreTrainedConfig) -> bool:
    """Return whether the engine computes a model of this config by its own decoder, not by transformers' modules."""
    family = config.model_type
    return is_native(config) and not (
        (family in LAYER_WINDOWS and {*config.layer_types} - {"full_attention", "sliding_attention"})
        or (config.hidden_activation if family == "gemma3_text" else config.hidden_act)
        != ACTIVATIONS.get(family, "silu")
        or (family in MLP_BIASES and config.mlp_bias)
        or any(
            rope.get("rope_type", "default") not in ROPE_TYPES
            or (
                family != "phi3"
                and rope.get("rope_type", "default") != "default"
                and rope.get("partial_rotary_factor", 1.0) != 1.0
            )
            for rope in rotary_parameters(config).values()
        )
        or (family == "olmoe" and config.clip_qkv is not None)
        or (sparse_layers(config) and config.num_experts > UNKNOWN_EXPERT)
    )


def read_config(folder: Path) -> PreTrainedConfig:
    """Return the transformers config of a checkpoint folder.

    Raises:
        FileNotFoundError: no such folder, or no config.json in it.
        ValueError: a value that `check_config` rejects.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"model directory {folder} does not exist")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is not a model directory: it has no config.json")
    config = model_config(folder)
    check_config(config)
    return config


def check_head(folder: Path, config: PreTrainedConfig) -> None:
    """Check that a checkpoint whose config ties embeddings and head has no head that differs.

    Transformers would load both, an engine the embeddings only.

    Raises:
        ValueError: the head differs from the embeddings.
    """
    if not config.tie_word_embeddings:
        return

    files: dict[str, Path] = {}  # by name of the weight
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            files |= dict.fromkeys({EMBEDDING, HEAD} & {*tensors.keys()}, file)
    if len(files) < 2:
        return

    weights = []
    for name, file in files.items():
        with safe_open(file, framework="pt") as tensors:
            weights.append(tensors.get_tensor(name))

    if not torch.equal(*weights):
        raise ValueError(
            f"{folder}: {HEAD} differs from {EMBEDDING}, although tie_word_embeddings is true: set it to false in "
            "config.json"
        )


def load_eos(folder: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the end-of-sequence token ids of generation_config.json, or else of the model config; () if neither has
    any."""
    path = folder / "generation_config.json"
    eos = read_json(path).get("eos_token_id") if path.is_file() else None
    if eos is None:
        eos = [] if config.eos_token_id is None else config.eos_token_id
    return (eos,) if isinstance(eos, int) else tuple(eos)


def read_checkpoint(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) of every weight in a folder of safetensors files.

    Raises:
        FileNotFoundError: no safetensors file in the folder, or a shard that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))

    if not files:
        raise FileNotFoundError(f"model directory {folder} has no weights (*.safetensors)")

    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{index.name} names {file.name}, which is not in {folder}")
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a safe_open handle cannot be iterated)
                yield name, tensors.get_tensor(name)


@dataclass(slots=True)
class FeedForward:
    """Weights of the gated feed-forward of a layer. C: hidden size, I: intermediate size."""

    gate_up: Linear  # C -> 2I
    down: Linear  # I -> C


@dataclass(slots=True)
class Layer:
    """Weights of one transformer block. C: hidden size, H: heads, K: key-value heads, D: head size.

    A norm is None in families without it: `input_norm` and `mlp_norm` are of the inputs of attention and feed-forward,
    `attended_norm` and `fed_norm` of their outputs.
    """

    qkv: Linear  # C -> (H + 2K) * D, in the order of `by_group`
    output: Linear  # H * D -> C
    feed_forward: FeedForward | Experts
    input_norm: Tensor | None  # (C,)
    attended_norm: Tensor | None  # (C,)
    mlp_norm: Tensor | None  # (C,)
    fed_norm: Tensor | None  # (C,)
    # (K, H / K + 1, D): the norm of each head, in the order of `by_group`. ((H + K) * D,): the q norm of all heads
    # together, then the k norm.
    qk_norm: Tensor | None


class Weights:
    """All weights of one policy version, with its number and identity.

    A new version is a new object, filled while the old one still decodes; switching is an assignment.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        named_tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        device: torch.device,
        version: int = 0,
        identity: str = "",
    ):
        """Read all weights, convert them to `dtype` on `device`, and fuse and pack them for decoding.

        Args:
            named_tensors: (name, tensor) of every weight, by Hugging Face name, in any order.
            identity: the publisher's digest of the weights; "" for a folder's.

        Raises:
            ValueError: an unknown, duplicate or missing name, or a wrong shape; the message names the tensor.
        """
        self.version, self.identity = version, identity
        table = engine_layout(config)
        tied = config.tie_word_embeddings
        is_shifted = config.model_type == "gemma3_text"  # its norms multiply by 1 + weight

        # Fused tensors, by name: partly arrived ones, and the number of missing parts.
        partial: dict[str, Tensor] = {}
        missing = {name: len(parts) for name, parts in table.items()}
        complete: dict[str, Tensor] = {}
        matrices: dict[str, Linear] = {}

        with torch.no_grad():
            for name, i, tensor in checked_parts(table, split_experts(named_tensors), tied):
                parts = table[name]
                if name not in partial:
                    rows = sum(part.rows for part in parts)
                    partial[name] = torch.empty(rows, *parts[0].inner, dtype=dtype, device=device)
                first_row = sum(part.rows for part in parts[:i])
                if is_shifted and name.endswith("norm"):
                    tensor = tensor.float() + 1
                partial[name][first_row : first_row + parts[i].rows] = tensor
                missing[name] -= 1

                if not missing[name]:
                    # Packed immediately, so that the next tensor reuses the plain copy's memory: allocating fresh
                    # memory would cost more than all the copying.
                    fused = partial.pop(name)
                    if ".qkv." in name:
                        fused = by_group(fused.unflatten(0, (-1, head_size(config))), config).flatten(0, 2)
                    elif name.endswith("qk_norm") and fused.dim() > 1:
                        fused = by_group(fused, config)

                    if name.endswith(".weight"):
                        matrices[name.removesuffix(".weight")] = Linear.from_weight(fused)
                    elif ".experts." in name:
                        # All experts arrive as one tensor; each becomes a product, as each has its own tokens.
                        for expert, weight in enumerate(fused.chunk(config.num_experts)):
                            matrices[f"{name}.{expert}"] = Linear.from_weight(weight)
                    else:
                        complete[name] = fused

        def read_linear(name: str) -> Linear:
            matrix = matrices[name]
            matrix.bias = complete.get(f"{name}.bias")
            return matrix

        def read_experts(name: str) -> list[Linear]:
            return [matrices[f"{name}.{expert}"] for expert in range(config.num_experts)]

        def read_feed_forward(layer: str) -> FeedForward | Experts:
            if f"{layer}.router" not in matrices:
                return FeedForward(read_linear(f"{layer}.gate_up"), read_linear(f"{layer}.down"))
            return Experts(
                router=read_linear(f"{layer}.router"),
                gate_up=read_experts(f"{layer}.experts.gate_up"),
                down=read_experts(f"{layer}.experts.down"),
                k=config.num_experts_per_tok,
                normalised=config.norm_topk_prob,
            )

        self.embed = complete["embed"]
        self.norm = complete["norm"]
        self.head = Linear.from_weight(self.embed) if tied else read_linear("head")
        self.layers = [
            Layer(
                qkv=read_linear(f"{layer}.qkv"),
                output=read_linear(f"{layer}.output"),
                feed_forward=read_feed_forward(layer),
                **{name: complete.get(f"{layer}.{name}") for name in NORMS},
            )
            for layer in (f"layers.{i}" for i in range(config.num_hidden_layers))
        ]


def by_group(heads: Tensor, config: PreTrainedConfig) -> Tensor:
    """Regroup a tensor of heads by key-value head: each of the K groups has the H / K query heads that share it.

    This makes the heads of a group adjacent, so that decoding needs no copy of them.

    Args:
        heads: (H + K, ...), all queries, then all keys, or (H + 2K, ...), then all values, too.

    Returns:
        (K, H / K + 1, ...) or (K, H / K + 2, ...): a group's queries, then its key, then its value.
    """
    H, K = config.num_attention_heads, config.num_key_value_heads
    queries = heads[:H].unflatten(0, (K, -1))
    keys_values = heads[H:].unflatten(0, (-1, K)).transpose(0, 1)
    return torch.cat([queries, keys_values], 1)


def checked_parts(
    table: dict[str, tuple[FusedPart, ...]], named_tensors: Iterable[tuple[str, Tensor]], tied: bool
) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (name of an entry of `table`, index of its part, tensor) for every tensor that an engine needs.

    They come in the given order. Tensors that follow from others are left out.

    Args:
        table: the result of `engine_layout`.
        tied: whether the head is the embeddings.

    Raises:
        ValueError: a name is unknown or duplicate, a shape is wrong or, after the last tensor, one is missing.
    """
    missing = {
        part.name: (entry, part_index) for entry, parts in table.items() for part_index, part in enumerate(parts)
    }
    for name, tensor in named_tensors:
        if is_derived(name, tied):
            continue
        if name not in missing:
            raise ValueError(f"weight {name!r} is not a weight of this model, or was given twice")

        entry, part_index = missing.pop(name)
        if tensor.shape != table[entry][part_index].shape:
            raise ValueError(
                f"weight {name!r} has shape {tuple(tensor.shape)}, the model has {table[entry][part_index].shape}"
            )
        yield entry, part_index, tensor

    if missing:
        other_count = len(missing) - 1
        others = f", and {other_count} more" if other_count else ""
        raise ValueError(f"weight {next(iter(missing))!r} is missing{others}")
