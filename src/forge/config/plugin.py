"""Plugins: objects by name, `package.module:Name` with settings, from a configuration or a command line."""

import dataclasses
import difflib
import importlib
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Any

from ..system.masking import without_secrets

# Entry points of extensions, `f(names, python) -> line`, which explain settings of other libraries and former names.
SETTING_NAMES = "forge.setting_names"
Object = Any  # of a class that a user names
Json = Any  # a value of a configuration
Type = Any  # a type annotation


def hint_nearest(name: object, names: Iterable[object], *, list_all: bool = True) -> str:
    """Return the end of an error message about an unknown name: the most similar of `names`, or else all of them with
    `list_all`.

    >>> hint_nearest("lerning_rate", ["learning_rate", "steps"])
    "; did you mean 'learning_rate'?"
    """
    if isinstance(name, bool):
        return "; YAML reads a bare yes, no, on or off as true or false: quote the key"

    options = [str(option) for option in names]

    # At difflib's default, 0.6, `deepspeed` is close to `seed` and `lr` to `lora`; a wrong letter is above 0.8.
    close = difflib.get_close_matches(str(name), options, n=1, cutoff=0.7)
    if len(str(name)) > 2:
        close += [option for option in options if option.startswith(str(name))]  # algo for algorithm
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known here: {', '.join(options) or 'none'}" if list_all else ""


def nearest_setting(name: object, names: Iterable[object]) -> str:
    """Return the hint of an error message about an unknown setting: forge's name for a setting of another library, else
    the hint of `hint_nearest`."""
    explanation = explain_names([str(name)])
    return f": {explanation}" if explanation else hint_nearest(name, names)


def explain_names(names: Sequence[str], python: bool = False) -> str:
    """Return one line with forge's names for settings of other libraries; "" if no extension knows them.

    Args:
        names: of the settings.
        python: whether they were arguments of `forge.train` or a similar function, which take keys without a section.
    """
    explanations = (point.load()(names, python) for point in entry_points(group=SETTING_NAMES))
    return next(filter(None, explanations), "")


def resolve(name: str, kind: str, home: str | None = None) -> Object:
    """Import and return the object that `package.module:Name` names.

    Args:
        kind: what errors call it, such as "reward".
        home: the module of names without a colon; None: the full form is required.

    Raises:
        ValueError: the module or the name does not exist.
    """
    module, colon, attribute = name.rpartition(":")
    if not colon and home is None:
        raise ValueError(f"unknown {kind} {name!r}: write it as package.module:Name")

    try:
        return getattr(importlib.import_module(module or str(home)), attribute)
    except (ImportError, AttributeError, SyntaxError) as error:
        # The name is right if its module asks for a package to be installed.
        if isinstance(error, ImportError) and "pip install" in str(error):
            raise ValueError(f"{kind} {name!r}: {error}") from error
        raise ValueError(f"{kind} {name!r} was not found ({error}); write it as package.module:Name") from error


def construct(
    target: Callable[..., Object], settings: Mapping[str, Json], key: str, more_keys: Iterable[str] = ()
) -> Object:
    """Return `target(**settings)`, after checking the settings' names and types against the signature of `target`.

    Args:
        target: a class or a function.
        settings: plain data, as from a file.
        key: the configuration key of the settings, for errors.
        more_keys: keys that the file may have alongside the settings, for hints in errors.

    Raises:
        ValueError: a setting is unknown, missing or of a wrong type, or `target` raises a ValueError or TypeError.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    # The constructors of the class and its bases: one with **kwargs passes these on to the next.
    calls = [target]
    if inspect.isclass(target):
        calls = [vars(base)["__init__"] for base in target.__mro__ if "__init__" in vars(base)]
    parameters: dict[str, inspect.Parameter] = {}
    hints: dict[str, Type] = {}
    first = 1 if inspect.isclass(target) else 0  # after `self`

    for call in calls:
        signature_parameters = inspect.signature(call).parameters.values()
        named = [p for p in signature_parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        parameters = {p.name: p for p in named[first:]} | parameters
        # The annotations of a dataclass are resolved in the modules of the class and its bases.
        with suppress(NameError):  # a name that only type checkers import; then any value is accepted
            hints = typing.get_type_hints(target if dataclasses.is_dataclass(target) else call) | hints
        if all(p.kind is not p.VAR_KEYWORD for p in signature_parameters):
            break

    unknown = [name for name in settings if name not in parameters]
    if unknown:
        raise ValueError(
            f"unknown key {f'{key}.{unknown[0]}'!r}{nearest_setting(unknown[0], [*parameters, *more_keys])}"
        )

    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in settings]
    if missing:
        raise ValueError(f"{f'{key}.{missing[0]}'!r} must be set")

    values: dict[str, Any] = {}
    for name, value in settings.items():
        hint = hints.get(name, Any)
        adapter = TypeAdapter(hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
        # Types are strict, except that a YAML list stands for a tuple, and a whole number for a float.
        is_tuple = isinstance(value, list) and tuple in (typing.get_origin(hint), hint)
        try:
            values[name] = adapter.validate_python(tuple(value) if is_tuple else value)
        except ValidationError as error:
            problem = error.errors()[0]
            raise ValueError(
                f"{key}.{name}: {problem['msg']}, got {without_secrets(problem['input'], name)!r:.80}"
            ) from None

    try:
        return target(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{key}: {error}") from error


def load_plugin(item: Mapping[str, Json], key: str, kind: str = "verifier") -> Object:
    """Return the object that `{use: package.module:Name, <settings>}` describes, constructed with the settings.

    Args:
        key: the configuration key of `item`, for errors.
        kind: what errors call the object.

    Raises:
        ValueError: `use` is missing or unknown, or the settings do not fit.
    """
    if not isinstance(item.get("use"), str):
        raise ValueError(
            f"{key} must have the key `use: package.module:Name` next to its settings, got "
            f"{without_secrets(dict(item))!r:.80}"
        )

    settings = {str(name): value for name, value in item.items() if name != "use"}
    try:
        target = resolve(item["use"], kind)
    except ValueError as error:
        raise ValueError(f"{key}.use: {error}") from error
    return construct(target, settings, key)
