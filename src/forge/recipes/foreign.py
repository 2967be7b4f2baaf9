"""Arguments of `forge.train` and its kin that are another library's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..config.foreign_names import leaves, translated, trap
from ..config.plugin import nearest
from ..config.sections import ConfigError, Section, keys_of, section_in
from ..types import Sampling


def check_settings(settings: Mapping[str, Any], config_type: type[Section], algorithm: Any) -> None:
    """Reject names of other libraries, and names that mean something else there.

    Args:
        algorithm: of reinforcement learning; None in other recipes.

    Raises:
        ConfigError: what stands for each of them here, in one line.
    """
    from ..algorithms import setting_names

    sections = {key: section_in(field.annotation) for key, field in keys_of(config_type).items()}
    inner = {key for section in sections.values() if section is not None for key in keys_of(section)}
    name = algorithm.get("name", "grpo") if isinstance(algorithm, Mapping) else algorithm
    # An algorithm of the user's own may have any setting.
    known = {*sections, *inner, "rollout", *(setting_names(name) if name is not None else ())}
    foreign = [leaf for key, value in settings.items() if key not in known for leaf in leaves(key, value)]
    lines = translated(foreign, python=True)
    if lines:
        raise ConfigError(lines)
    # In RL alone: elsewhere epochs are a key of several sections, which is another error.
    traps = [trap(key, value) for key, value in settings.items() if algorithm is not None]
    if any(traps):
        raise ConfigError(next(filter(None, traps)))


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """ConfigError: a name is not a field of `forge.types.Sampling`; names the nearest, or what stands for it."""
    known = [field.name for field in fields(Sampling)]
    unknown = [name for name in sampling if name not in known]
    if unknown:
        raise ConfigError(
            translated(unknown, python=True) or f"unknown setting {unknown[0]!r}{nearest(unknown[0], known)}"
        )
