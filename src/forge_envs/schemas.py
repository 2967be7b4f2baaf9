"""The parameters of a tool, which are a JSON Schema: the errors of a call, and values that a model wrote as text."""

import ast
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from jsonschema import Draft202012Validator, SchemaError, ValidationError
from jsonschema.exceptions import best_match
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

# The JSON Schema of a function in OpenAI's format, and the arguments of a call.
Schema = Mapping[str, Any]
Arguments = Mapping[str, Any]

_LONGEST = 1 << 16  # characters of a value that is read as Python
_SLOW = ("pattern", "patternProperties", "uniqueItems")
# Of a laxer schema these are stricter, or depend on the names that patterns match.
_STRICTER = ("not", "disallow", "if", "contains", "additionalProperties", "unevaluatedProperties", "unevaluatedItems")


class Parameters:
    """The parameters of a function in OpenAI's format. A `$ref` to another document is not fetched.

    Patterns and `uniqueItems` are not checked, for they may take hours, which no timeout ends, and a pattern may be
    JavaScript's: the tool itself decides. In a schema that has any, `not`, `if` and the like are left to it too.

    Attributes:
        properties: the schema of each parameter by its name, including references and alternatives.

    Raises:
        ValueError: they are no JSON Schema.
    """

    def __init__(self, function: Schema) -> None:
        schema = function.get("parameters")
        self._schema: Any = {} if schema is None or schema is True else schema
        try:
            kind = validator_for(self._schema, default=Draft202012Validator)
            kind.check_schema(self._schema, format_checker=None)  # patterns may be JavaScript's

            # A part that names its own version would be checked by that version's class.
            self._schema = _without_versions(self._schema)
            text = json.dumps(self._schema)
            if any(f'"{word}"' in text for word in _SLOW):
                nothing: Any = lambda *_: None  # noqa: E731
                one_of = kind.VALIDATORS.get("anyOf", nothing)
                kind = extend(kind, dict.fromkeys((*_SLOW, *_STRICTER), nothing) | {"oneOf": one_of})

            # With an empty registry, for the default one requests the addresses in a server's schema.
            self._validator = kind(self._schema, registry=Registry())
            self._resolver = Registry().resolver_with_root(DRAFT202012.create_resource(self._schema))
            parts = list(self._schema_parts(self._schema, set()))
            properties_of_parts = [dict(part.get("properties", {})) for part in parts]
        except Exception as error:  # of whatever a server sends as a schema: there is no common class
            raise ValueError(
                f"the parameters of {function.get('name')} are no JSON Schema: {_cut_error(error)}"
            ) from None

        self.properties: dict[str, Any] = {}
        for properties in properties_of_parts:
            self.properties = {**properties, **self.properties}

        # JSON Schema allows others alongside the listed ones, unless it says so; for tools a misspelt name is an error.
        self._open = not any("properties" in part for part in parts) or any(
            part.get("additionalProperties", False) is not False or "patternProperties" in part for part in parts
        )

    def mismatch(self, arguments: Arguments) -> str:
        """Return the error in the arguments of a call; "" if there is none. Null is as good as no value for an optional
        parameter, as signatures have it."""
        # Missing and unknown names first: their messages help most.
        required = self._schema.get("required", ()) if isinstance(self._schema, Mapping) else ()
        if missing := [name for name in required if name not in arguments]:
            return f"missing {', '.join(missing)}"
        if unknown := [name for name in arguments if name not in self.properties and not self._open]:
            return f"no parameter {', '.join(map(repr, unknown))}: it has {', '.join(self.properties) or 'none'}"
        values = {name: value for name, value in arguments.items() if value is not None or name in required}

        try:
            error = best_match(self._validator.iter_errors(values))
            with_nulls = best_match(self._validator.iter_errors(dict(arguments))) if error else None
        except Unresolvable:  # a document elsewhere: the tool itself decides
            return ""
        except Exception as failure:  # of whatever a model writes as values
            return f"its arguments cannot be checked: {type(failure).__name__}: {_cut_error(failure)}"

        return "" if error is None or with_nulls is None else _error_line(error)

    def value(self, name: str, text: str, *, python: bool = False) -> Any:
        """Return the value of a parameter that is written as text: JSON where the schema takes that, else the text
        itself.

        Args:
            python: also literals of Python, such as True, None and {'a': 1}.
        """
        schema = self.properties.get(name, True)
        try:
            # Text that is not JSON is the value itself.
            value = _parse_value(text, python)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return text
        error, as_text = self._find_error(schema, value), self._find_error(schema, text)
        if as_text is None:
            return value if error is None and not isinstance(value, str) else text  # quotes are a part of a text
        if error is None:
            return value
        # The one that has the right type, for its error says more.
        return text if error.validator == "type" and as_text.validator != "type" else value

    def takes(self, name: str, value: object) -> bool:
        """Return whether a parameter may have this value."""
        return self._find_error(self.properties.get(name, True), value) is None

    def _find_error(self, schema: object, value: object) -> ValidationError | None:
        try:
            return best_match(self._validator.evolve(schema=schema).iter_errors(value))
        except Unresolvable:
            return None
        except Exception as failure:  # as in mismatch
            return ValidationError(_cut_error(failure))

    def _schema_parts(self, schema: object, followed: set[str]) -> Iterator[Schema]:
        """Yield a schema, and those that its references and alternatives name."""
        if not isinstance(schema, Mapping):
            return
        yield schema
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            with suppress(Unresolvable):  # an error of each call
                yield from self._schema_parts(self._resolver.lookup(reference).contents, followed)
        # Parameters may be named in any alternative.
        alternatives = [schema.get(word) for word in ("if", "then", "else")]
        for word in ("allOf", "anyOf", "oneOf"):
            alternatives += schema.get(word, [])
        for alternative in alternatives:
            yield from self._schema_parts(alternative, followed)


def parameters_of(function: Schema) -> Parameters:
    """Return the parameters of a tool, which are any where they are no JSON Schema: a server's tools are read as they
    are."""
    try:
        return Parameters(function)
    except ValueError:
        return Parameters({})


def _without_versions(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        return {word: _without_versions(part) for word, part in schema.items() if word != "$schema"}
    return [_without_versions(part) for part in schema] if isinstance(schema, list) else schema


def _parse_value(text: str, python: bool) -> Any:
    """Parse JSON, or Python's literals. ValueError and others: the text is neither."""
    try:
        return json.loads(text)
    except ValueError:
        if not python or len(text) > _LONGEST:
            raise
    value = ast.literal_eval(ast.parse(text.strip(), "<model output>", mode="eval"))
    return json.loads(json.dumps(value))


def _error_line(error: ValidationError) -> str:
    """Return an error for the policy, with its place."""
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in error.absolute_path).lstrip(".")
    return f"{path}: {_cut_error(error)}" if path else _cut_error(error)


def _cut_error(error: Exception) -> str:
    return f"{error.message if isinstance(error, ValidationError | SchemaError) else error}"[:200]
