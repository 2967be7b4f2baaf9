"""Typed, strict configuration: a YAML file and dotted command-line overrides, `--trainer.procs 2`.

A section is a pydantic model, and a component's settings are its section: one default, one check and one description,
which docs/configuration.md is made of. Every mistake is an error of one line before anything is started, and names the
nearest key that exists.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from ..system.masking import masked, masked_names, without_secrets
from .plugin import nearest, warn_of_code
from .yaml_files import Loader, read_yaml

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

T = TypeVar("T")


class ConfigError(ValueError):
    """An invalid configuration: the fault and the remedy in one line."""


class _OneLine(ModelMetaclass):
    """Errors of a section that Python makes are as those of a file."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        try:
            return super().__call__(*args, **settings)
        except ValidationError as error:
            raise ConfigError(_line(cls, error)) from None


class Section(BaseModel, metaclass=_OneLine):
    """Base of a configuration section, and so of the settings of a component.

    A trailing underscore keeps Python's keywords out of the way: the field `async_` is the key `async`. A section that
    is given in part keeps the rest of its default, which may differ from that of its type. `_check` holds what concerns
    several fields. Sections unpack: `Generator.options(**cfg.services.generator)`.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        use_attribute_docstrings=True,
        alias_generator=lambda name: name.rstrip("_"),
        populate_by_name=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _over_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = cls.canonical(values)
        parts: dict[str, Any] = {}
        for key, field in keys_of(cls).items():
            default = field.get_default(call_default_factory=True)
            if isinstance(default, Section) and isinstance(values.get(key), dict):
                parts[key] = default.model_dump(by_alias=True, exclude_unset=True) | values[key]
        return values | parts

    @model_validator(mode="after")
    def _checked(self) -> Any:
        self._check()
        return self

    def _check(self) -> None:
        """ValueError: fields that do not go together; says which and what to do."""

    @classmethod
    def canonical(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The values by the section's own keys, where it can be written in another way too. ConfigError: see there."""
        return values

    @classmethod
    def canonical_path(cls, path: list[str]) -> list[str]:
        """The path of a setting by the section's own keys, as `canonical`."""
        return path

    def keys(self) -> Iterator[str]:
        """Names of the fields, for unpacking with `**`."""
        return iter(type(self).model_fields)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def differs(self, *names: str) -> bool:
        """Whether any of these fields differs from its default."""
        return any(self[name] != type(self).model_fields[name].get_default() for name in names)

    def only(self, settings: type[Section]) -> dict[str, Any]:
        """The values of the fields that `settings` has as well."""
        return {name: self[name] for name in settings.model_fields}


@dataclass
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
        """Read the words of a command line. ConfigError: see the class."""
        found, rest = cls(None, None, []), list(argv)
        while rest:
            name, equals, value = rest.pop(0).partition("=")
            if not name.startswith("--"):
                before = found.overrides[-1][0] if found.overrides else ""
                word = without_secrets(name, before)
                raise ConfigError(f"did not understand {word!r}: overrides are written --section.key VALUE")
            if not equals:
                if not rest:
                    raise ConfigError(f"{name} needs a value")
                value = rest.pop(0)
            if name == "--config":
                found.config = bundled(Path(value))
            elif name == "--resume":
                found.resume = value
            else:
                found.overrides.append((name[2:], value))
        return found


def bundled(path: Path) -> Path:
    """A configuration of the installed recipes for a path such as `apps/grpo/tiny.yaml`, if there is no such file in
    the working directory; any other path as it is."""
    if path.exists() or path.parts[:1] != ("apps",) or (apps := find_spec("apps")) is None:
        return path
    places = (Path(folder, *path.parts[1:]) for folder in apps.submodule_search_locations or ())
    return next(filter(Path.is_file, places), path)


def load(cls: type[T], argv: Sequence[str]) -> T:
    """Read `--config FILE` and overrides into `cls`, see `read`.

    Raises:
        ConfigError: as `read`; or no file is given, or `--resume`, which `forge.recipes.launch.launch` understands.
    """
    arguments = Arguments.parse(argv)
    if arguments.config is None:
        raise ConfigError("--config FILE is missing")
    if arguments.resume is not None:
        raise ConfigError("--resume is understood by recipes only")
    return read(cls, arguments.config, arguments.overrides)


def read(cls: type[T], path: Path, overrides: Sequence[tuple[str, str]] = ()) -> T:
    """Read a YAML file with overrides into `cls`.

    A dotted name that does not exist at the top is looked for under `services`, so `--trainer.procs 2` sets
    `services.trainer.procs`. Values are YAML, except for what a setting of text does not take as that.

    Raises:
        ConfigError: missing file, malformed YAML, a value that is masked, as in the config.yaml of a run, or as
            `build`.
    """
    values = read_file(path)
    warn_of_code(path, values)
    if issubclass(cls, Section):
        values = cls.canonical(values)
    for name, text in overrides:
        _set(values, cls, name, text)
    if names := [*masked_names(values)]:
        raise ConfigError(
            f"{path} does not hold the secret in {names[0]}, which is masked: give the original configuration with "
            f"--config FILE, or --{names[0]} VALUE"
        )
    return build(cls, values)


def build(cls: type[T], values: Any, where: str = "") -> T:
    """Make the section `cls` from plain data.

    Args:
        where: the key of the section, for errors.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range, or what `_check` raises.
    """
    try:
        return cls.model_validate(values)  # type: ignore[attr-defined]
    except ValidationError as error:
        raise ConfigError(_line(cls, error, where)) from None


def to_dict(config: Any) -> dict[str, Any]:
    """Plain data of a configuration, for writing it down; `build` reads it back. Objects that were passed from Python
    are written as `module:name`, rows as their number and digest."""
    return _plain(config.model_dump(by_alias=True))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "describe"):
        return value.describe()
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def flat(values: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Plain data of a configuration by dotted name."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, _join(where, name)) if value and isinstance(value, dict) else {_join(where, name): value}
    return found


def _value(text: str, hint: Any) -> Any:
    """An override as YAML, if it is a value that the setting takes; else the text as it is. So is text with a #, which
    YAML would cut off as a comment.

    Args:
        hint: the type of the setting; Any, if it is unknown.
    """
    kinds = _kinds(hint)
    quoted = len(text) > 1 and text.strip()[:1] + text.strip()[-1:] in ("''", '""', "[]", "{}")
    if re.search(r"(^|\s)#", text) and not quoted:
        return text
    try:
        value = yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError, RecursionError):  # a ValueError is of a date that does not exist
        return text
    if object in kinds:
        return text if isinstance(value, dict) and value and ":" not in text else value
    if isinstance(value, str):
        return value if quoted else text  # YAML folds lines
    return text if str in kinds and type(value) not in kinds else value


def _kinds(hint: Any) -> set[type]:
    """The plain types of a setting; `object` stands for any."""
    if hint is Any:
        return {object}
    if typing.get_origin(hint) in (Union, UnionType):
        return set().union(*map(_kinds, typing.get_args(hint)))
    if typing.get_origin(hint) is Annotated:
        return _kinds(typing.get_args(hint)[0])
    if typing.get_origin(hint) is typing.Literal:
        return {type(choice) for choice in typing.get_args(hint)}
    kind = typing.get_origin(hint) or hint
    if isinstance(kind, type) and issubclass(kind, Section):
        return {dict}
    return {float, int} if kind is float else {kind}


def read_file(path: Path) -> dict[str, Any]:
    """The content of a configuration file. ConfigError: it is missing or malformed; says what to do."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: give the configuration file")
    if not path.is_file():
        files = {file.stem: file for file in [*path.parent.glob("*.yml"), *path.parent.glob("*.yaml")]}
        near = difflib.get_close_matches(path.stem, files, n=1, cutoff=0.7)  # see `nearest`
        hint = f"; did you mean {files[near[0]]}?" if near else ""
        raise ConfigError(f"configuration file {path} does not exist{hint}")
    try:
        values = read_yaml(path)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(values, dict | None):
        raise ConfigError(f"{path} must be a mapping of keys to values, got {without_secrets(values)!r:.80}")
    return values or {}


def _set(values: dict[str, Any], cls: type, name: str, text: str) -> None:
    path = name.split(".")
    if issubclass(cls, Section):
        path = cls.canonical_path(path)
    if _hint(cls, path) is None and _hint(cls, ["services", *path]) is not None:
        path = ["services", *path]
    for key in path[:-1]:
        if values.get(key) is None:  # a section that the file leaves out, or sets to null
            values[key] = {}
        values = values[key]
        if not isinstance(values, dict):
            raise ConfigError(f"--{name}: {key!r} is a value, not a section")
    hint = _hint(cls, path)
    values[path[-1]] = _value(text, Any if hint is None else hint)


def _hint(cls: Any, path: list[str]) -> Any:
    """The type of a setting; None: there is none of this name."""
    hint: Any = cls
    for key in path:
        section = section_in(hint)
        keys = {} if section is None else keys_of(section)
        if key not in keys:
            return None
        hint = keys[key].annotation
    return hint


def keys_of(cls: type[Section]) -> dict[str, FieldInfo]:
    """The fields of a section by their keys in a file."""
    return {field.alias or name: field for name, field in cls.model_fields.items()}


def section_in(hint: Any) -> type[Section] | None:
    """The section in a type such as `X`, `X | None` or `list[X]`."""
    if isinstance(hint, type) and issubclass(hint, Section):
        return hint
    return next(filter(None, map(section_in, typing.get_args(hint))), None)


def choices_in(hint: Any) -> tuple[Any, ...]:
    """The values of the Literal in a type."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return next(filter(None, map(choices_in, typing.get_args(hint))), ())


TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of keys to values",
}
LIMITS = {"greater_than_equal": "at least", "greater_than": "above", "less_than_equal": "at most", "less_than": "below"}


def _line(cls: Any, errors: ValidationError, where: str = "") -> str:
    """One error of several: an unknown key first, for it explains a missing one."""
    unknown = ("extra_forbidden", "invalid_key")
    error: Mapping[str, Any] = min(errors.errors(), key=lambda error: error["type"] not in unknown)
    kind, hint = error["type"], cls
    value = without_secrets(error["input"], ".".join(map(str, error["loc"])))
    if kind == "invalid_key":
        error = {**error, "loc": (*error["loc"][:-1], str(value))}
    for item in error["loc"]:
        section = section_in(hint)
        if isinstance(item, int):
            where += f"[{item}]"
        elif section is not None and item in (keys := keys_of(section)):
            where, hint = _join(where, item), keys[item].annotation
        elif section is not None and kind in unknown:
            name = error["input"] if kind == "invalid_key" else item
            if not where and (places := _places(section, name)):
                return f"unknown key {item!r}; did you mean {' or '.join(map(repr, places))}?"
            return f"unknown key {_join(where, item)!r}{nearest(name, keys_of(section))}"
        # All else names a member of a union.
    if kind == "missing":
        return f"{where!r} must be set{_form(where, hint)}"
    if kind == "value_error":
        text = masked(str(error["ctx"]["error"]))
        return text if text.startswith(where) else f"{where}: {text}"
    wanted = f"of another kind ({error['msg']})"
    if kind in TYPES:
        wanted = TYPES[kind]
    elif kind in LIMITS:
        [limit] = error["ctx"].values()
        above_whole = kind == "greater_than" and isinstance(limit, int)
        wanted = f"at least {limit + 1}" if above_whole else f"{LIMITS[kind]} {limit:g}"
    elif kind in ("too_short",):
        wanted = "not empty"
    elif kind == "literal_error":
        known = choices_in(hint)
        near = nearest(value, known).partition("; known here")[0]  # they are named already
        return f"{where} must be one of {', '.join(map(str, known))}; got {value!r}{near}"
    form = _form(where, hint, value) if kind == "model_type" else ""
    return f"{where or 'the configuration'} must be {wanted}, got {value!r:.80}{form}"


def _places(section: type[Section], name: str) -> list[str]:
    """The dotted names of a key in the sections of a configuration, those of services aside, which all have the
    same."""
    inner = {key: section_in(field.annotation) for key, field in keys_of(section).items() if key != "services"}
    return [f"{key}.{name}" for key, part in inner.items() if part is not None and name in keys_of(part)]


def _form(where: str, hint: Any, value: object = None) -> str:
    """How a section is written, for errors: with the keys that it needs, or the first that it has."""
    section = section_in(hint)
    if section is None or not where or typing.get_origin(hint) is list:
        return ""
    keys = keys_of(section)
    key = next((key for key, field in keys.items() if field.is_required()), next(iter(keys)))
    text = value if isinstance(value, str) and str in _kinds(keys[key].annotation) else "..."
    return f": write {where}: {{{key}: {text}}}, or --{where}.{key} {text} on the command line"


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else str(name)
