"""Weights of an engine: read from a checkpoint, fused for decoding (q, k, v and gate, up), handed over to vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..models.architecture import FAMILIES, LAYER_WINDOWS, MLP_BIASES, check_config, rotary_parameters, sparse_layers
from ..models.files import read_json
from ..models.read_once import model_config
from ..models.weight_layouts import EMBEDDING, HEAD, Part, follows, head_size, layout, split_experts
from ..types import UNKNOWN_EXPERT
from .experts import Experts
from .linear import Linear, pack

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
ACTIVATIONS = {"gemma3_text": "gelu_pytorch_tanh"}  # of the others: silu
NORMS = ("input_norm", "attended_norm", "mlp_norm", "fed_norm", "qk_norm")
ALIGNMENT = 64  # bytes

Place = tuple[str, tuple[int, ...], int]  # name, shape, first byte


def load_config(folder: Path) -> Any:
    """The transformers config of a checkpoint folder, for the embedded engine.

    Raises:
        FileNotFoundError: no such folder, or no config.json in it.
        ValueError: a model with an unsupported feature.
    """
    config = read_config(folder)
    check_head(folder, config)
    family = config.model_type
    act = config.hidden_activation if family == "gemma3_text" else config.hidden_act
    types = set(config.layer_types) if family in LAYER_WINDOWS else set[str]()
    ropes = rotary_parameters(config).values()
    rope_types = {rope.get("rope_type", "default") for rope in ropes} - set(ROPE_TYPES)
    scaled = [rope for rope in ropes if rope.get("rope_type", "default") != "default"]
    partial = family != "phi3" and any(rope.get("partial_rotary_factor", 1.0) != 1.0 for rope in scaled)
    experts = config.num_experts if sparse_layers(config) else 0
    for fits, what in (
        (types <= {"full_attention", "sliding_attention"}, f"layer_types {sorted(types)}"),
        (act == ACTIVATIONS.get(family, "silu"), f"hidden_act {act!r}"),
        (not (family in MLP_BIASES and config.mlp_bias), "mlp_bias"),
        (not rope_types, f"rope_type {next(iter(rope_types), None)!r}"),
        (not partial, "a partial rotary embedding"),
        (not (family == "olmoe" and config.clip_qkv is not None), "clip_qkv"),
        (experts <= UNKNOWN_EXPERT, f"{experts} experts"),
    ):
        if not fits:
            raise ValueError(f"{folder}: the embedded engine does not support {what}")
    return config


def read_config(folder: Path) -> Any:
    """The transformers config of a checkpoint folder.

    Raises:
        FileNotFoundError: no such folder, or no config.json in it.
        ValueError: a family that is not in `FAMILIES`, or a value that `check_config` rejects.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no model folder at {folder}")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no config.json in {folder}")
    model_type = read_json(folder / "config.json").get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported, but {', '.join(FAMILIES)}")
    config = model_config(folder)
    check_config(config)
    return config


def check_head(folder: Path, config: Any) -> None:
    """ValueError: embeddings and head are one by the config, and two in the checkpoint: transformers takes both, an
    engine the embeddings alone."""
    if not config.tie_word_embeddings:
        return
    from safetensors import safe_open

    places: dict[str, Path] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            places |= dict.fromkeys({EMBEDDING, HEAD} & {*tensors.keys()}, file)
    if len(places) < 2:
        return
    weights = []
    for name, file in places.items():
        with safe_open(file, framework="pt") as tensors:
            weights.append(tensors.get_tensor(name))
    if not torch.equal(*weights):
        raise ValueError(
            f"{folder}: {HEAD} is not {EMBEDDING}, though tie_word_embeddings is true: set it to false in config.json"
        )


def load_eos(folder: Path, config: Any) -> tuple[int, ...]:
    """The end-of-sequence ids of generation_config.json, or else of the model config."""
    path = folder / "generation_config.json"
    eos = read_json(path).get("eos_token_id") if path.is_file() else None
    eos = config.eos_token_id if eos is None else eos
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def read_checkpoint(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight in a folder of safetensors.

    Raises:
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


@dataclass(slots=True)
class FeedForward:
    """C: hidden size, I: intermediate size."""

    gate_up: Linear  # C -> 2I
    down: Linear  # I -> C


@dataclass(slots=True)
class Layer:
    """One transformer block. C: hidden size, H: heads, K: key-value heads, D: head size.

    Norms of the inputs of attention and feed-forward, and of their outputs, are None where a family has none there.
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
        config: Any,
        named: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        device: torch.device,
        version: int = 0,
        identity: str = "",
    ):
        """Fill from tensors under Hugging Face names.

        Raises:
            ValueError: an unknown, duplicate or missing name, or a wrong shape; names the tensor.
        """
        self.version, self.identity = version, identity
        table, tied = layout(config), config.tie_word_embeddings
        shifted = config.model_type == "gemma3_text"  # its norms multiply by 1 + weight
        filling: dict[str, Tensor] = {}
        left = {whole: len(parts) for whole, parts in table.items()}
        done: dict[str, Tensor] = {}
        with torch.no_grad():
            for whole, i, tensor in checked(table, named, tied):
                parts = table[whole]
                if whole not in filling:
                    rows = sum(part.rows for part in parts)
                    filling[whole] = torch.empty(rows, *parts[0].inner, dtype=dtype, device=device)
                first = sum(part.rows for part in parts[:i])
                if shifted and whole.endswith("norm"):
                    tensor = tensor.float() + 1
                filling[whole][first : first + parts[i].rows] = tensor
                left[whole] -= 1
                if not left[whole]:
                    # Packed immediately, so that the next tensor reuses the plain copy's memory: allocating fresh
                    # memory would cost more than all the copying.
                    full = filling.pop(whole)
                    if ".qkv." in whole:
                        full = by_group(full.unflatten(0, (-1, head_size(config))), config).flatten(0, 2)
                    elif whole.endswith("qk_norm") and full.dim() > 1:
                        full = by_group(full, config)
                    done[whole] = pack(full) if whole.endswith(".weight") else full

        def linear(name: str) -> Linear:
            return Linear(done[f"{name}.weight"], done.get(f"{name}.bias"))

        def feed_forward(at: str) -> FeedForward | Experts:
            if f"{at}.router.weight" not in done:
                return FeedForward(linear(f"{at}.gate_up"), linear(f"{at}.down"))
            by_expert = (done.pop(f"{at}.experts.{name}").chunk(config.num_experts) for name in ("gate_up", "down"))
            gate_up, down = ([Linear(pack(weight)) for weight in weights] for weights in by_expert)
            k, normalised = config.num_experts_per_tok, config.norm_topk_prob
            return Experts(linear(f"{at}.router"), gate_up, down, k, normalised)

        self.embed, self.norm = done["embed"], done["norm"]
        self.head = Linear(pack(self.embed)) if tied else linear("head")
        self.layers = [
            Layer(
                qkv=linear(f"{at}.qkv"),
                output=linear(f"{at}.output"),
                feed_forward=feed_forward(at),
                **{name: done.get(f"{at}.{name}") for name in NORMS},
            )
            for at in (f"layers.{i}" for i in range(config.num_hidden_layers))
        ]


def by_group(heads: Tensor, config: Any) -> Tensor:
    """Heads (H + K, ...) or (H + 2K, ...), queries first, then keys and values, as (K, H / K + 1 or 2, ...): those of a
    group are adjacent, so that decoding needs no copy of them."""
    H, K = config.num_attention_heads, config.num_key_value_heads
    queries, others = heads[:H].unflatten(0, (K, -1)), heads[H:].unflatten(0, (-1, K)).transpose(0, 1)
    return torch.cat([queries, others], 1)


def checked(
    table: dict[str, tuple[Part, ...]], named: Iterable[tuple[str, Tensor]], tied: bool
) -> Iterator[tuple[str, int, Tensor]]:
    """(entry of `table`, index of its part, tensor) for every tensor that the engine needs, in the given order.

    Raises:
        ValueError: an unknown or duplicate name, a wrong shape or, after the last tensor, a missing one.
    """
    places = {part.name: (whole, i) for whole, parts in table.items() for i, part in enumerate(parts)}
    for name, tensor in split_experts(named):
        if follows(name, tied):
            continue
        if name not in places:
            raise ValueError(f"weight {name!r} is unknown to this model, or given twice")
        whole, i = places.pop(name)
        if tensor.shape != table[whole][i].shape:
            raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}, the model has {table[whole][i].shape}")
        yield whole, i, tensor
    if places:
        first_missing, more = next(iter(places)), len(places) - 1
        raise ValueError(f"weight {first_missing!r} is missing" + (f", and {more} more" if more else ""))


class Handover:
    """A policy's weights for another process of this host: all tensors, checked and in one dtype, in shared memory.

    The memory is a memfd, reached through the writing process and freed with it. `path`, `places` and `dtype` are the
    arguments of `read_handover`.
    """

    def __init__(
        self, config: Any, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype, version: int, identity: str
    ):
        """Copy tensors under Hugging Face names.

        Raises:
            ValueError: an unknown, duplicate or missing name, or a wrong shape; names the tensor.
            OSError: there is not enough memory.
        """
        self.version, self.identity, self.dtype = version, identity, str(dtype).removeprefix("torch.")
        table = layout(config)
        self.places: list[Place] = []
        total = 0
        for part in (part for parts in table.values() for part in parts):
            self.places.append((part.name, part.shape, total))
            size = torch.Size(part.shape).numel() * dtype.itemsize
            total += -(-size // ALIGNMENT) * ALIGNMENT
        self._file = os.memfd_create("forge-weights")
        try:
            os.posix_fallocate(self._file, 0, total)
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
            there = {name: tensor for name, tensor in read_handover(self.path, self.places, self.dtype, shared=True)}
            with torch.no_grad():
                for whole, i, tensor in checked(table, named, config.tie_word_embeddings):
                    there[table[whole][i].name].copy_(tensor)
        except BaseException:
            self.close()
            raise
        if config.tie_word_embeddings:
            # vLLM loads a tied head only under its own name, and is silently wrong without it.
            self.places += [(HEAD, shape, start) for name, shape, start in self.places if name == EMBEDDING]

    def close(self) -> None:
        """Free the memory, as soon as no process reads it."""
        os.close(self._file)


def read_handover(path: str, places: list[Place], dtype: str, shared: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything in a handover, as views of its memory; unless `shared`, writes stay private."""
    memory = torch.UntypedStorage.from_file(path, shared, os.stat(path).st_size)
    kind: torch.dtype = getattr(torch, dtype)
    whole = torch.empty(0, dtype=kind).set_(memory)  # type: ignore[arg-type]
    for name, shape, start in places:
        first = start // kind.itemsize
        yield name, whole[first : first + torch.Size(shape).numel()].view(shape)
