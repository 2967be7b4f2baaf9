"""Prompts and completions against the length of sequences that generators take."""

from __future__ import annotations

from typing import Any

from ..architecture import longest
from ..config import ConfigError
from ..engines.interface import LONGEST
from ..observability.console import log


def longest_sequence(cfg: Any, model: str) -> int:
    """Most tokens of a prompt and its completion."""
    from transformers import AutoConfig

    return cfg.generator.max_seq_len or min(LONGEST, longest(AutoConfig.from_pretrained(model)))


def bound_prompts(cfg: Any, section: str, model: str) -> None:
    """Bound `dataset.max_prompt_tokens` by what completions leave.

    Args:
        section: of the configuration, with the `max_tokens` of a completion.

    Raises:
        ConfigError: they leave nothing, or `dataset.max_prompt_tokens` is set to more.
    """
    sampling, data, most = cfg[section], cfg.dataset, longest_sequence(cfg, model)
    room, completion = most - sampling.max_tokens, f"{section}.max_tokens = {sampling.max_tokens}"
    remedy = "raise generator.max_seq_len as far as the model allows"
    if room < 1 and "max_tokens" in sampling.model_fields_set:
        raise ConfigError(
            f"{completion} leaves no room for a prompt in the {most} tokens that generators take: lower it, or {remedy}"
        )
    if room < 1:
        log.warning("%s, the default, is more than the %d tokens that generators take: set it", completion, most)
        room = most - 1
    if data.max_prompt_tokens == cfg.training.seq_len - sampling.max_tokens:  # what it is unless it is set
        data.max_prompt_tokens = min(data.max_prompt_tokens, room)
    data.bound(
        "max_prompt_tokens",
        room,
        f"dataset.max_prompt_tokens is more than the {room} tokens that {completion} leaves of the {most} that "
        f"generators take: lower either, or {remedy}",
    )
