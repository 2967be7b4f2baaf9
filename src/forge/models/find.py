"""Find a model, check that it is complete, and build a small one from a seed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.plugin import resolve
from ..system.checksums import CHECKSUMS, DamagedFile, check_files, write_checksums
from ..system.files import removed_on_error, room_for
from .architecture import check_config, is_native
from .files import PICKLES, check_model_files, read_json
from .hub import is_hub_id, is_hub_reachable, split_revision
from .tokenizer import PRINTABLE, character_tokenizer, model_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
WEIGHTS = ("*.safetensors", *PICKLES)


def check_family(name: str) -> None:
    """Check the architecture of a model, a folder or hub id, before its weights are downloaded or read.

    Raises:
        ValueError: transformers has no causal language model of its type, or config.json is malformed, or has a value
            that is not supported (see `forge.models.architecture.check_config`) or that transformers rejects.
    """
    # This returns at faults that `resolve_model` finds as well: its messages are better.
    path = Path(name) / "config.json"
    if is_hub_id(name):
        from huggingface_hub import hf_hub_download

        try:
            repository, revision = split_revision(name)
            cached = not is_hub_reachable()
            path = Path(hf_hub_download(repository, "config.json", revision=revision, local_files_only=cached))
        except Exception:  # `resolve_model` says why
            return

    if not os.path.lexists(path):  # `resolve_model` says so
        return

    try:
        family = read_json(path).get("model_type")
    except ValueError as error:
        raise ValueError(f"model {name}: {error}") from None

    if family is None:  # `resolve_model` says what else is missing
        return

    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_CLASSES,
    )

    if str(family) not in CLASSES | IMAGE_CLASSES:
        raise ValueError(
            f"model {name} has model_type {family!r:.80}: the installed transformers has no such causal language model"
        )

    try:
        config = model_config(path.parent)
    except Exception as error:  # its validation raises its own classes
        raise ValueError(f"model {name}: its config.json is invalid: {' '.join(str(error).split())}") from error

    config.name_or_path = f"model {name}"
    vars(config).pop("quantization_config", None)  # `resolve_model` dequantizes the weights
    check_config(config)


def check_classifier(config: "PreTrainedConfig") -> None:
    """Raise ValueError if a model of this config cannot be a critic or reward model, which is a sequence classifier."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

    if config.model_type not in CLASSIFIERS:
        raise ValueError(
            f"{config.model_type} models cannot be critics or reward models: transformers has no such head"
        )
    if not is_native(config):
        resolve("forge_families.probe:check_packed", "model")(config, "critics and reward models")


def resolve_model(name: str) -> str:
    """Return the local directory of a model, downloaded or converted if needed.

    Args:
        name: a folder, which is returned as it is; a hub id (`owner/model` or `owner/model@revision`), of which a
            snapshot is downloaded unless it is in the cache; or a `.gguf` file. Quantized weights are dequantized to
            another folder.

    Raises:
        FileNotFoundError: the folder is missing, or it has no configuration, weights or tokenizer.
        DamagedFile: a file differs from its checksum, if the folder has `checksums.txt`.
        ValueError: the model is not in the cache and the hub cannot be reached; a file is malformed or too large; all
            weights are pickles; or transformers cannot dequantize the weights.
        ImportError: the packages that read a `.gguf` file are not installed.
    """
    folder = Path(name)
    if name.endswith(".gguf"):
        return str(resolve("forge_compat.quantized:open_gguf", "model")(folder))
    if not folder.is_dir():
        if not is_hub_id(name):
            raise FileNotFoundError(f"model directory {name} does not exist")
        from huggingface_hub import snapshot_download

        try:
            repository, revision = split_revision(name)
            settings: dict[str, Any] = {"revision": revision, "local_files_only": not is_hub_reachable()}
            folder = Path(snapshot_download(repository, allow_patterns=HUB_FILES, **settings))
        except Exception as error:
            raise ValueError(
                f"model {name} is not a local directory and could not be downloaded from the hub "
                f"({type(error).__name__}): download it first and give the directory"
            ) from error

        name = str(folder)

    # It must have all that a run needs, before anything is loaded.
    for content, patterns in (
        ("config.json", ("config.json",)),
        ("weights (model.safetensors)", WEIGHTS),
        ("tokenizer (tokenizer.json)", ("tokenizer.json", "tokenizer_config.json")),
    ):
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            raise FileNotFoundError(f"model directory {name} has no {content}")

    # Folders that this library wrote have checksums; other folders have none to compare.
    if (folder / CHECKSUMS).exists():
        try:
            check_files(folder)
        except DamagedFile as error:
            raise DamagedFile(f"{error}; if you changed it, remove {folder / CHECKSUMS}") from None

    check_model_files(folder)
    if not read_json(folder / "config.json").get("quantization_config"):
        return name
    return str(resolve("forge_compat.quantized:open_quantized", "model")(folder))


def build_small_model(
    folder: str | Path,
    *,
    seed: int = 0,
    alphabet: str | None = None,
    hidden_size: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    max_positions: int = 128,
) -> str:
    """Write a Qwen3-architecture model with random weights and a character tokenizer in Hugging Face format.

    Args:
        seed: of the random weights.
        alphabet: characters of the tokenizer; None: printable ASCII.
        hidden_size: width; a multiple of twice `heads`, which are a multiple of `kv_heads`.
        max_positions: tokens of the longest sequence.

    Returns:
        the path of `folder`.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    tokenizer = character_tokenizer(alphabet or PRINTABLE)

    # A model that every engine and trainer of this library supports.
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden_size // heads,
        intermediate_size=3 * hidden_size,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    logging.disable_progress_bar()
    model, folder = Qwen3ForCausalLM(config), Path(folder)
    with room_for(folder, 4 * model.num_parameters()), removed_on_error(folder):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_checksums(folder, [file.name for file in folder.iterdir() if file.name != CHECKSUMS])

    return str(folder)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence transformers' progress bars, and its warning about a newly initialised head, within a `with` block."""
    from transformers.utils import logging

    # Restored afterwards, as these settings are of the whole process.
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
