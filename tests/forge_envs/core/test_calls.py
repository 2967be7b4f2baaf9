"""What a policy wrote as an action: calls in three syntaxes, and never an exception."""

import json

import pytest
from hypothesis import given, strategies as st

from forge_envs import read_action, schema_of
from forge_envs.calls import SYNTAXES


def add(a: int, b: int = 0) -> int:
    """Add."""
    return a + b


def search(query: str) -> str:
    """Search."""
    return query


TOOLS = (schema_of(add), schema_of(search))


def named(action):
    return [(call.name, dict(call.arguments)) for call in action.calls]


@pytest.mark.parametrize(
    ("syntax", "text", "calls", "content"),
    [
        (
            "hermes",
            'Let me see. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
            [("add", {"a": 1, "b": 2})],
            "Let me see.",
        ),
        (
            "hermes",
            '<tool_call>{"name":"add","arguments":"{\\"a\\": 1}"}</tool_call><tool_call>{"name":"x"}</tool_call>',
            [("add", {"a": 1}), ("x", {})],
            "",
        ),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})], ""),
        (
            "llama3",
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}',
            [("add", {"a": 1}), ("add", {"a": 2})],
            "",
        ),
        ("llama3", "the answer is {3}", [], "the answer is {3}"),
        ("plain", "so add(1, b=2) it is", [("add", {"a": 1, "b": 2})], "so  it is"),
        ("plain", "search(who is (the) fox?)", [("search", {"query": "who is (the) fox?"})], ""),
        ("plain", "search(12+3) add(a=1)", [("search", {"query": "12+3"}), ("add", {"a": 1})], ""),
        ("plain", "search('quoted')", [("search", {"query": "quoted"})], ""),
        ("plain", "search(12)", [("search", {"query": "12"})], ""),
        ("plain", "search(query=12)", [("search", {"query": "12"})], ""),
        ("plain", "search(query = the fox)", [("search", {"query": "the fox"})], ""),
        ("plain", 'search(query="smile :) now")', [("search", {"query": "smile :) now"})], ""),
        ("plain", r'search("a \" ) quote")', [("search", {"query": 'a " ) quote'})], ""),
        ("plain", "search(who's the fox) yes", [("search", {"query": "who's the fox"})], "yes"),
        ("plain", "research(12) and x.add(1)", [], "research(12) and x.add(1)"),
        ("plain", "search(add(1))", [("search", {"query": "add(1)"})], ""),
    ],
)
def test_tool_calls_of_each_model_syntax_are_parsed(syntax, text, calls, content):
    action = read_action(text, syntax, TOOLS)
    assert (named(action), action.content, action.errors) == (calls, content, ())
    assert [call.id for call in action.calls] == [f"call_{n}" for n in range(len(calls))]


@pytest.mark.parametrize(
    ("syntax", "text", "problem"),
    [
        ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "cannot be read"),
        ("hermes", '<tool_call>{"name": "add"}', "not closed"),
        ("hermes", "<tool_call>[1]</tool_call>", '"name"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be an object"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "more than"),
        ("hermes", "<tool_call>" + "[" * 60_000 + "</tool_call>", "cannot be read"),
        ("llama3", '{"name": "add", "parameters": {"a": 1}', "cannot be read"),
        ("plain", "add(1", "not closed"),
        ("plain", "add(what is it)", "the call's arguments must be written as a=..., b=..."),
    ],
)
def test_unreadable_tool_call_is_reported_as_error(syntax, text, problem):
    action = read_action(text, syntax, TOOLS)
    assert not action.calls
    assert problem in action.errors[0]


pieces = st.lists(
    st.one_of(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", '{"name":', '"add"', "add(", "search(", ")", "(", "{", "}", ";"]
        ),
        st.text(max_size=8),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=3),
            lambda c: st.lists(c) | st.dictionaries(st.text(max_size=3), c),
            max_leaves=4,
        ).map(json.dumps),
    ),
    max_size=12,
).map("".join)


@given(pieces, st.sampled_from(SYNTAXES), st.booleans())
def test_parsing_tool_calls_from_arbitrary_text_never_raises(text, syntax, truncated):
    action = read_action(text, syntax, TOOLS, truncated=truncated)
    assert (action.text, action.truncated) == (text, truncated)
    for call in action.calls:
        assert isinstance(call.name, str)
        assert all(isinstance(name, str) for name in call.arguments)
