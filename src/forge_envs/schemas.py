"""Checks tool calls by the JSON schema of the tool's parameters, and parses values that a model wrote as text."""

import ast
import json
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
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

_LONGEST = 1 << 16  # characters of a value that is parsed as Python
_SLOW = ("pattern", "patternProperties", "uniqueItems")  # keywords whose check may take hours: they are not checked
# Keywords that may reject a right value once the slow ones accept everything, such as {"not": {"pattern": "a"}}.
_STRICTER = ("not", "disallow", "if", "contains", "additionalProperties", "unevaluatedProperties", "unevaluatedItems")


class Parameters:
    """The parameters of a tool, a JSON schema by which the arguments of calls are checked.

    Some parts of a schema are not checked but left to the tool: patterns and `uniqueItems`, whose check may take hours,
    which no timeout ends, and patterns may be JavaScript's; in a schema with one of these, `not`, `if` and the like;
    and a `$ref` to another document, which is not fetched.

    Args:
        function: the tool's function in OpenAI's format, whose "parameters" are the schema; without them, any
            arguments are right.

    Attributes:
        properties: the schema of each parameter by its name, including those in references and alternatives.

    Raises:
        ValueError: the parameters are not a JSON schema.
    """

    def __init__(self, function: Schema) -> None:
        schema = function.get("parameters")
        self._schema: Any = {} if schema is None or schema is True else schema
        try:
            validator_class = validator_for(self._schema, default=Draft202012Validator)
            # Without a format checker, which would reject patterns in JavaScript's syntax.
            validator_class.check_schema(self._schema, format_checker=None)

            # A part with another "$schema" would be checked by the class of that version, not by the one extended here.
            self._schema = _without_versions(self._schema)
            text = json.dumps(self._schema)
            if any(f'"{keyword}"' in text for keyword in _SLOW):
                accept_all: Any = lambda *_: None  # noqa: E731
                # oneOf accepts one alternative only: without their patterns, several may accept a right value.
                any_of = validator_class.VALIDATORS.get("anyOf", accept_all)
                unchecked = dict.fromkeys((*_SLOW, *_STRICTER), accept_all)
                validator_class = extend(validator_class, unchecked | {"oneOf": any_of})

            # An empty registry: the default one would request addresses that a server has put into its schema.
            self._validator = validator_class(self._schema, registry=Registry())
            self._resolver = Registry().resolver_with_root(DRAFT202012.create_resource(self._schema))
            parts = list(self._schema_parts(self._schema, set()))
            properties_of_parts = [dict(part.get("properties", {})) for part in parts]
        except Exception as error:  # a server may send anything as a schema: the errors have no common class
            raise ValueError(
                f"the parameters of {function.get('name')} are no JSON Schema: {_cut_error(error)}"
            ) from None

        # Where several parts have a parameter of the same name, the first one, of the outer schema, has priority.
        self.properties: dict[str, Any] = dict(ChainMap(*properties_of_parts))

        # Whether other parameters are allowed. By JSON Schema they are unless a schema excludes them; but for tools, a
        # misspelt name should be an error unless a schema allows it.
        self._open = not any("properties" in part for part in parts) or any(
            part.get("additionalProperties", False) is not False or "patternProperties" in part for part in parts
        )

    def mismatch(self, arguments: Arguments) -> str:
        """Return an error message for the policy about the arguments of a call; "" if they are right.

        Null for an optional parameter counts as no value, since models often write it for parameters with a default.

        >>> schema = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
        >>> Parameters({"name": "roll", "parameters": schema}).mismatch({"n": "six"})
        "n: 'six' is not of type 'integer'"
        """
        # Missing and unknown names come first: their messages help the policy most.
        required = self._schema.get("required", ()) if isinstance(self._schema, Mapping) else ()
        if missing := [name for name in required if name not in arguments]:
            return f"missing {', '.join(missing)}"
        if unknown := [name for name in arguments if name not in self.properties and not self._open]:
            return f"no parameter {', '.join(map(repr, unknown))}: it has {', '.join(self.properties) or 'none'}"
        without_nulls = {name: value for name, value in arguments.items() if value is not None or name in required}

        # The arguments are right if the schema accepts them with or without their nulls.
        try:
            error = best_match(self._validator.iter_errors(without_nulls))
            error_with_nulls = best_match(self._validator.iter_errors(dict(arguments))) if error else None
        except Unresolvable:  # the schema refers to another document: the tool itself decides
            return ""
        except Exception as failure:  # a model may write anything as values: the errors have no common class
            return f"its arguments cannot be checked: {type(failure).__name__}: {_cut_error(failure)}"

        return "" if error is None or error_with_nulls is None else _error_line(error)

    def value(self, name: str, text: str, *, python: bool = False) -> Any:
        """Return the value of a parameter that a model wrote as text: its JSON if the schema accepts it, or the text.

        Args:
            name: the parameter.
            python: parse Python's literals too, such as True, None and {'a': 1}.

        >>> parameters = Parameters({"parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}})
        >>> parameters.value("n", "12"), parameters.value("s", "12")
        (12, '12')
        """
        schema = self.properties.get(name, True)
        try:
            value = _parse_value(text, python)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return text

        value_error, text_error = self._find_error(schema, value), self._find_error(schema, text)
        if text_error is None:
            # If both are accepted, the parsed value is taken, unless it is a text: its quotes are part of the text.
            return value if value_error is None and not isinstance(value, str) else text
        if value_error is None:
            return value
        # Neither is accepted: the one of the right type is taken, since the error in it tells the policy more.
        has_text_type = value_error.validator == "type" and text_error.validator != "type"
        return text if has_text_type else value

    def takes(self, name: str, value: object) -> bool:
        """Return whether the schema of a parameter accepts a value; any value for an unknown parameter."""
        return self._find_error(self.properties.get(name, True), value) is None

    def _find_error(self, schema: object, value: object) -> ValidationError | None:
        try:
            return best_match(self._validator.evolve(schema=schema).iter_errors(value))
        except Unresolvable:
            return None
        except Exception as failure:  # as in mismatch
            return ValidationError(_cut_error(failure))

    def _schema_parts(self, schema: object, followed: set[str]) -> Iterator[Schema]:
        """Yield a schema and, recursively, the schemas of its references and alternatives.

        Args:
            followed: the references that were followed already; new ones are added.
        """
        if not isinstance(schema, Mapping):
            return
        yield schema
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            with suppress(Unresolvable):  # `mismatch` handles it at each call
                yield from self._schema_parts(self._resolver.lookup(reference).contents, followed)
        # Any alternative may name parameters.
        alternatives = [schema.get(keyword) for keyword in ("if", "then", "else")]
        lists = (schema.get(keyword, []) for keyword in ("allOf", "anyOf", "oneOf"))
        for alternative in chain(alternatives, *lists):
            yield from self._schema_parts(alternative, followed)


def parameters_of(function: Schema) -> Parameters:
    """Return the parameters of a tool; ones that accept any arguments, if the tool's are not a JSON schema."""
    try:
        return Parameters(function)
    except ValueError:
        return Parameters({})


def _without_versions(schema: Any) -> Any:
    # Return a schema without the "$schema" keywords in it.
    if isinstance(schema, Mapping):
        return {keyword: _without_versions(part) for keyword, part in schema.items() if keyword != "$schema"}
    return [_without_versions(part) for part in schema] if isinstance(schema, list) else schema


def _parse_value(text: str, python: bool) -> Any:
    """Return the value of a JSON text or, with `python`, of a Python literal; ValueError or others if it is neither."""
    try:
        return json.loads(text)
    except ValueError:
        if not python or len(text) > _LONGEST:
            raise
    value = ast.literal_eval(ast.parse(text.strip(), "<model output>", mode="eval"))
    # As JSON would have it: a tuple becomes a list, and a set, which JSON does not have, an error.
    return json.loads(json.dumps(value))


def _error_line(error: ValidationError) -> str:
    """Return an error in one line with the path of the wrong value: "points[0].x: ..."."""
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in error.absolute_path).lstrip(".")
    return f"{path}: {_cut_error(error)}" if path else _cut_error(error)


def _cut_error(error: Exception) -> str:
    return f"{error.message if isinstance(error, ValidationError | SchemaError) else error}"[:200]
