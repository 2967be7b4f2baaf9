"""Interpolations of OmegaConf in files of Meta's torchforge: `${key}`, `${sum:a,b}` and `${oc.env:NAME,default}`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

Json = Any
INTERPOLATION = re.compile(r"(?<!\\)\$\{([^${}]*)\}")
MAX_ROUNDS = 100  # substitutions in one text; a chain of names is a few long, a circle has no end


def resolve_all(values: dict[str, Json]) -> dict[str, Json]:
    r"""Resolve the interpolations everywhere in nested values, and remove `hf://`; `\${key}` is the text `${key}`.

    Raises:
        ValueError: one names a key or variable that does not exist, refers to itself, or adds up texts.
    """

    # Every value against the values as they were written: a name may come after its use.
    def resolved(value: Json) -> Json:
        if isinstance(value, dict):
            return {name: resolved(part) for name, part in value.items()}
        if isinstance(value, list):
            return [resolved(part) for part in value]
        return _resolve(value, values) if isinstance(value, str) else value

    resolved_values: dict[str, Json] = resolved(values)
    return resolved_values


def _resolve(text: str, values: Mapping[str, Json]) -> Json:
    """A text with its interpolations, the innermost first; one that is nothing else keeps the type of its value."""
    for _ in range(MAX_ROUNDS):
        match = INTERPOLATION.search(text)
        if match is None:
            return text.replace(r"\${", "${").removeprefix("hf://")
        value = _value_of(match[1].strip(), values)
        if match[0] == text and not isinstance(value, str):
            return value
        text = f"{text[: match.start()]}{value}{text[match.end() :]}"
    raise ValueError(f"the interpolation {text!r} refers to itself")


def _value_of(expression: str, values: Mapping[str, Json]) -> Json:
    """The value of one interpolation."""
    resolver, _, arguments = expression.partition(":")
    if resolver == "sum":
        try:
            return sum(int(number) for number in arguments.split(","))
        except ValueError:
            raise ValueError(f"${{{expression}}} needs whole numbers, separated by commas") from None
    if resolver == "oc.env":
        variable, has_default, default = arguments.partition(",")
        if variable in os.environ:
            return os.environ[variable]
        if not has_default:
            raise ValueError(f"${{{expression}}}: the environment has no {variable}: set it, or write the value")
        default = default.strip()
        if default.lower() == "null":
            return None
        is_quoted = len(default) > 1 and default[0] == default[-1] and default[0] in "'\""
        return default[1:-1] if is_quoted else default
    # The path of another key.
    value: Json = values
    for name in expression.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"${{{expression}}} names a key that the file does not have")
        value = value[name]
    return value
