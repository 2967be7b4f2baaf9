"""Models with quantized weights, in GGUF files or as published on the hub: opened once to a folder of plain weights."""

import logging
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

from forge.models.find import quiet_loading, resolve_model
from forge.system.checksums import file_digest, write_checksums
from forge.system.files import cache_folder

log = logging.getLogger(f"forge.{__name__}")


def open_gguf(file: Path) -> Path:
    """Return a folder in Hugging Face format with the weights of a GGUF file, dequantized to float32.

    It is written once, to `$XDG_CACHE_HOME/torchforge/gguf/CHECKSUM`, and takes 4 bytes a parameter on disk and, while
    it is written, in memory.

    Raises:
        FileNotFoundError, ValueError, ImportError: as `resolve_model`.
    """
    if not file.is_file():
        raise FileNotFoundError(f"model file {file} does not exist")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ValueError(f"{file} is not a GGUF file: it does not start with GGUF")
    if find_spec("gguf") is None or find_spec("accelerate") is None:  # transformers loads GGUF through them
        raise ImportError("a .gguf model needs more packages: pip install 'torchforge-rl[gguf]'")

    return _write_plain(cache_folder() / "gguf" / file_digest(file), file.parent, "float32", gguf_file=file.name)


def open_quantized(folder: Path) -> Path:
    """Return a folder with the dequantized weights of a model folder whose config.json has a quantization_config.

    transformers dequantizes them (FP8, MXFP4, compressed-tensors, bitsandbytes), to the type that config.json names. It
    is written once, to `$XDG_CACHE_HOME/torchforge/dequantized`.

    Raises:
        ValueError: transformers cannot, with the installed packages; the message is its own.
    """
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.resolve().iterdir())]
    return _write_plain(
        cache_folder() / "dequantized" / xxhash.xxh3_128_hexdigest(repr(stats).encode()), folder, "auto"
    )


def _write_plain(folder: Path, source: Path, dtype: str, gguf_file: str = "") -> Path:
    """Write a model to a folder with weights of this type, unless it exists, and return the folder.

    Args:
        source: the model's folder, or that of its GGUF file.
    """
    if folder.is_dir():
        return Path(resolve_model(str(folder)))
    name = source / gguf_file
    options = {"gguf_file": gguf_file} if gguf_file else {}
    log.info("opening %s: its weights are written once to %s, dequantized", name, folder)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
        if not gguf_file:
            config.quantization_config["dequantize"] = True
        with quiet_loading():
            model: Any = AutoModelForCausalLM.from_pretrained(
                source, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True, **options
            )
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
        quantizer = getattr(model, "hf_quantizer", None)
        if not gguf_file and quantizer and not getattr(quantizer.quantization_config, "dequantize", False):
            model.dequantize()
    except Exception as error:  # transformers raises many kinds for damaged files and unknown formats
        raise ValueError(
            f"{name} could not be opened as {'a GGUF file' if gguf_file else 'quantized weights'}: "
            + " ".join(str(error).split())
        ) from error

    # Mark the model as not quantized: transformers saves no quantized one.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    folder.parent.mkdir(parents=True, exist_ok=True)

    # Written to a temporary folder and renamed, so that an interrupted run leaves no folder that looks complete.
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix="incomplete-"))
    try:
        with quiet_loading():
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
        write_checksums(aside, [path.name for path in aside.iterdir()])
        if not folder.is_dir():  # another process may have been faster
            aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)

    return folder
