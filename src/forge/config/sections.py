"""Typed, strict configuration: a YAML file and dotted command-line overrides, `--trainer.procs 2`.

A section is a pydantic model, and a component's settings are its section: one default, one check and one description,
from which docs/configuration.md is generated. Every mistake is an error of one line before anything is started, and
names the nearest existing key.
"""

import typing
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, Union

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from ..system.masking import mask_secrets, without_secrets
from .plugin import explain_names, hint_nearest

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

T = TypeVar("T")
Json = Any  # plain data, as YAML files have it
Type = Any  # a type annotation: a class, a union, Literal[...], ...


class ConfigError(ValueError):
    """An invalid configuration: the fault and the fix in one line."""


class UnknownKey(ConfigError, TypeError):
    """Error: Python code constructs a section with an argument that is not one of its keys."""


class _OneLineErrors(ModelMetaclass):
    """Metaclass that turns validation errors of sections constructed in Python into one line, like errors of files.

    It has to be a metaclass, since pydantic raises its ValidationError, a report of several lines, after `__init__` and
    the validators have run.
    """

    def __call__(cls, *args: object, **settings: object) -> Any:
        try:
            return super().__call__(*args, **settings)
        except ValidationError as error:
            is_unknown = any(fault["type"] in UNKNOWN for fault in error.errors())
            raise (UnknownKey if is_unknown else ConfigError)(_describe_error(cls, error)) from None


class Section(BaseModel, metaclass=_OneLineErrors):
    """Base class of configuration sections, which are also the settings of components.

    A trailing underscore avoids Python's keywords: the field `async_` has the key `async`. If an inner section is given
    with only some keys, the others keep the values of the field's default, which may differ from the defaults of the
    inner section's class. `_check` checks conditions between fields. A section unpacks as a mapping:
    `Generator.options(**cfg.services.generator)`.

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
    def _over_defaults(cls, values: Json) -> Json:
        """Return the values with inner sections filled up from the defaults of their fields."""
        if not isinstance(values, dict):
            return values

        values = cls.canonical(values)
        filled: dict[str, Json] = {}
        for key, field in keys_of(cls).items():
            default = field.get_default(call_default_factory=True)
            if isinstance(default, Section) and isinstance(values.get(key), dict):
                filled[key] = default.model_dump(by_alias=True, exclude_unset=True) | values[key]
        return values | filled

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        self._check()
        return self

    def _check(self) -> None:
        """Check conditions between fields; subclasses override this method. ValueError: a condition does not hold; the
        message has the fix."""

    @classmethod
    def canonical(cls, values: dict[str, Json]) -> dict[str, Json]:
        """Return the plain data of a section before validation; subclasses override this method to convert Python
        objects."""
        return values

    def keys(self) -> Iterator[str]:
        """Return an iterator of the names of the fields, for unpacking with `**`."""
        return iter(type(self).model_fields)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def differs(self, *names: str) -> bool:
        """Return whether any of the named fields differs from its default."""
        return any(self[name] != type(self).model_fields[name].get_default(call_default_factory=True) for name in names)

    def only(self, settings: "type[Section]") -> dict[str, Json]:
        """Return {name: value} of the fields that the section class `settings` has as well."""
        return {name: self[name] for name in settings.model_fields}


def build(cls: type[T], values: Json, key: str = "") -> T:
    """Return a section of class `cls`, constructed from plain data.

    Args:
        key: the dotted key of the section, for errors; "" for a whole configuration.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range, or what `_check` raises.
    """
    try:
        return cls.model_validate(values)  # type: ignore[attr-defined]
    except ValidationError as error:
        raise ConfigError(_describe_error(cls, error, key)) from None


def to_dict(config: BaseModel) -> dict[str, Json]:
    """Return a configuration as plain data, which `build` reads back. Objects that were passed from Python become
    `module:name`, and rows become a text with their number and digest."""
    return _to_plain(config.model_dump(by_alias=True))


def _to_plain(value: object) -> Json:
    if isinstance(value, dict):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "describe"):
        return value.describe()
    nameable = value if hasattr(value, "__qualname__") else type(value)
    return f"{nameable.__module__}:{nameable.__qualname__}"


def flatten_config(values: dict[str, Json], prefix: str = "") -> dict[str, Json]:
    """Return the plain data of a configuration as {dotted key: value}; `prefix` is the key of `values` itself.

    >>> flatten_config({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    settings: dict[str, Json] = {}
    for name, value in values.items():
        key = _join_key(prefix, name)
        settings |= flatten_config(value, key) if value and isinstance(value, dict) else {key: value}
    return settings


def plain_types(hint: Type) -> set[type]:
    """Return the Python types that the values of a type annotation have in a file; `object` stands for any.

    >>> sorted(plain.__name__ for plain in plain_types(list[int] | float | None))
    ['NoneType', 'float', 'int', 'list']
    """
    if hint is Any:
        return {object}
    if typing.get_origin(hint) in (Union, UnionType):
        return {plain for member in typing.get_args(hint) for plain in plain_types(member)}
    if typing.get_origin(hint) is Annotated:
        return plain_types(typing.get_args(hint)[0])
    if typing.get_origin(hint) is typing.Literal:
        return {type(choice) for choice in typing.get_args(hint)}

    kind: Any = typing.get_origin(hint) or hint
    if isinstance(kind, type) and issubclass(kind, Section):
        return {dict}
    return {float, int} if kind is float else {kind}


def keys_of(cls: type[Section]) -> dict[str, FieldInfo]:
    """Return {key in a file: field} of a section class."""
    return {field.alias or name: field for name, field in cls.model_fields.items()}


def section_in(hint: Type) -> type[Section] | None:
    """Return the section class X in a type annotation such as `X`, `X | None`, `list[X]` or `dict[str, X]`; None if
    there is none."""
    if isinstance(hint, type) and issubclass(hint, Section):
        return hint
    return next(filter(None, map(section_in, typing.get_args(hint))), None)


def choices_in(hint: Type) -> tuple[Json, ...]:
    """Return the values of the Literal in a type annotation; () if there is none.

    >>> choices_in(typing.Literal["fifo", "random"] | None)
    ('fifo', 'random')
    """
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return next(filter(None, map(choices_in, typing.get_args(hint))), ())


UNKNOWN = ("extra_forbidden", "invalid_key")  # pydantic's kinds of errors of keys that do not exist
# What errors say was expected, by pydantic's kind of error.
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
# The same for errors of a limit, which follows.
LIMITS = {"greater_than_equal": "at least", "greater_than": "above", "less_than_equal": "at most", "less_than": "below"}


def _describe_error(cls: Type, errors: ValidationError, key: str = "") -> str:
    """Return one line that describes the first error of a section: of an unknown key if there is one, since a misspelt
    key is also missing.

    Args:
        cls: class of the section.
        key: the dotted key of the section.
    """
    # The keys of a file for another library are explained together in one line.
    unknown = [error for error in errors.errors() if error["type"] in UNKNOWN]
    foreign = [
        name
        for error in unknown
        for name in _leaf_names(".".join(filter(None, (key, *map(str, error["loc"])))), error["input"])
    ]
    explanation = explain_names(foreign) if foreign else ""
    if explanation:
        return f"unknown key{'s' if len(foreign) > 1 else f' {foreign[0]!r}'}: {explanation}"

    fault: Mapping[str, Json] = (unknown or errors.errors())[0]
    kind = fault["type"]
    value = without_secrets(fault["input"], ".".join(map(str, fault["loc"])))
    path = fault["loc"]
    if kind == "invalid_key":
        path = (*path[:-1], str(value))

    # Follow pydantic's location through the sections, to find the key as a file has it and the type of the setting.
    # Items of the location that are neither keys nor indices name members of unions.
    hint = cls
    for item in path:
        section = section_in(hint)
        if isinstance(item, int):
            key += f"[{item}]"
        elif section is not None and typing.get_origin(hint) is dict:
            key = _join_key(key, item)
            hint = section
        elif section is not None and item in keys_of(section):
            key = _join_key(key, item)
            hint = keys_of(section)[item].annotation
        elif section is not None and kind in UNKNOWN:
            name = fault["input"] if kind == "invalid_key" else item
            # Of the inner sections, those that have the key. Those of `services` all have the same keys.
            inner_sections = {
                inner_key: section_in(field.annotation)
                for inner_key, field in keys_of(section).items()
                if inner_key != "services" and typing.get_origin(field.annotation) is not dict
            }
            owners = [owner for owner, inner in inner_sections.items() if inner is not None and name in keys_of(inner)]
            if owners and not key:
                candidates = [f"{owner}.{name}" for owner in owners]
                return f"unknown key {item!r}; did you mean {' or '.join(map(repr, candidates))}?"
            return f"unknown key {_join_key(key, item)!r}{hint_nearest(name, keys_of(section))}"

    if kind == "missing":
        return f"{key!r} must be set{_describe_form(key, hint)}"
    if kind == "value_error":
        text = mask_secrets(str(fault["ctx"]["error"]))
        return text if text.startswith(key) else f"{key}: {text}"

    expected = f"of another kind ({fault['msg']})"
    if kind in TYPES:
        expected = TYPES[kind]
    elif kind in LIMITS:
        [limit] = fault["ctx"].values()
        above_whole = kind == "greater_than" and isinstance(limit, int)
        expected = f"at least {limit + 1}" if above_whole else f"{LIMITS[kind]} {limit:g}"
    elif kind == "too_short":
        expected = "not empty"
    elif kind == "literal_error":
        choices = choices_in(hint)
        similar = hint_nearest(value, choices, list_all=False)  # the message already lists the choices
        return f"{key} must be one of {', '.join(map(str, choices))}; got {value!r}{similar}"

    form = _describe_form(key, hint, value) if kind == "model_type" else ""
    return f"{key or 'the configuration'} must be {expected}, got {value!r:.80}{form}"


def _leaf_names(name: str, value: Json) -> list[str]:
    """Return the dotted names of all settings within the value of the key `name`; the key itself if it is not a
    mapping, or an empty one."""
    if not isinstance(value, dict) or not value:
        return [name]
    return [leaf for key, item in value.items() for leaf in _leaf_names(f"{name}.{key}", item)]


def _describe_form(section_key: str, hint: Type, value: object = None) -> str:
    """Return the end of an error message that shows how a section is written, with its required key or its first one;
    "" if the setting is not a section.

    Args:
        value: what was given instead of the section.
    """
    section = section_in(hint)
    if section is None or not section_key or typing.get_origin(hint) in (list, dict):
        return ""

    keys = keys_of(section)
    required_keys = (key for key, field in keys.items() if field.is_required())
    key = next(required_keys, next(iter(keys)))
    text = value if isinstance(value, str) and str in plain_types(keys[key].annotation) else "..."
    return f": write {section_key}: {{{key}: {text}}}, or --{section_key}.{key} {text} on the command line"


def _join_key(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else str(name)
