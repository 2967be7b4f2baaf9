"""Prompts and completions against the length of sequences that generators take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config.sections import ConfigError
from ..data.config import DatasetConfig
from ..engines.interface import check_length
from ..models.read_once import model_config

if TYPE_CHECKING:
    from .distill_config import DistillConfig
    from .rl_config import RLConfig
    from .schema import RecipeConfig


def longest_sequence(cfg: RecipeConfig, model: str) -> int:
    """The most tokens of a prompt and its completion that generators of a model folder take."""
    return check_length(model_config(model), cfg.generator.max_seq_len)


def with_room(cfg: RLConfig | DistillConfig, section: str, model: str) -> DatasetConfig:
    """The data, with prompts that leave room for the completions of a section in what generators take.

    It is a copy: a resumed run is compared with the configuration as it was written.

    Raises:
        ConfigError: the completions leave no room, or `dataset.max_prompt_tokens` is set to more than they leave.
    """
    sampling = cfg[section]
    longest = longest_sequence(cfg, model)
    data = cfg.dataset.model_copy()
    room = longest - sampling.max_tokens
    completion = f"{section}.max_tokens = {sampling.max_tokens}"
    remedy = "raise generator.max_seq_len as far as the model allows"
    if room < 1 and "max_tokens" in sampling.model_fields_set:
        raise ConfigError(
            f"{completion} leaves no room for a prompt in the {longest} tokens that generators take: "
            f"lower it, or {remedy}"
        )
    # A default that leaves no room is a bound that answers never reach: they end at the model's length.
    room = room if room > 0 else longest - 1
    # The bound that `training.seq_len` has set, where the user set none.
    default_bound = cfg.training.seq_len - sampling.max_tokens
    if data.max_prompt_tokens == default_bound:
        data.max_prompt_tokens = min(default_bound, room)
    data.bound(
        "max_prompt_tokens",
        room,
        f"dataset.max_prompt_tokens is more than the {room} tokens that {completion} leaves of the {longest} that "
        f"generators take: lower either, or {remedy}",
    )
    return data
