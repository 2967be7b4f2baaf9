"""Parameters of tools as JSON Schema, and values that are written as text."""

import asyncio
import functools
from typing import Any

import pytest

from forge_envs import Action, Toolbox, ToolCall, read_action
from forge_envs.schemas import Parameters

TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}},
    "required": ["name"],
}


def tool(name: str, **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **schema}}}


def one(schema: Any, **more: Any) -> dict[str, Any]:
    return tool("f", properties={"x": schema}, **more)["function"]


@pytest.mark.parametrize(
    ("schema", "value", "fault"),
    [
        ({"type": ["string", "null"]}, "a", ""),
        ({"type": ["string", "null"]}, None, ""),
        ({"type": ["string", "null"]}, 3, "x: 3 is not of type 'string', 'null'"),
        ({"type": ["integer", "boolean"]}, True, ""),
        ({"type": "integer"}, True, "x: True is not of type 'integer'"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, [1], "x: [1] is not"),
        ({"anyOf": [{"type": "integer", "minimum": 3}, {"const": "all"}]}, "all", ""),
        ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, 6, "x: 6 is valid under each of"),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, "a", "x: 'a' is too short"),
        ({"not": {"type": "string"}}, "a", "x: 'a' should not be valid under"),
        ({"const": {"a": 1}}, {"a": 1}, ""),
        ({"const": 4}, 5, "x: 4 was expected"),
        ({"enum": ["C", None]}, None, ""),
        ({"enum": ["C", 1]}, True, "x: True is not one of"),
        (True, {"any": ["thing"]}, ""),
        ({}, "thing", ""),
        (False, 1, "False schema does not allow 1"),
        ({"type": "array", "items": {"type": "integer"}}, [1, "2"], "x[1]: '2' is not of type"),
        ({"prefixItems": [{"type": "string"}], "items": False}, ["a", 1], "x: "),
        ({"type": "object", "additionalProperties": {"type": "number"}}, {"k": "v"}, "x.k: 'v' is not of type"),
        ({"$ref": "#/$defs/Tree"}, {"name": "a", "children": [{"name": "b"}]}, ""),
        (
            {"$ref": "#/$defs/Tree"},
            {"name": "a", "children": [{"children": []}]},
            "x.children[0]: 'name' is a required",
        ),
        ({"$ref": "https://example.org/elsewhere.json"}, 1, ""),  # is not fetched: the tool decides
        ({"$ref": "#/nowhere"}, 1, ""),
        ({"type": "string", "pattern": "^\\p{L}+$"}, "a", ""),  # JavaScript's: the tool decides
        ({"type": "string", "pattern": "^[a-z]+$"}, "A", ""),
        ({"type": "string", "pattern": "^[a-z]+$"}, 1, "x: 1 is not of type"),
        ({"type": "string", "format": "date"}, "no date", ""),  # an annotation
    ],
)
def test_tool_argument_errors_follow_json_schema(schema, value, fault):
    found = Parameters(one(schema, required=["x"], **{"$defs": {"Tree": TREE}})).mismatch({"x": value})
    assert found.startswith(fault) if fault else found == ""


@pytest.mark.parametrize(
    ("parameters", "arguments", "fault"),
    [
        (None, {"a": 1}, ""),
        (True, {"a": 1}, ""),
        ({}, {"a": 1}, ""),
        ({"type": "object"}, {"a": 1}, ""),
        ({"type": "object", "properties": {}}, {"a": 1}, "no parameter 'a': it has none"),
        ({"properties": {"b": {}}, "additionalProperties": True}, {"a": 1}, ""),
        ({"properties": {"b": {}}, "additionalProperties": {"type": "string"}}, {"a": 1}, "a: 1 is not of type"),
        ({"properties": {"b": {}}, "patternProperties": {"^a": {"type": "string"}}}, {"a": 1}, ""),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"const": 1}}}}}, {"a": 1}, ""),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"const": 1}}}}}, {"b": 1}, "no parameter 'b'"),
        ({"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, {"b": 1}, ""),
        ({"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, {"a": 1}, "'b' is a dependency of 'a'"),
        ({"properties": {"a": {"type": "integer"}}}, {"a": None}, ""),  # optional: as if it was left out
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"a": None}, "a: None is not of type"),
    ],
)
def test_tool_parameters_of_any_schema_shape_are_checked(parameters, arguments, fault):
    found = Parameters({"name": "f", "parameters": parameters}).mismatch(arguments)
    assert found.startswith(fault) if fault else found == ""


def test_invalid_tool_parameter_schema_raises_before_calls():
    class Server:
        def schemas(self):
            return [tool("broken", properties={"x": {"type": "text"}})]

        async def call(self, name, arguments):
            raise AssertionError

    with pytest.raises(ValueError, match="the parameters of broken are no JSON Schema: 'text' is not valid"):
        Toolbox(servers=[Server()])


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "text"},
        {"$schema": []},
        {"properties": []},
        {"required": "x"},
        {"anyOf": {}},
        [1],
        "object",
        3,
        pytest.param(functools.reduce(lambda schema, _: {"anyOf": [schema]}, range(3000), {}), id="deep"),
    ],
)
def test_invalid_tool_schema_does_not_prevent_parsing_tool_calls(parameters):
    function = {"name": "f", "parameters": parameters}
    with pytest.raises(ValueError, match="the parameters of f are no JSON Schema"):
        Parameters(function)
    text = "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
    assert read_action(text, "glm", [{"type": "function", "function": function}]).calls[0].arguments == {"x": 1}


def test_remote_tools_with_union_types_are_called():
    class Server:
        def schemas(self):
            return [tool("ask", properties={"q": {"type": ["string", "null"]}, "n": {"$ref": "#/$defs/N"}})]

        async def call(self, name, arguments):
            return f"{name} {dict(arguments)}"

    calls = [ToolCall("ask", {"q": None, "n": 2}), ToolCall("ask", {"q": 5}), ToolCall("ask", {"q": "a", "m": 1})]
    messages = asyncio.run(Toolbox(servers=[Server()]).answer(Action("", "", tuple(calls))))
    assert [message["content"] for message in messages] == [
        "ask {'q': None, 'n': 2}",
        "error: ask: q: 5 is not of type 'string', 'null'",
        "error: ask: no parameter 'm': it has q, n",
    ]


BOTH = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (BOTH, "12345", "12345"),
        (BOTH, "null", None),
        ({"type": ["null", "string"]}, "[1, 2]", "[1, 2]"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({}, '"quoted"', '"quoted"'),
        ({"enum": ["C", "F"]}, '"F"', "F"),
        ({"type": "string", "maxLength": 3}, "12345", "12345"),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": "007"}, "007", "007"),
        ({"allOf": [{"type": "string"}]}, "1.50", "1.50"),
        ({"$ref": "#/$defs/Zip"}, "8001", "8001"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", 7),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "object"}, '{"a": null}', {"a": None}),
        ({}, "[1, true]", [1, True]),
        (True, "plain words", "plain words"),
    ],
)
@pytest.mark.parametrize("python", [False, True])
def test_tool_argument_text_is_converted_to_schema_type(schema, text, value, python):
    parameters = Parameters(one(schema, **{"$defs": {"Zip": {"type": "string", "pattern": "^[0-9]+$"}}}))
    found = parameters.value("x", text, python=python)
    assert (found, type(found)) == (value, type(value))


# What Qwen3-Coder's template does: objects and lists as JSON, all else as Python writes it; older ones write all so.
@pytest.mark.parametrize("write", [str, repr])
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "boolean"}, True),
        ({"type": "boolean"}, False),
        ({"type": ["integer", "null"]}, None),
        ({"type": "number"}, -1.5e-7),
        ({"type": "object"}, {"on": True, "off": None, "name": "it's"}),
        ({"type": "array"}, [True, [None, {"k": 'a "quote"'}], 3]),
        ({"anyOf": [{"type": "boolean"}, {"type": "integer"}]}, True),
        ({}, {"deep": [{"er": False}]}),
    ],
)
def test_python_literals_in_tool_arguments_are_parsed_exactly(schema, value, write):
    text = "<tool_call>\n<function=f>\n<parameter=x>\n" + write(value) + "\n</parameter>\n</function>\n</tool_call>"
    action = read_action(text, "qwen_xml", [tool("f", properties={"x": schema})])
    assert action.errors == ()
    assert action.calls[0].arguments == {"x": value}
    assert type(action.calls[0].arguments["x"]) is type(value)
