"""Images in prompts: read from rows, written as tokens by a model's processor, and as inputs of its forward pass."""

import io
import json
import shutil
from collections.abc import Mapping, Sequence
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge.models.files import read_json
from forge.models.tokenizer import has_images
from forge.system.checksums import CHECKSUMS

MARK = "<image>"  # where an image stands in a text


def read_images(value: object) -> tuple[bytes, ...]:
    """Return the bytes of the files of a row's images.

    Args:
        value: one or a list of paths, bytes, pictures of Pillow, or mappings with `bytes` or `path` (`datasets.Image`).

    Raises:
        ValueError: one of them is not an image.
    """
    values = [] if value is None else value if isinstance(value, list | tuple) else [value]
    return tuple(_read_image(number, item) for number, item in enumerate(values, 1))


def _read_image(number: int, item: Any) -> bytes:
    from PIL import Image

    if isinstance(item, Mapping):
        item = item.get("bytes") or item.get("path")
    if isinstance(item, Image.Image):
        buffer = io.BytesIO()
        item.save(buffer, "PNG")
        return buffer.getvalue()
    try:
        content = item if isinstance(item, bytes) else Path(str(item)).expanduser().read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            image.verify()
    except Exception as error:  # Pillow raises many kinds for damaged files
        name = f"{item:.80}" if isinstance(item, str) else f"a {type(item).__name__}"
        raise ValueError(f"image {number} ({name}) cannot be read: {' '.join(str(error).split())}") from None
    return content


def insert_images(messages: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return messages whose last user message has places for `count` images: where it says `<image>`, or before it.

    >>> insert_images([{"role": "user", "content": "What is it?"}], 1)[0]["content"]
    [{'type': 'image'}, {'type': 'text', 'text': 'What is it?'}]

    Raises:
        ValueError: it says `<image>` another number of times.
    """
    last = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=0)
    texts = messages[last]["content"].split(MARK)
    if len(texts) == 1:
        texts = [""] * count + texts
    if len(texts) != count + 1:
        raise ValueError(
            f"the prompt has {MARK} {len(texts) - 1} times, but {count} images: use one for each image, or none"
        )
    parts = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})]
    content = [part for part in parts[1:] if part.get("text") != ""]
    return [*messages[:last], {**messages[last], "content": content}, *messages[last + 1 :]]


def expand_tokens(folder: str | Path, text: str, images: Sequence[bytes]) -> list[int]:
    """Return the token ids of a text with images, each of whose places has as many tokens as the model reads of it.

    Args:
        folder: the model's.
        text: as its chat template writes it.

    Raises:
        ValueError: the model has no processor, or the text another number of places than images.
    """
    processor = open_processor(str(folder))
    try:
        encoded = processor(text=[text], images=[open_images(images)], add_special_tokens=False)
    except Exception as error:  # each processor's own
        raise ValueError(
            f"{len(images)} images do not match their placeholders in the prompt: {' '.join(str(error).split())}"
        ) from None
    return [int(token) for token in encoded["input_ids"][0]]


def expand_answer(
    folder: str | Path, text: str, images: Sequence[bytes], tokens: list[int], mask: list[bool]
) -> tuple[list[int], list[bool]]:
    """Expand the placeholders of images in a conversation's token ids and mask, from one token each to all tokens.

    Args:
        mask: True on the trained tokens, which come after the images.
    """
    expanded = expand_tokens(folder, text, images)
    start = mask.index(True)
    added = len(expanded) - len(tokens)
    if expanded[start + added :] != tokens[start:]:
        raise ValueError(
            "the model's processor and tokenizer encode the text after the images differently: this model is not "
            "supported with images"
        )
    return expanded, [False] * (start + added) + mask[start:]


def prepare_images(model: Any, rows: Sequence[Sequence[bytes]], input_ids: Tensor) -> dict[str, Tensor]:
    """Return the inputs of a model's forward pass for the images of prompts, in addition to the tokens.

    Args:
        rows: the images of each row of `input_ids` (rows, tokens).
    """
    if not any(rows):
        return {}
    processor = open_processor(model.config.name_or_path)
    # Some models see the tokens of an image in both directions, or count positions in three dimensions.
    types = (input_ids == model.config.image_token_id).long()
    prepared = {
        **processor.image_processor(images=[open_images(images) for images in rows if images], return_tensors="pt"),
        **{name: types for name in ("token_type_ids", "mm_token_type_ids") if name in processor.model_input_names},
    }
    accepted = signature(model.forward).parameters
    return {name: value.to(input_ids.device) for name, value in prepared.items() if name in accepted}


def forbid_images(logits: Tensor, config: Any) -> Tensor:
    """Return logits (N, V) that exclude the image token, because responses have no images."""
    image_token = getattr(config, "image_token_id", None)
    if image_token is None or not has_images(config):
        return logits
    return logits.index_fill(-1, torch.tensor(image_token, device=logits.device), -1e9)


def open_images(images: Sequence[bytes]) -> list[Any]:
    """Decode the bytes of image files as RGB images."""
    from PIL import Image

    return [Image.open(io.BytesIO(content)).convert("RGB") for content in images]


@lru_cache(maxsize=4)
def open_processor(folder: str) -> Any:
    """Return the processor of a model's folder.

    Raises:
        ValueError: there is none, or a package is missing.
    """
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
        if not hasattr(processor, "image_processor"):
            raise ValueError("the model reads text only")
        return processor
    except Exception as error:  # a missing package or file
        fault = " ".join(str(error).split())
        raise ValueError(f"{folder} has no processor of images, which dataset.images_field needs: {fault}") from error


def mark_model(folder: str, target: str) -> str:
    """Write a folder whose config.json says that its model is trained with its images, with links to all other files.

    Returns:
        its path, `target`.

    Raises:
        ValueError: `target` exists, and is not such a folder; or the model has no processor of images.
    """
    open_processor(folder)
    source, marked_folder = Path(folder).resolve(), Path(target)
    if marked_folder.exists() and not any("forge_images" in f.read_text() for f in marked_folder.glob("config.json")):
        raise ValueError(f"{target} exists: this run keeps links to its model there; choose another run.name")

    shutil.rmtree(marked_folder, ignore_errors=True)
    marked_folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.name not in ("config.json", CHECKSUMS):
            (marked_folder / file.name).symlink_to(file)
    marked_config = read_json(source / "config.json") | {"forge_images": True}
    (marked_folder / "config.json").write_text(json.dumps(marked_config))
    return target
