"""A model folder's configuration and tokenizer, each read once a process: many checks of a start need them.

A configuration is a copy, which its reader may change. A tokenizer is shared by the checks, which one thread makes;
what encodes in other threads opens another one.
"""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from .tokenizer import open_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# A run reads its model, a reference or teacher, a critic and a reward model.
MODELS = 4


def model_config(folder: str | Path) -> PretrainedConfig:
    """The transformers configuration of a model folder."""
    return deepcopy(_config(str(folder), _changed(folder, "config.json")))


def model_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. ValueError: see `open_tokenizer`."""
    return _tokenizer(str(folder), _changed(folder, "tokenizer_config.json"))


@lru_cache(maxsize=MODELS)
def _config(folder: str, changed: int) -> PretrainedConfig:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


@lru_cache(maxsize=MODELS)
def _tokenizer(folder: str, changed: int) -> PreTrainedTokenizerBase:
    return open_tokenizer(folder)


def _changed(folder: str | Path, name: str) -> int:
    """When a file of the folder was written, in nanoseconds: another run may write another model there."""
    try:
        return (Path(folder) / name).stat().st_mtime_ns
    except OSError:
        return 0
