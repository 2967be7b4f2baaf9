"""Files of a model from an untrusted source, read within limits of type, size, depth and numbers."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

# Limits above what the largest published models have, and far below what a machine can hold.
MAX_BYTES = 4 << 20  # bytes of a file of settings
MAX_VOCABULARY_BYTES = 64 << 20  # of a tokenizer, or of the index of weights
MAX_DEPTH = 64  # lists and mappings within one another
MAX_NUMBER = 1 << 63
NO_LIMIT = 10**31  # tokenizer_config.json has 1e30 where a model has no longest text
MAX_LAYERS = 4096
VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "*.model", "*.index.json")
# Of configurations, processors, generation and chat templates.
SETTINGS = ("*.json", "*.jinja", "*.txt")
WEIGHTS = "*.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
MAX_GGUF_ENTRIES = 1 << 16  # keys, and tensors, of a GGUF file
# Limits of the trial of a tokenizer.
CPU_SECONDS = 60
MEMORY = 4 << 30
# What a config.json may name as the code of attention and experts: an implementation, and no repository of the hub.
IMPLEMENTATION = re.compile(r"_?\w*_implementation(_internal)?")
TRIAL = """
import resource, sys
for name, most in (("CPU", int(sys.argv[2])), ("DATA", int(sys.argv[3])), ("CORE", 0)):
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
for text in ("a" * 64 + "!", "Hello, world! 12 \\u00e9\\n", " ", ""):
    try:
        tokenizer.decode(tokenizer.encode(text).ids)
    except Exception:  # a text that it has no tokens for; a panic is not an Exception
        continue
"""


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The mapping in a JSON file of a model.

    Raises:
        ValueError: not a regular file, not a mapping, or beyond a limit; says which.
    """
    try:
        values = json.loads(_content(path, max_bytes))
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    except ValueError as error:
        text = " ".join(str(error).split())
        raise ValueError(text if text.startswith(path.name) else f"{path.name} is not JSON: {text}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} must be a mapping, not {type(values).__name__}")
    _check_values(values, path.name)
    return values


def check_model_files(folder: Path) -> None:
    """Check the files of a model that transformers reads whole.

    Raises:
        ValueError: one of them is not a regular file, too large or malformed; or there are only pickled weights, which
            may run code when they are loaded.
    """
    weights = sorted(folder.glob(WEIGHTS))
    # Pickles beside safetensors are never read.
    pickles = [path.name for pattern in PICKLES for path in sorted(folder.glob(pattern))]
    if pickles and not weights:
        raise ValueError(
            f"model folder {folder} has its weights as {pickles[0]} alone, a pickle, which can run code: save them as "
            "safetensors (model.save_pretrained), where you trust them"
        )
    try:
        for path in sorted({path for pattern in (*SETTINGS, *VOCABULARIES) for path in folder.glob(pattern)}):
            if any(path.match(pattern) for pattern in VOCABULARIES):
                _content(path, MAX_VOCABULARY_BYTES, read=False)
            elif path.suffix == ".json" and path.name.startswith(("config", "generation_", "tokenizer_", "special_")):
                values = read_json(path)
                if path.name == "config.json" and values.get("model_type") is None:
                    raise ValueError("config.json has no model_type")
            else:
                _content(path, MAX_BYTES, read=False)
        # An index must stay within the folder; a file of weights must be readable.
        for path in sorted(folder.glob("*.index.json")):
            _check_index(path)
        for path in weights:
            _check_weights(path)
    except ValueError as error:
        raise ValueError(f"model {folder}: {error}") from None


def check_gguf(file: Path) -> None:
    """ValueError: the file does not begin as GGUF does, or says to have more than any model."""
    with file.open("rb") as opened:
        start = opened.read(24)
    if start[:4] != b"GGUF":
        raise ValueError(f"{file} is not GGUF file: it does not begin with GGUF")
    if len(start) < 24:
        raise ValueError(f"{file} could not be opened as GGUF: it is cut off")
    version, tensors, keys = struct.unpack("<IQQ", start[4:])
    if version not in (2, 3):
        raise ValueError(f"{file} could not be opened as GGUF: its version is {version}, and 2 and 3 are known")
    if max(tensors, keys) > MAX_GGUF_ENTRIES:
        raise ValueError(f"{file} could not be opened as GGUF: it says to have {tensors} tensors and {keys} keys")


def _content(path: Path, max_bytes: int, read: bool = True) -> bytes:
    """The content of a regular file; a FIFO or a device would be waited for, or never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") if stat.S_ISREG(os.fstat(handle).st_mode) else _reject(handle, path) as file:
        if (size := os.fstat(handle).st_size) > max_bytes:
            raise ValueError(f"{path.name} has {size} bytes, and at most {max_bytes} are read")
        return file.read(max_bytes + 1) if read else b""


def _reject(handle: int, path: Path) -> NoReturn:
    os.close(handle)
    raise ValueError(f"{path.name} is not a regular file")


def _check_values(values: dict[str, Any], name: str) -> None:
    """Check depth and numbers. ValueError: nested too deeply, NaN, or a number that no model has."""
    pending: list[tuple[int, object]] = [(1, values)]
    while pending:
        depth, value = pending.pop()
        # Depth first, without recursion: depth is what is limited.
        if isinstance(value, dict | list):
            if depth > MAX_DEPTH:
                raise ValueError(f"{name} is nested too deeply")
            pending += [(depth + 1, item) for item in (value.values() if isinstance(value, dict) else value)]
            _check_implementations(value, name)
        elif isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{name} has NaN, which is not a number")
        elif isinstance(value, int) and abs(value) >= (NO_LIMIT if name.startswith("tokenizer") else MAX_NUMBER):
            raise ValueError(f"{name} has a number of {len(str(abs(value)))} digits")
    layers = values.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise ValueError(f"{name} has num_hidden_layers = {layers}: at most {MAX_LAYERS} are read")


def _check_implementations(values: object, name: str) -> None:
    """ValueError: attention or experts would be computed by code from the hub, which transformers loads for a name with
    a slash, whatever `trust_remote_code` says."""
    for key, value in values.items() if isinstance(values, dict) else ():
        if IMPLEMENTATION.fullmatch(key):
            for stated in value.values() if isinstance(value, dict) else [value]:
                if isinstance(stated, str) and re.fullmatch(r"\w+", stated) is None:
                    raise ValueError(f"{name} has {key} = {stated[:80]!a}, which is the code of another repository")


def try_tokenizer(folder: Path) -> None:
    """Read a model's tokenizer and use it, in a separate process: for some files its library panics, aborts or hangs.

    Raises:
        ValueError: it did so, or the file is malformed.
    """
    if not (path := folder / "tokenizer.json").exists():
        return
    command = [sys.executable, "-P", "-c", TRIAL, str(path), str(CPU_SECONDS), str(MEMORY)]
    trial = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if trial.returncode == 0:
        return
    lines = trial.stderr.decode(errors="replace").splitlines()
    reason = next((line for line in reversed(lines) if "Error" in line or "Exception" in line), "")
    # A signal: an abort of the library, or a limit of the trial.
    if trial.returncode < 0:
        reason = f"its library ended with {signal.Signals(-trial.returncode).name}"
        if -trial.returncode in (signal.SIGXCPU, signal.SIGKILL):
            reason = f"it takes more than {CPU_SECONDS} s of CPU time"
    raise ValueError(f"model {folder}: tokenizer.json cannot be used: {reason[:300] or 'its library failed'}")


def _check_index(path: Path) -> None:
    files = read_json(path, MAX_VOCABULARY_BYTES).get("weight_map")
    if not isinstance(files, dict):
        raise ValueError(f"{path.name} has no weight_map")
    for file in files.values():
        if not isinstance(file, str) or re.fullmatch(r"[\w.][\w. -]*", file) is None:
            raise ValueError(f"{path.name} names {str(file)[:80]!a}, which is not a file of this folder")


def _check_weights(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    _content(path, 1 << 62, read=False)
    try:
        with safe_open(path, framework="np"):
            return
    except (SafetensorError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path.name} is damaged: {' '.join(str(error).split())}") from None
