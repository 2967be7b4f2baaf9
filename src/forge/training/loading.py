"""A model that is built without memory, sharded, and then filled: each rank reads only its part of each tensor.

Safetensors files are written tensor by tensor: the package's own functions need all tensors of a file at once.
"""

import json
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..models.files import read_json
from ..models.weight_layouts import split_experts
from ..system.boxes import local_boxes

# One process has no process group.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


def build_on_meta(
    kind: Any, path: str | Path, dtype: torch.dtype, *, new: Collection[str] = (), **settings: Any
) -> tuple[PreTrainedModel, set[str]] | None:
    """Return a model whose parameters have no memory yet (meta device), and the names of `new` that the folder misses.

    `fill_model` reads the parameters; buffers have their values. Those of `new` that the folder misses have memory, and
    the caller sets their values.

    Returns None where only transformers can load the model: the folder is not local or has no safetensors files, or
    misses other weights, as it does if transformers renames or converts them, or they are quantised or adapters.

    Args:
        kind: a class of transformers such as AutoModelForCausalLM.
        new: names of weights that the folder need not have.
        settings: of the configuration.
    """
    folder = Path(path)
    if not folder.is_dir() or (folder / "adapter_config.json").exists():
        return None

    # If transformers converts weights, they have other names or values than the files.
    config = AutoConfig.from_pretrained(path, **settings, trust_remote_code=False)
    if any(getattr(config, name, None) for name in ("quantization_config", "transformers_weights")):
        return None

    with torch.device("meta"):
        model = kind.from_config(config, dtype=dtype, attn_implementation="eager", trust_remote_code=False)
    files = files_of(folder)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing_names = {name for name, _ in split_experts(model.named_parameters())} - files.keys()

    if missing_names - set(new) or model.state_dict().keys() - parameters.keys():
        return None

    for name in missing_names:
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, nn.Parameter(torch.empty_like(parameters[name], device="cpu")))

    # Buffers are computed, not read.
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device="cpu")

    model.initialize_weights()  # sets the buffers; parameters on the meta device stay as they are
    model.config.name_or_path = str(path)
    if model.can_generate() and (folder / GENERATION_CONFIG_NAME).exists():
        model.generation_config = GenerationConfig.from_dict(read_json(folder / GENERATION_CONFIG_NAME))

    return model, missing_names


@torch.no_grad()
def fill_model(model: PreTrainedModel, path: str | Path, device: torch.device) -> None:
    """Allocate the parameters of a sharded model that are on the meta device, and read this rank's part of them from
    the folder `path`.

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
    """Read this rank's part of tensors, in place, from the safetensors files of a folder.

    Args:
        tensors: by name in transformers' models; DTensors if sharded.

    Raises:
        ValueError: the files have no such tensor, or it has another shape; the message names it.
    """
    # Files have each expert by itself, models a stack of them, which is sharded along its first dimension only.
    tensor_parts: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        experts: dict[str, Tensor] = {}
        for box, values in local_boxes(tensor.detach()):
            experts |= split_experts([(name, values)], first=box.offset[0])
        is_split = not experts.keys() <= {name}
        tensor_parts |= experts if is_split else {name: tensor.detach()}

    reader = HuggingFaceStorageReader(str(folder))
    stored_metadata: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    for name, tensor in tensor_parts.items():
        if name not in stored_metadata:
            raise ValueError(f"{folder} has no tensor {name!r} in its safetensors files")
        if tuple(stored_metadata[name].size) != tuple(tensor.shape):
            shapes = f"{tuple(stored_metadata[name].size)}, but the model needs {tuple(tensor.shape)}"
            raise ValueError(f"{folder}: tensor {name!r} has shape {shapes}")

    dcp.load(tensor_parts, storage_reader=reader, no_dist=True)


def files_of(folder: Path) -> dict[str, Path]:
    """Return the safetensors file of each tensor of a model folder, by the tensor's name; {} if it has no such files.

    If the weights are there as a single file and as several, it is the single file, as for transformers.
    """
    if (single := folder / SAFE_WEIGHTS_NAME).is_file():
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    if (index := folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    return {}


LARGEST = 5 * 10**9  # most bytes of tensors in a file
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64"}


def write_weights(
    folder: Path,
    planned: Iterable[tuple[str, Tensor]],
    named_tensors: Iterable[tuple[str, Tensor]],
    largest: int = LARGEST,
) -> None:
    """Write (name, tensor) pairs as safetensors into a folder: one file, or several of `largest` bytes and an index.

    Args:
        planned: the same names and tensors in the same order, but without values: only shapes and dtypes are read.
        named_tensors: only one of the tensors at a time need be in memory.

    Raises:
        ValueError: a tensor is not the planned one; the message names it.
    """
    # The headers first: they have the position of every tensor, and the index the file of each.
    headers: list[dict[str, Any]] = [{}]
    parameter_count = total_size = file_size = 0  # `file_size` is the current file's
    for name, tensor in planned:
        if headers[-1] and file_size + tensor.nbytes > largest:
            headers.append({})
            file_size = 0

        offsets = [file_size, file_size + tensor.nbytes]
        headers[-1][name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        file_size += tensor.nbytes
        total_size += tensor.nbytes
        parameter_count += tensor.numel()

    files = [SAFE_WEIGHTS_NAME]
    if len(headers) > 1:
        files = [f"model-{i:05d}-of-{len(headers):05d}.safetensors" for i in range(1, len(headers) + 1)]
        index = {
            "metadata": {"total_parameters": parameter_count, "total_size": total_size},
            "weight_map": {name: file for file, header in zip(files, headers, strict=True) for name in header},
        }
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    # Then the tensors, in the same order, one in memory at a time.
    remaining_tensors = iter(named_tensors)
    for file, header in zip(files, headers, strict=True):
        header_bytes = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        header_bytes += b" " * (-len(header_bytes) % 8)  # tensors start at a multiple of 8 bytes
        with (folder / file).open("wb") as output:
            output.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
            for name, expected in header.items():
                received_name, tensor = next(
                    remaining_tensors, ("", torch.empty(0))
                )  # "" if there are fewer than planned
                if (received_name, DTYPES[tensor.dtype], list(tensor.shape)) != (
                    name,
                    expected["dtype"],
                    expected["shape"],
                ):
                    raise ValueError(f"{name!r} of shape {expected['shape']} was expected next, got {received_name!r}")
                tensor_bytes: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
                output.write(tensor_bytes)
                del tensor, tensor_bytes  # before the next one is made

    for received_name, _ in remaining_tensors:
        raise ValueError(f"unexpected tensor {received_name!r}: all planned tensors were written")
