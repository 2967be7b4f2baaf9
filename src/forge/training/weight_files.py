"""Safetensors files written tensor by tensor: the package's own functions need all tensors of a file at once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

LARGEST = 5 * 10**9  # bytes of tensors in a file
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def write_weights(
    folder: Path,
    planned: Iterable[tuple[str, Tensor]],
    named_tensors: Iterable[tuple[str, Tensor]],
    largest: int = LARGEST,
) -> None:
    """Write tensors under these names into a folder, in several files with an index if they are larger than `largest`.

    Args:
        planned: tensors without values, whose names, shapes and dtypes are those of `named_tensors`, in the same order.

    Raises:
        ValueError: a tensor is not the planned one; names it.
    """
    # The headers first: they have the position of every tensor, and the index the file of each.
    headers: list[dict[str, Any]] = [{}]
    parameters = total = size = 0
    for name, tensor in planned:
        if headers[-1] and size + tensor.nbytes > largest:
            headers.append({})
            size = 0
        places = [size, size + tensor.nbytes]
        headers[-1][name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": places}
        size, total, parameters = places[1], total + tensor.nbytes, parameters + tensor.numel()
    files = [SAFE_WEIGHTS_NAME]
    if len(headers) > 1:
        files = [f"model-{i:05d}-of-{len(headers):05d}.safetensors" for i in range(1, len(headers) + 1)]
        index = {
            "metadata": {"total_parameters": parameters, "total_size": total},
            "weight_map": {name: file for file, header in zip(files, headers, strict=True) for name in header},
        }
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    remaining = iter(named_tensors)
    # Then the tensors, in the same order, one in memory at a time.
    for file, header in zip(files, headers, strict=True):
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
        with (folder / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            for name, expected in header.items():
                received, tensor = next(remaining, ("", torch.empty(0)))
                if (received, DTYPES[tensor.dtype], list(tensor.shape)) != (name, expected["dtype"], expected["shape"]):
                    raise ValueError(f"{name!r} of shape {expected['shape']} was planned, {received!r} came")
                values: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
                opened.write(values)
                del tensor, values  # before the next one is made
    for received, _ in remaining:
        raise ValueError(f"{received!r} was not planned")
