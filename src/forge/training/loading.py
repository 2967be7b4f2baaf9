"""A model that is built without memory, sharded, and then filled: each rank reads only its part of each tensor."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..models.files import read_json
from ..models.weight_layouts import split_experts
from ..system.boxes import Box, full_box, local_boxes

MAPPED = 1 << 28  # bytes of tensors read before a file is closed: the pages of a mapped file count as this process's

Read = tuple[str, Box, tuple[int, ...], Tensor]  # name, block, shape of the whole tensor, where the block goes


def on_meta(
    kind: Any, path: str | Path, dtype: torch.dtype, *, new: Collection[str] = (), **settings: Any
) -> tuple[PreTrainedModel, set[str]] | None:
    """A model whose parameters are on the meta device, for `fill`, but buffers are real; and which weights of `new` the
    folder lacks, which are real and without values.

    None: transformers has to load it. The folder is not local or has no safetensors files, or lacks other weights, as
    it does if transformers renames or converts them, or they are quantised or adapters.

    Args:
        kind: a class of transformers such as AutoModelForCausalLM.
        settings: of the configuration.
    """
    folder = Path(path)
    if not folder.is_dir() or (folder / "adapter_config.json").exists():
        return None
    # Weights that transformers converts have other names or values than the files.
    config = AutoConfig.from_pretrained(path, **settings, trust_remote_code=False)
    if any(getattr(config, name, None) for name in ("quantization_config", "transformers_weights")):
        return None
    with torch.device("meta"):
        model = kind.from_config(config, dtype=dtype, attn_implementation="eager", trust_remote_code=False)
    files = files_of(folder)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = {name for name, _ in split_experts(model.named_parameters())} - files.keys()
    if missing - set(new) or model.state_dict().keys() - parameters.keys():
        return None
    for name in missing:
        module, _, key = name.rpartition(".")
        setattr(model.get_submodule(module), key, nn.Parameter(torch.empty_like(parameters[name], device="cpu")))
    # Buffers are computed, not read.
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()  # of the buffers; on the meta device it does nothing
    model.config.name_or_path = str(path)
    if model.can_generate() and (folder / GENERATION_CONFIG_NAME).exists():
        model.generation_config = GenerationConfig.from_dict(read_json(folder / GENERATION_CONFIG_NAME))
    return model, missing


@torch.no_grad()
def fill(model: PreTrainedModel, path: str | Path, device: torch.device) -> None:
    """Allocate the parameters of a sharded model that are on the meta device, and read this rank's part of them.

    Raises:
        ValueError: as `read_weights`.
    """
    empty = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    if not empty:
        return
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    read_weights({name: tensor for name, tensor in model.named_parameters() if name in empty}, Path(path))


@torch.no_grad()
def read_weights(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Read this rank's part of tensors, by their names in transformers' models, from a folder's safetensors files.

    Raises:
        ValueError: the files lack a tensor, or it has another shape; names it.
    """
    files = files_of(folder)
    # Which part of which file each tensor needs, file by file.
    reads: dict[Path, list[Read]] = {}
    for name, tensor in tensors.items():
        for read in _parts(name, tensor.detach()):
            if read[0] not in files:
                raise ValueError(f"{folder} has no safetensors file with tensor {read[0]!r}")
            reads.setdefault(files[read[0]], []).append(read)
    for file, of_file in reads.items():
        for some in _batches(of_file):
            with safe_open(file, framework="pt") as opened:
                for name, box, shape, values in some:
                    stored = opened.get_slice(name)
                    if tuple(stored.get_shape()) != shape:
                        raise ValueError(
                            f"{file}: tensor {name!r} has shape {tuple(stored.get_shape())}, the model has {shape}"
                        )
                    values.copy_(stored[box.within(full_box(shape))])


def files_of(folder: Path) -> dict[str, Path]:
    """The safetensors file of each tensor of a model folder, by name; empty if there is none. Of several sets the one
    that transformers reads."""
    if (single := folder / SAFE_WEIGHTS_NAME).is_file():
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    if (index := folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    return {}


def _parts(name: str, parameter: Tensor) -> Iterator[Read]:
    """This rank's part of a parameter, under the names of the files; experts are stacked along their first dimension,
    the only one in which they are sharded."""
    for box, values in local_boxes(parameter):
        for plain, part in split_experts([(name, values)], first=box.offset[0]):
            if plain == name:
                yield plain, box, tuple(parameter.shape), part
            else:
                yield plain, full_box(part.shape), tuple(part.shape), part


def _batches(reads: Iterable[Read]) -> Iterator[list[Read]]:
    some: list[Read] = []
    size = 0
    for read in reads:
        some.append(read)
        size += torch.Size(read[2]).numel() * read[3].itemsize
        if size >= MAPPED:
            yield some
            some, size = [], 0
    yield some
