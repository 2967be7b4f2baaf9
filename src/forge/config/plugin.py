"""Objects by name: `package.module:Name` and its settings, as a configuration or a command line gives them."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import logging
import os
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..system.masking import without_secrets

log = logging.getLogger(__name__)


def nearest(name: object, known: Iterable[object]) -> str:
    """The hint that ends an error about an unknown name: the closest known one, or all of them."""
    if isinstance(name, bool):
        return "; YAML reads a bare yes, no, on or off as true or false: quote the key"
    options = [str(option) for option in known]
    # At difflib's default, .6, `deepspeed` is close to `seed` and `lr` to `lora`; slips of one letter are above .8.
    close = difflib.get_close_matches(str(name), options, n=1, cutoff=0.7)
    if len(str(name)) > 2:
        close += [option for option in options if option.startswith(str(name))]  # algo, of algorithm
    return f"; did you mean {close[0]!r}?" if close else f"; known here: {', '.join(options) or 'none'}"


def warn_of_code(path: Path, values: Any) -> None:
    """A warning with the names of code in a file's values, if the file belongs to another user than this one or root:
    what it names will be imported."""
    if (owner := path.stat().st_uid) in (os.geteuid(), 0):
        return
    names, left = set(), [values]
    while left:
        value = left.pop()
        if isinstance(value, str) and re.fullmatch(r"[\w.]+:\w+", value):
            names.add(value)
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            left += value
    named = f"names code that will run as you: {', '.join(sorted(names))}" if names else "names no code"
    log.warning("%s belongs to another user (%d). It %s", path, owner, named)


def resolve(name: str, what: str, home: str | None = None) -> Any:
    """The object that `package.module:Name` names.

    Args:
        what: what the errors call it, such as "reward".
        home: the module that names without a colon are looked up in; None requires the full form.

    Raises:
        ValueError: the module or the name does not exist.
    """
    module, colon, attribute = name.rpartition(":")
    if not colon and home is None:
        raise ValueError(f"{what} {name!r} is unknown: write package.module:Name")
    try:
        return getattr(importlib.import_module(module or str(home)), attribute)
    except (ImportError, AttributeError, SyntaxError) as error:
        if isinstance(error, ImportError) and "pip install" in str(error):  # the name is right, a package is missing
            raise ValueError(f"{what} {name!r}: {error}") from error
        raise ValueError(f"{what} {name!r} was not found ({error}); write package.module:Name") from error


def construct(target: Callable[..., Any], settings: Mapping[str, Any], where: str, known: Iterable[str] = ()) -> Any:
    """`target(**settings)`, where the settings come from a file: names and types are checked against its signature.

    Args:
        where: the configuration key, for errors.
        known: further keys that stand beside the settings, for the hint of an error.

    Raises:
        ValueError: an unknown or missing setting, a wrong type, or what `target` itself raises (ValueError, TypeError).
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    # A constructor with **kwargs passes them on to that of its base.
    calls = (
        [vars(c)["__init__"] for c in target.__mro__ if "__init__" in vars(c)] if inspect.isclass(target) else [target]
    )
    parameters: dict[str, inspect.Parameter] = {}
    hints: dict[str, Any] = {}
    for call in calls:
        found = inspect.signature(call).parameters.values()
        named = [p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        parameters = {p.name: p for p in named[inspect.isclass(target) :]} | parameters
        # A dataclass has the names of its annotations in the modules of itself and its bases.
        hints = _hints(target if dataclasses.is_dataclass(target) else call) | hints
        if all(p.kind is not p.VAR_KEYWORD for p in found):
            break
    if unknown := [name for name in settings if name not in parameters]:
        raise ValueError(f"unknown key {f'{where}.{unknown[0]}'!r}{nearest(unknown[0], [*parameters, *known])}")
    if missing := [n for n, p in parameters.items() if p.default is p.empty and n not in settings]:
        raise ValueError(f"{f'{where}.{missing[0]}'!r} must be set")
    values: dict[str, Any] = {}
    for name, value in settings.items():
        adapter = TypeAdapter(hints.get(name, Any), config=ConfigDict(strict=True, arbitrary_types_allowed=True))
        try:
            # A YAML list stands for a tuple, a whole number for a float: strict in all else.
            values[name] = adapter.validate_python(tuple(value) if _wants_tuple(hints.get(name), value) else value)
        except ValidationError as error:
            problem = error.errors()[0]
            raise ValueError(
                f"{where}.{name}: {problem['msg']}, got {without_secrets(problem['input'], name)!r:.80}"
            ) from None
    try:
        return target(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


def _hints(target: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target)
    except NameError:  # annotated with names that only a type checker imports: any value is accepted
        return {}


def load_plugin(item: Mapping[str, Any], where: str, what: str = "verifier") -> Any:
    """The object of `{use: package.module:Name, <settings>}`, constructed with these settings.

    Raises:
        ValueError: `use` is missing or names nothing, or the settings are not its own.
    """
    if not isinstance(item.get("use"), str):
        raise ValueError(
            f"{where} must have `use: package.module:Name` besides its settings, "
            f"got {without_secrets(dict(item))!r:.80}"
        )
    settings = {str(name): value for name, value in item.items() if name != "use"}
    try:
        target = resolve(item["use"], what)
    except ValueError as error:
        raise ValueError(f"{where}.use: {error}") from error
    return construct(target, settings, where)


def _wants_tuple(hint: Any, value: Any) -> bool:
    return isinstance(value, list) and tuple in (typing.get_origin(hint), hint)
