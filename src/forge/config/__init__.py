"""Configuration: typed sections, YAML files, dotted overrides, and code by its name.

Its names are imported on first use: `forge.algorithms` reads plugins, and must not load pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .arguments import Arguments, load, read
    from .sections import ConfigError, Section, build, choices_in, keys_of, section_in, to_dict

__all__ = [
    "Arguments",
    "ConfigError",
    "Section",
    "build",
    "choices_in",
    "keys_of",
    "load",
    "read",
    "section_in",
    "to_dict",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        home = ".arguments" if name in ("Arguments", "load", "read") else ".sections"
        return getattr(import_module(home, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
