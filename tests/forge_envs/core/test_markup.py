"""Tool calls between tags, as families write them that have no tokenizer here, and whatever else a model may write."""

import json

import pytest
from hypothesis import given, strategies as st

from forge_envs import schema_of
from forge_envs.calls import SYNTAXES, read_action, syntax_of


def search(query: str, most: int = 3) -> str:
    """Search."""
    return query


TOOLS = (schema_of(search),)
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
BROKEN = {
    "deepseek": DEEPSEEK.format('function<｜tool▁sep｜>search\n```json\n{"query": \n```'),
    "glm": "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a</tool_call>",
    "qwen_xml": "<tool_call>\n<function=search>\n<parameter=query>\na\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "search"',
    "harmony": '<|channel|>commentary to=functions.search<|message|>{"query',
    "hermes": '<tool_call>\n{"name": "search"\n</tool_call>',
    "llama3": '{"name": "search"',
    "gemma": '<|tool_call>call:search{query:<|"|>a<|"|>,most}<tool_call|>',
}


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        ("deepseek", DEEPSEEK.format('function<｜tool▁sep｜>search\n```json\n{"query": "a\\n", "most": 2}\n```')),
        ("deepseek", DEEPSEEK.format('search<｜tool▁sep｜>{"query": "a\\n", "most": 2}')),
        (
            "glm",
            "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a\n</arg_value>\n<arg_key>most</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>",
        ),
        (
            "qwen_xml",
            "<tool_call>\n<function=search>\n<parameter=query>\na\n\n</parameter>\n<parameter=most>\n2\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        ("gemma", '<|tool_call>call:search{most:2,query:<|"|>a\n<|"|>}<tool_call|>'),
        ("gemma", '<|tool_call>call:search{most:2,query:<|"|>a\n<|"|>}'),  # its closing tag ends the turn
        ("plain", "<|tool_call_start|>[search(query='a\n', most=2)]<|tool_call_end|>"),  # LFM's
        ("mistral", '[TOOL_CALLS][{"name": "search", "arguments": {"query": "a\\n", "most": 2}}]'),
        ("mistral", '[TOOL_CALLS]search[ARGS]{"query": "a\\n", "most": 2}'),
        ("harmony", '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query":"a\\n","most":2}'),
        ("harmony", ' to=functions.search<|channel|>commentary json<|message|>{"query": "a\\n", "most": 2}<|call|>'),
    ],
)
def test_tool_call_markup_of_each_model_family_is_parsed(syntax, text):
    plan = "<|channel|>analysis<|message|>a plan<|end|><|start|>assistant" if syntax == "harmony" else "a plan</think>"
    action = read_action(plan + text, syntax, TOOLS)
    assert [(call.name, call.arguments) for call in action.calls] == [("search", {"query": "a\n", "most": 2})]
    assert action.errors == ()
    assert action.content.removeprefix("<think>\n").replace("\n", "") == "a plan</think>"


def test_tool_call_syntax_is_detected_from_chat_template():
    signs = "<|tool_call>call: <|channel|>final <arg_key> <function= <tool_call> <｜tool▁calls▁begin｜> [TOOL_CALLS]"
    found = [syntax_of(f"{{{{ '{sign}' }}}} <tools>") for sign in [*signs.split(), "ipython"]]
    assert found == ["gemma", "harmony", "glm", "qwen_xml", "hermes", "deepseek", "mistral", "llama3"]
    assert syntax_of("{{ message.content }}") == "plain"


def test_gemma_tool_calls_end_at_tags_and_are_ignored_in_thoughts():
    call = '<|tool_call>call:search{query:<|"|>a<|"|>}'
    unclosed = read_action(f"{call}{call}<tool_call|>", "gemma", TOOLS)
    assert len(unclosed.calls) == len(unclosed.errors) == 1
    thought = read_action(f"<|channel>thought\n{call}<tool_call|>\n<channel|>{call}", "gemma", TOOLS)
    assert len(thought.calls) == 1
    deep = read_action(f"<|tool_call>call:search{{query:{'[' * 20_000}{']' * 20_000}}}", "gemma", TOOLS)
    assert not deep.calls
    assert len(deep.errors) == 1


def test_malformed_tool_argument_before_valid_ones_is_an_error():
    text = (
        "<tool_call><function=search><parameter query>a</parameter><parameter=most>2</parameter></function></tool_call>"
    )
    action = read_action(text, "qwen_xml", TOOLS)
    assert not action.calls
    assert action.errors == ("a call cannot be read: '<parameter query>a</parameter>' is not an argument",)


@pytest.mark.parametrize("syntax", BROKEN)
def test_broken_tool_call_markup_gives_one_error(syntax):
    action = read_action(BROKEN[syntax], syntax, TOOLS)
    assert len(action.errors) == 1
    assert action.calls == ()


def test_tool_calls_inside_thoughts_are_ignored():
    call = '<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>'
    action = read_action(f"<think>\nmaybe {call}\n</think>\n\nno", "hermes", TOOLS)
    assert (action.calls, action.content) == ((), f"<think>\nmaybe {call}\n</think>\n\nno")
    analysis = f"<|channel|>analysis<|message|>{call}<|end|><|start|>assistant<|channel|>final<|message|>no"
    assert read_action(analysis, "harmony", TOOLS).content == f"<think>\n{call}\n</think>\n\nno"


PIECES = [
    *("<tool_call>", "</tool_call>", "<function=search>", "</function>", "<parameter=query>", "</parameter>", "[ARGS]"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "<|channel|>", "analysis", "to=search"),
    *("<|message|>", "<|end|>", "<|call|>", "<|start|>assistant", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁sep｜>", "search", "\n```json\n", "```", "</think>", "[", "{", '"', "}", "]", " ", "\n", "[[[", "1e999"),
    '{"name": "search", "arguments": {"query": "a"}}',
]


@pytest.mark.parametrize("syntax", SYNTAXES)
@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
def test_arbitrary_markup_text_gives_well_typed_tool_calls(syntax, text):
    action = read_action(text, syntax, TOOLS)
    assert all(isinstance(call.name, str) and isinstance(call.arguments, dict) for call in action.calls)
    assert json.dumps([call.arguments for call in action.calls]) or action.errors
