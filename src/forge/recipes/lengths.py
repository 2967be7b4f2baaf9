"""Prompts and completions against the length of sequences that generators take."""

from __future__ import annotations

from typing import Any

from ..config.sections import ConfigError
from ..data.config import DatasetConfig
from ..engines.interface import check_length


def longest_sequence(cfg: Any, model: str) -> int:
    """Most tokens of a prompt and its completion."""
    from transformers import AutoConfig

    return check_length(AutoConfig.from_pretrained(model, trust_remote_code=False), cfg.generator.max_seq_len)


def with_room(cfg: Any, section: str, model: str) -> DatasetConfig:
    """The data whose prompts have room for the completions of a section, `max_tokens`, in what generators take. The
    configuration itself stays as it is, with which a resumed run is compared.

    Raises:
        ConfigError: the completions leave no room, or `dataset.max_prompt_tokens` is set to more than they leave.
    """
    sampling, most = cfg[section], longest_sequence(cfg, model)
    data: DatasetConfig = cfg.dataset.model_copy()
    room, completion = most - sampling.max_tokens, f"{section}.max_tokens = {sampling.max_tokens}"
    remedy = "raise generator.max_seq_len as far as the model allows"
    if room < 1 and "max_tokens" in sampling.model_fields_set:
        raise ConfigError(
            f"{completion} leaves no room for a prompt in the {most} tokens that generators take: lower it, or {remedy}"
        )
    room = room if room > 0 else most - 1
    unset = cfg.training.seq_len - sampling.max_tokens
    if data.max_prompt_tokens == unset:
        data.max_prompt_tokens = min(unset, room)
    data.bound(
        "max_prompt_tokens",
        room,
        f"dataset.max_prompt_tokens is more than the {room} tokens that {completion} leaves of the {most} that "
        f"generators take: lower either, or {remedy}",
    )
    return data
