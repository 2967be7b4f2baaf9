"""Ask a model's class, with a config cut to a few narrow layers, what trainer and engine may do with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_config(config: PreTrainedConfig) -> None:
    """Check that transformers' modules of this config can be trained and run.

    Raises:
        ValueError: a value that is not supported; the message names it.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{config.name_or_path or config.model_type}: quantization_config is not supported")
