"""Models in GGUF files, opened once to a folder in Hugging Face format."""

import logging
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forge.models.architecture import FAMILIES
from forge.models.find import quiet_loading, resolve_model
from forge.system.checksums import file_digest, write_checksums
from forge.system.files import cache_folder

log = logging.getLogger(f"forge.{__name__}")


def open_gguf(file: Path) -> Path:
    """Return a folder in Hugging Face format with the weights of a GGUF file, dequantised to float32.

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
    cache = cache_folder() / "gguf"
    folder = cache / file_digest(file)
    if folder.is_dir():
        return Path(resolve_model(str(folder)))

    log.info("opening %s: its weights are written once to %s, in float32", file, folder)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    parent, name = str(file.parent), file.name
    try:
        config = AutoConfig.from_pretrained(parent, gguf_file=name, trust_remote_code=False)
        if config.model_type not in FAMILIES:
            raise ValueError(f"model_type {config.model_type!r} is unsupported: use one of {', '.join(FAMILIES)}")
        with quiet_loading():
            model: Any = AutoModelForCausalLM.from_pretrained(
                parent, gguf_file=name, dtype=torch.float32, trust_remote_code=False
            )
            tokenizer = AutoTokenizer.from_pretrained(parent, gguf_file=name, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for damaged files and unknown architectures
        raise ValueError(f"{file} could not be opened as GGUF: {' '.join(str(error).split())}") from error

    # Mark the model as not quantised: its weights are dequantised, and transformers saves no quantised one.
    model.hf_quantizer = None
    del model.config.quantization_config
    cache.mkdir(parents=True, exist_ok=True)

    # Written to a temporary folder and renamed, so that an interrupted run leaves no folder that looks complete.
    aside = Path(tempfile.mkdtemp(dir=cache, prefix="incomplete-"))
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
