"""Delimiters of calls within the values of arguments."""

import json

import pytest
from hypothesis import given, strategies as st

from forge_envs import read_action, schema_of


def write(path: str, text: str, tags: list[str] | None = None) -> str:
    """Write a file."""
    return path


TOOLS = (schema_of(write),)
TAGS = [
    *("<tool_call>", "</tool_call>", "<function=write>", "</function>", "<parameter=text>", "</parameter>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "</think>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|call|>", "<|end|>", "<|message|>", ";", ")"),
    *("<|start|>assistant", "<|return|>", "```", "\n```json\n", '"', "'", "\\", "{", "}", "\n"),
]


def hermes(arguments):
    return f"<tool_call>\n{json.dumps({'name': 'write', 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def llama3(arguments):
    return json.dumps({"name": "write", "parameters": arguments}, ensure_ascii=False)


def mistral(arguments):
    return f"[TOOL_CALLS][{json.dumps({'name': 'write', 'arguments': arguments}, ensure_ascii=False)}]"


def mistral_named(arguments):
    return f"[TOOL_CALLS]write[CALL_ID]abc[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


def deepseek(arguments):
    body = json.dumps(arguments, ensure_ascii=False)
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n{body}\n```<｜tool▁call▁end｜>"


def deepseek_v31(arguments):
    return f"<｜tool▁call▁begin｜>write<｜tool▁sep｜>{json.dumps(arguments, ensure_ascii=False)}<｜tool▁call▁end｜>"


def harmony(arguments):
    body = json.dumps(arguments, ensure_ascii=False)
    return f"<|channel|>commentary to=functions.write <|constrain|>json<|message|>{body}<|call|>"


def plain(arguments):
    return f"write({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def shown(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def qwen_xml(arguments):
    pairs = (f"<parameter={name}>\n{shown(value)}\n</parameter>\n" for name, value in arguments.items())
    return f"<tool_call>\n<function=write>\n{''.join(pairs)}</function>\n</tool_call>"


def glm(arguments):
    pairs = (f"<arg_key>{name}</arg_key>\n<arg_value>{shown(value)}</arg_value>\n" for name, value in arguments.items())
    return f"<tool_call>write\n{''.join(pairs)}</tool_call>"


IN_JSON = [hermes, llama3, mistral, mistral_named, deepseek, deepseek_v31, harmony, plain]
IN_XML = [qwen_xml, glm]


def read(form, text):
    syntax = {"mistral_named": "mistral", "deepseek_v31": "deepseek"}.get(form.__name__, form.__name__)
    return read_action(text, syntax, TOOLS)


@pytest.mark.parametrize("form", IN_JSON, ids=lambda form: form.__name__)
@given(st.lists(st.sampled_from(TAGS) | st.text(max_size=3), max_size=8).map("".join))
def test_quoted_json_tool_arguments_are_read_verbatim(form, text):
    arguments = {"path": "a </tool_call>", "text": text, "tags": [text, "x"]}
    action = read(form, form(arguments))
    assert action.errors == ()
    assert [dict(call.arguments) for call in action.calls] == [arguments]


PLAIN = [
    "ends with </tool_call> here",
    "it's one </parameter> of many",
    "one </arg_value> of many",
    "the tag <parameter=x> or <arg_value> opens a value",
    "<|call|> and <｜tool▁call▁end｜> and [TOOL_CALLS] and [ARGS]",
    "thought </think> and more",
    "don't",
    "",
]
# In XML a value ends where another tag of the call follows.
NESTED = [
    "a <tool_call> begins a call, </tool_call> ends it",
    "print('</parameter></function></tool_call>')",
    'print("</arg_value></tool_call>", "<arg_key>")',
    's = """\n</parameter>\n</function>\n</tool_call>\n"""',
    "```xml\n</arg_value>\n</tool_call>\n```\nis how it ends",
    qwen_xml({"path": "inner", "text": "1"}),
    glm({"path": "inner", "text": "1"}),
    hermes({"path": "inner", "text": "1"}),
]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        *((form, text) for form in IN_JSON for text in (*PLAIN, *NESTED)),
        *((form, text) for form in IN_XML for text in PLAIN),
    ],
)
def test_delimiters_inside_argument_values_do_not_end_tool_calls(form, text):
    arguments = {"path": "p", "text": text, "tags": ["</tool_call>", "</parameter>\n</function>", "</arg_value>"]}
    action = read(form, "so " + form(arguments) if form is not llama3 else form(arguments))
    assert action.errors == ()
    assert [dict(call.arguments) for call in action.calls] == [arguments]
    assert action.content in ("so", "")


@pytest.mark.parametrize("syntax", ["hermes", "glm", "qwen_xml", "mistral", "deepseek", "harmony"])
@pytest.mark.parametrize("unit", TAGS)
def test_unclosed_tool_call_tags_are_parsed_in_linear_time(syntax, unit):
    assert len(read_action(unit * (200_000 // len(unit)), syntax, TOOLS).calls) <= 64


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("qwen_xml", "<function=write>\n<parameter=path\na\n</parameter>\n</function>"),
        ("qwen_xml", "<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=text\nb</function>"),
        ("qwen_xml", "write(path=1)"),
        ("glm", "write\n<arg_value>a</arg_value>"),
        ("hermes", '{"name": "write", "arguments": []}'),
    ],
)
def test_malformed_tool_call_is_an_error_and_next_call_is_parsed(form, text):
    good = {"hermes": hermes, "qwen_xml": qwen_xml, "glm": glm}[form]({"path": "b"})
    action = read_action(f"<tool_call>{text}</tool_call>\n{good}", form, TOOLS)
    assert [dict(call.arguments) for call in action.calls] == [{"path": "b"}]
    assert len(action.errors) == 1
