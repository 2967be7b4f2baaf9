"""Configurations as files and overrides on the command line."""

import difflib
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from ..system.masking import masked_names, without_secrets
from .plugin import explain_names
from .sections import ConfigError, Json, T, Type, build, keys_of, plain_types, section_in
from .yaml_files import Loader, read_yaml


@dataclass
class Arguments:
    """A command line: `--config FILE`, `--resume RUN`, and overrides `--a.b VALUE` (or `--a.b=VALUE`).

    config: path of the file; None if it is not given.
    resume: the run's folder or "auto"; None if it is not given.
    overrides: (dotted key, text of the value) in the order of the command line.
    """

    config: Path | None
    resume: str | None
    overrides: list[tuple[str, str]]

    @classmethod
    def parse(cls, argv: Sequence[str]) -> "Arguments":
        """Parse the arguments of a command line. ConfigError: an argument is malformed or has no value."""
        arguments = cls(None, None, [])
        words = list(argv)
        while words:
            name, equals, value = words.pop(0).partition("=")
            if not name.startswith("--"):
                # The word may be a part of a secret, such as a password with a space, so it is masked as one.
                option = arguments.overrides[-1][0] if arguments.overrides else ""
                word = without_secrets(name, option)
                raise ConfigError(f"unexpected argument {word!r}: write overrides as --section.key VALUE")

            if not equals:
                if not words:
                    raise ConfigError(explain_names([name[2:]]) or f"{name} needs a value")
                value = words.pop(0)

            if name == "--config":
                arguments.config = find_bundled(Path(value))
            elif name == "--resume":
                arguments.resume = value
            else:
                arguments.overrides.append((name[2:], value))

        return arguments


def find_bundled(path: Path) -> Path:
    """Return the path of an installed configuration for a path such as `apps/grpo/tiny.yaml` that does not exist in the
    working directory; any other path as it is."""
    if path.exists() or path.parts[:1] != ("apps",):
        return path
    if (apps := find_spec("apps")) is None:
        return path
    candidates = (Path(folder, *path.parts[1:]) for folder in apps.submodule_search_locations or ())
    return next(filter(Path.is_file, candidates), path)


def load(cls: type[T], argv: Sequence[str]) -> T:
    """Read the configuration of a command line, `--config FILE` with overrides, as an object of class `cls`.

    Raises:
        ConfigError: as in `read`; or --config is missing, or --resume is given, which only recipes support
            (`forge.recipes.launch.launch`).
    """
    arguments = Arguments.parse(argv)
    if arguments.config is None:
        raise ConfigError("--config FILE is missing")
    if arguments.resume is not None:
        raise ConfigError("--resume is only supported by recipes: omit it")
    return read(cls, arguments.config, arguments.overrides)


def read(cls: type[T], path: Path, overrides: Sequence[tuple[str, str]] = ()) -> T:
    """Read a YAML file with overrides as an object of class `cls`.

    Args:
        overrides: (dotted key, text of the value), as in `Arguments.overrides`. A key that does not exist is searched
            under `services`, so that `--trainer.procs 2` sets `services.trainer.procs`. Values are read as YAML, unless
            the setting only takes text.

    Raises:
        ConfigError: the file is missing or not YAML, a secret in it is masked, or as in `build`.
    """
    values = read_file(path)
    for name, text in overrides:
        _set_value(values, cls, name, text)

    # Secrets in the config.yaml of a run are masked: with "***" a service would fail late, with another error.
    names = [*masked_names(values)]
    if names:
        raise ConfigError(
            f"{path} has {names[0]} masked, because it is a secret: give the original configuration with --config "
            f"FILE, or --{names[0]} VALUE"
        )
    return build(cls, values)


def _parse_override(text: str, hint: Type) -> Json:
    """Return the value of an override: read as YAML if its setting accepts that, otherwise the text itself.

    A text with #, which YAML would cut off as a comment, stays text unless it is quoted or in brackets.

    Args:
        hint: the type of the setting; Any if unknown.

    >>> _parse_override("[1, 2]", list[int]), _parse_override("1", str)
    ([1, 2], '1')
    """
    accepted_types = plain_types(hint)
    is_quoted = len(text) > 1 and text.strip()[:1] + text.strip()[-1:] in ("''", '""', "[]", "{}")
    if re.search(r"(^|\s)#", text) and not is_quoted:
        return text

    try:
        value = yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date that does not exist
        return text

    if object in accepted_types:
        # YAML reads {a} as {a: null}, which is more probably meant as text.
        return text if isinstance(value, dict) and value and ":" not in text else value
    if isinstance(value, str):
        return value if is_quoted else text  # unquoted the text itself, as YAML would join its lines
    return text if str in accepted_types and type(value) not in accepted_types else value


def read_file(path: Path) -> dict[str, Json]:
    """Return the sections of a configuration file as plain data, without checking their keys. ConfigError: it is
    missing or malformed; the message has the fix."""
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: give a configuration file")
    if not path.is_file():
        files = {file.stem: file for file in [*path.parent.glob("*.yml"), *path.parent.glob("*.yaml")]}
        similar = difflib.get_close_matches(path.stem, files, n=1, cutoff=0.7)  # as in `hint_nearest`
        hint = f"; did you mean {files[similar[0]]}?" if similar else ""
        raise ConfigError(f"configuration file {path} does not exist{hint}")

    try:
        values = read_yaml(path)
    except ValueError as error:
        raise ConfigError(str(error)) from None

    if not isinstance(values, dict | None):
        raise ConfigError(f"{path} must be a mapping of keys to values, got {without_secrets(values)!r:.80}")
    return values or {}


def _set_value(values: dict[str, Json], cls: type, name: str, text: str) -> None:
    """Set the dotted key `name` in the plain data of a configuration to the value that `text` stands for.
    ConfigError: a part of the key is not a section."""
    path = name.split(".")
    if _find_type(cls, path) is None and _find_type(cls, ["services", *path]) is not None:
        path = ["services", *path]
    hint = _find_type(cls, path)
    value = _parse_override(text, Any if hint is None else hint)

    for key in path[:-1]:
        if values.get(key) is None:  # a section that the file omits, or sets to null
            values[key] = {}
        values = values[key]
        if not isinstance(values, dict):
            raise ConfigError(f"--{name}: {key!r} is a single value, not a section with keys")

    values[path[-1]] = value


def _find_type(cls: Type, path: list[str]) -> Type:
    """Return the type annotation of the setting at a path of keys in the section `cls`; None if there is none."""
    hint: Type = cls
    for key in path:
        section = section_in(hint)
        if section is not None and typing.get_origin(hint) is dict:  # {name chosen by the user: section}
            hint = section
            continue
        keys = {} if section is None else keys_of(section)
        if key not in keys:
            return None
        hint = keys[key].annotation
    return hint


def check_whole(value: object, name: str, least: int = 1) -> int:
    """Check that a value is an integer of at least `least`, and return it. ValueError: it is not; the message has
    `name`.

    >>> check_whole(3, "problems")
    3
    """
    # bool is a subclass of int: True would pass as 1.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        fix = ": remove the quotes" if isinstance(value, str) and value.strip().isdigit() else ""
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r:.80}{fix}")
    return value
