"""Typed, strict configuration: a YAML file and dotted command-line overrides, `--trainer.procs 2`.

Every mistake is an error before anything is started, and names the nearest key that exists.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")


class ConfigError(ValueError):
    """What is wrong with a configuration, and what to do about it; one line."""


class Section:
    """Base of a configuration section: a dataclass that also unpacks, `Generator.options(**cfg.services.generator)`."""

    def keys(self) -> Iterator[str]:
        return (field.name for field in dataclasses.fields(self))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[str]:
        return self.keys()

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@dataclasses.dataclass
class Arguments:
    """A command line: `--config FILE`, `--resume RUN`, and overrides `--a.b VALUE` (or `--a.b=VALUE`).

    Raises:
        ConfigError: a word that is none of these, or a name without its value.
    """

    config: Path | None
    resume: str | None
    overrides: list[tuple[str, str]]

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Arguments:
        found, rest = cls(None, None, []), list(argv)
        while rest:
            name, equals, value = rest.pop(0).partition("=")
            if not name.startswith("--"):
                raise ConfigError(f"did not understand {name!r}: overrides are written --section.key VALUE")
            if not equals:
                if not rest:
                    raise ConfigError(f"{name} needs a value")
                value = rest.pop(0)
            if name == "--config":
                found.config = Path(value)
            elif name == "--resume":
                found.resume = value
            else:
                found.overrides.append((name[2:], value))
        return found


def load(cls: type[T], argv: Sequence[str]) -> T:
    """Read `--config FILE` and overrides into `cls`, see `read`.

    Raises:
        ConfigError: as `read`; or no file is given, or `--resume`, which `forge.recipe.launch` understands.
    """
    arguments = Arguments.parse(argv)
    if arguments.config is None:
        raise ConfigError("--config FILE is missing")
    if arguments.resume is not None:
        raise ConfigError("--resume is understood by recipes only")
    return read(cls, arguments.config, arguments.overrides)


def read(cls: type[T], path: Path, overrides: Sequence[tuple[str, str]] = ()) -> T:
    """Read a YAML file with overrides into `cls`, and run its `validate`.

    A dotted name that does not exist at the top is looked for under `services`, so `--trainer.procs 2` sets
    `services.trainer.procs`. Values are YAML.

    Raises:
        ConfigError: unknown key, wrong type, missing file, malformed YAML, or what `validate` refuses.
    """
    values = _read(path)
    for name, text in overrides:
        _set(values, cls, name, _value(text))
    config = build(cls, values)
    if hasattr(config, "validate"):
        config.validate()
    return config


def build(cls: type[T], values: Any, where: str = "") -> T:
    """Make `cls` from plain data, checking names and types all the way down."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where or 'the configuration'} must be a mapping of keys to values, got {values!r}")
    fields = _fields(cls)
    for name in values:
        if name not in fields:
            raise ConfigError(f"unknown key {_join(where, name)!r}{_nearest(name, fields)}")
    hints = typing.get_type_hints(cls)
    known = {
        fields[name].name: _convert(hints[fields[name].name], _over_default(fields[name], value), _join(where, name))
        for name, value in values.items()
    }
    missing = [n for n, f in fields.items() if f.name not in known and _required(f)]
    if missing:
        raise ConfigError(f"{_join(where, missing[0])!r} must be set")
    return cls(**known)


def _over_default(field: dataclasses.Field, value: Any) -> Any:
    """A section that is given in part keeps the rest of its default, which may not be that of its type."""
    if not isinstance(value, dict) or field.default_factory is dataclasses.MISSING:
        return value
    default = field.default_factory()
    return {**to_dict(default), **value} if dataclasses.is_dataclass(default) else value


def to_dict(config: Any) -> dict[str, Any]:
    """Plain data of a configuration, for writing it down; `build` reads it back."""
    return {name: _plain_data(getattr(config, field.name)) for name, field in _fields(type(config)).items()}


def _plain_data(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain_data(item) for item in value]
    return to_dict(value) if dataclasses.is_dataclass(value) else value


def flat(values: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Plain data of a configuration by dotted name."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, _join(where, name)) if value and isinstance(value, dict) else {_join(where, name): value}
    return found


def _value(text: str) -> Any:
    """An override as YAML; what is none, or would be a mapping, is the text itself."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, dict) and ":" not in text else value


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
        raise ConfigError(f"configuration file {path} does not exist{hint}")
    try:
        values = yaml.load(path.read_text(), Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    return values or {}


class _Loader(yaml.SafeLoader):
    """Reads 1e-6 as a number, which YAML 1.1 takes for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _set(values: dict[str, Any], cls: type, name: str, value: Any) -> None:
    path = name.split(".")
    if not _exists(cls, path) and _exists(cls, ["services", *path]):
        path = ["services", *path]
    for key in path[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--{name}: {key!r} is a value, not a section")
    values[path[-1]] = value


def _exists(cls: Any, path: list[str]) -> bool:
    for key in path:
        fields = _fields(cls) if dataclasses.is_dataclass(cls) else {}
        if key not in fields:
            return False
        cls = _section_type(typing.get_type_hints(cls)[fields[key].name])
    return True


def _section_type(hint: Any) -> Any:
    """The dataclass in `X | None`, else the hint itself."""
    options = [o for o in typing.get_args(hint) if dataclasses.is_dataclass(o)]
    return options[0] if options else hint


def _fields(cls: Any) -> dict[str, dataclasses.Field]:
    """Fields by their key in the file: a trailing underscore keeps Python's keywords out of the way (`async`)."""
    return {field.name.rstrip("_"): field for field in dataclasses.fields(cls)}


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        errors = []
        for option in (o for o in options if o is not type(None)):
            try:
                return _convert(option, value, where)
            except ConfigError as error:
                errors.append(error)
        raise errors[0]
    if origin is typing.Literal:
        if value not in options:
            raise ConfigError(
                f"{where} must be one of {', '.join(map(str, options))}; got {value!r}{_nearest(value, options)}"
            )
        return value
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where)
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list, got {value!r}")
        return [_convert(options[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict or hint is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be a mapping, got {value!r}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is not Any and (not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)):
        raise ConfigError(f"{where} must be {_plain(hint)}, got {value!r}")
    return value


def _plain(hint: type) -> str:
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(hint, str(hint))


def _nearest(name: Any, among: Any) -> str:
    if isinstance(name, bool):
        return "; YAML takes a bare yes, no, on or off for true or false: put the key in quotes"
    near = difflib.get_close_matches(str(name), [str(a) for a in among], n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known here: {', '.join(map(str, among))}"


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else str(name)
