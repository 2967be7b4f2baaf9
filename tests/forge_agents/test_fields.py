"""What each dialect reads: every field is honoured, known to change nothing, or named in an error of one line."""

import json

import pytest
from hypothesis import given, strategies as st

pytest.importorskip("anthropic")
pytest.importorskip("openai")

from forge.models.tokenizer import character_tokenizer
from forge_agents.dialects.anthropic import AnthropicDialect
from forge_agents.dialects.chat import ChatDialect, usage_of
from forge_agents.dialects.responses import ResponsesDialect
from forge_agents.messages import BadRequest, ModelTurn
from forge_agents.reading import TurnReader
from forge_envs.dialogue import Dialogue

DIALECTS = {
    "chat": ChatDialect(),
    "responses": ResponsesDialect(),
    "anthropic": AnthropicDialect(),
}
USER = {"role": "user", "content": "Do it."}
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"a": 1}'}}
CHAT_TOOL = {"type": "function", "function": {"name": "read", "description": "Reads.", "strict": True}}
FLAT_TOOL = {"type": "function", "name": "read", "description": "Reads.", "strict": None}
CLAUDE_TOOL = {"name": "read", "description": "Reads.", "input_schema": {}, "cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def read(dialect, **fields):
    body = {"model": "m", **({"input": [USER]} if dialect == "responses" else {"messages": [USER]}), **fields}
    return DIALECTS[dialect].read(body)


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
REJECTED = [
    ("chat", {"model": None}, "model must be the name of a model"),
    ("chat", {"temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'?"),
    ("chat", {"n": 4096}, "n must be a whole number, 1 to 16, got 4096"),
    ("chat", {"n": 0}, "n must be a whole number, 1 to 16, got 0"),
    ("chat", {"max_tokens": 1.5}, "max_tokens must be a whole number, 1 or more, got 1.5"),
    ("chat", {"stream": "yes"}, "stream must be true or false, got 'yes'"),
    ("chat", {"frequency_penalty": 0.5}, "frequency_penalty = 0.5 is not supported"),
    ("chat", {"logit_bias": {"5": 1}}, "logit_bias = {'5': 1} is not supported"),
    ("chat", {"stop": [""]}, "stop must be a text or a list of texts that are not empty"),
    ("chat", {"top_logprobs": 3}, "top_logprobs needs logprobs: true"),
    ("chat", {"logprobs": True, "top_logprobs": 99}, "top_logprobs must be a whole number, 0 to 20, got 99"),
    ("chat", {"messages": []}, "messages must have at least one message"),
    ("chat", {"messages": "Do it."}, "messages must be a list of objects, got 'Do it.'"),
    ("chat", {"messages": [{"role": "user"}]}, "messages[0].content must be a text"),
    ("chat", {"messages": [{"role": "robot"}]}, "messages[0].role 'robot' must be system, user, assistant or tool"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages[0].content: a part of type 'image_url' is not supported: this model reads text",
    ),
    (
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "["}}]}]},
        "messages[0].tool_calls[0].function.arguments must be the text of a JSON object, got '['",
    ),
    ("chat", {"tools": [{"type": "custom"}]}, "tools[0]: a tool of type 'custom' is not supported"),
    ("chat", {"tool_choice": "required"}, "tool_choice requires a tool call, but tools is empty"),
    (
        "chat",
        {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "write"}}},
        "tool_choice names 'write', which is not in tools",
    ),
    ("chat", {"response_format": {"type": "grammar"}}, "response_format of type 'grammar' is not supported"),
    (
        "chat",
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema.schema must be a JSON schema, got None",
    ),
    ("responses", {"input": None}, "input must be a text or a list of at least one item"),
    ("responses", {"n": 2}, "unknown field 'n'"),
    ("responses", {"background": True}, "background = True is not supported"),
    ("responses", {"conversation": "conv_1"}, "conversation = 'conv_1' is not supported"),
    ("responses", {"include": ["file_search_call.results"]}, "include = ['file_search_call.results'] is not supported"),
    ("responses", {"tools": [{"type": "custom", "name": "patch"}]}, "tools[0]: a tool of type 'custom' is not"),
    ("responses", {"tools": [{**FLAT_TOOL, "name": "a.b"}]}, "tools[0].name 'a.b' must have only the characters"),
    (
        "responses",
        {"input": [{"type": "item_reference"}]},
        "input[0]: an item of type 'item_reference' is not supported",
    ),
    (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input[0].content: a part of type 'input_file' is not supported: this model reads text",
    ),
    ("responses", {"previous_response_id": 5}, "previous_response_id must be the id of a response"),
    ("anthropic", {"thread": {"type": "create"}}, "thread is not supported: send all messages"),
    (
        "anthropic",
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        "tools[0]: a tool of type 'bash_20250124' is",
    ),
    ("anthropic", {"mcp_servers": [{"name": "a"}]}, "mcp_servers = [{'name': 'a'}] is not supported"),
    ("anthropic", {"tool_choice": {"type": "some"}}, "tool_choice of type 'some' is not supported"),
    ("anthropic", {"output_config": {"task_budget": {}}}, "output_config supports effort and format only"),
    (
        "anthropic",
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management: the edit 'clear_tool_uses_20250919' is not supported",
    ),
    (
        "anthropic",
        {"messages": [USER, {"role": "assistant", "content": "It"}]},
        "the last message must not have role assistant",
    ),
    (
        "anthropic",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content: a part of type 'image' is not supported: this model reads text",
    ),
    (
        "anthropic",
        {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}, USER]},
        "messages[0].content: a block of type 'server_tool_use' is not supported",
    ),
]


@pytest.mark.parametrize(("dialect", "fields", "message"), REJECTED)
def test_unsupported_request_fields_are_reported_by_name(dialect, fields, message):
    with pytest.raises(BadRequest) as error:
        read(dialect, **fields)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert error.value.status == 400


def test_client_sampling_settings_are_reported_as_overridden():
    assert read("chat", temperature=0.2, seed=1, top_p=None).overridden == {"temperature": 0.2, "seed": 1}
    request = read("responses", reasoning={"effort": "low"}, text={"verbosity": "low"})
    assert request.overridden == {"reasoning": {"effort": "low"}, "verbosity": "low"}
    request = read("anthropic", thinking={"type": "adaptive"}, top_k=5, output_config={"effort": "high"})
    assert request.overridden == {"thinking": {"type": "adaptive"}, "top_k": 5, "effort": "high"}


def test_tool_definitions_are_parsed_equally_in_every_api_dialect():
    tools = [
        read("chat", tools=[CHAT_TOOL]).tools,
        read("responses", tools=[FLAT_TOOL]).tools,
        read("anthropic", tools=[CLAUDE_TOOL]).tools,
    ]
    parameters = {"type": "object", "properties": {}}
    function = {"name": "read", "description": "Reads.", "parameters": parameters}
    assert tools == [({"type": "function", "function": function},)] * 3


CHOICES = [
    ("chat", CHAT_TOOL, "required", "required"),
    ("chat", CHAT_TOOL, "none", "none"),
    ("chat", CHAT_TOOL, {"type": "function", "function": {"name": "read"}}, "function:read"),
    ("responses", FLAT_TOOL, "required", "required"),
    ("responses", FLAT_TOOL, {"type": "function", "name": "read"}, "function:read"),
    ("anthropic", CLAUDE_TOOL, {"type": "any"}, "required"),
    ("anthropic", CLAUDE_TOOL, {"type": "auto"}, "auto"),
    ("anthropic", CLAUDE_TOOL, {"type": "none"}, "none"),
    ("anthropic", CLAUDE_TOOL, {"type": "tool", "name": "read"}, "function:read"),
]


@pytest.mark.parametrize(("dialect", "tool", "choice", "expected"), CHOICES)
def test_tool_choice_is_parsed_in_every_api_dialect(dialect, tool, choice, expected):
    assert read(dialect, tools=[tool], tool_choice=choice).tool_choice == expected
    assert read(dialect, tools=[tool], tool_choice=None).tool_choice == "auto"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.floats()
    | st.sampled_from(["", "a", "text", "function", "[", "{}"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
BODIES = {
    "chat": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "a", "reasoning_content": "b", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "a"},
        ],
        "tools": [CHAT_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "read"}},
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
        "stop": ["a"],
        "n": 2,
    },
    "responses": {
        "instructions": "a",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}], "content": None},
            {"type": "function_call", "call_id": "c1", "name": "read", "namespace": "a", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "a"},
        ],
        "tools": [FLAT_TOOL, {"type": "namespace", "name": "a", "tools": [FLAT_TOOL]}],
        "tool_choice": {"type": "function", "name": "read"},
        "text": {"format": {"type": "json_schema", "schema": SCHEMA}, "verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
        "previous_response_id": "a",
    },
    "anthropic": {
        "system": [{"type": "text", "text": "a"}],
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "read", "input": {}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "a", "is_error": True}],
            },
        ],
        "tools": [CLAUDE_TOOL],
        "tool_choice": {"type": "tool", "name": "read", "disable_parallel_tool_use": True},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "context_management": {"edits": [{"type": "a", "keep": "all"}]},
        "stop_sequences": ["a"],
    },
}


def places(value, path=()):
    """The paths of all values in a body."""
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, key))


def replaced(value, path, new):
    """A body with another value at a path."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("dialect", BODIES)
@given(data=st.data())
def test_arbitrary_request_field_is_parsed_or_raises_bad_request(dialect, data):
    body = {"model": "m", **BODIES[dialect]}
    path = data.draw(st.sampled_from(list(places(body))))
    try:
        request = DIALECTS[dialect].read(replaced(body, path, data.draw(VALUES)))
    except BadRequest:
        return
    # A gateway works with these types.
    assert all(isinstance(message["content"], str) for message in request.messages)
    calls = [call for message in request.messages for call in message.get("calls", ())]
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    assert all(isinstance(text, str) for call in calls for text in (call.id, call.name))
    assert all(tool["function"].keys() >= {"name", "parameters"} for tool in request.tools)


@pytest.mark.parametrize(
    ("text", "is_thinking", "count"),
    [("<think>hm</think>yes", False, 17), ("hm</think>yes", True, 10), ("hm, cut", True, 7), ("yes", False, 0)],
)
def test_reasoning_tokens_are_counted_in_response_usage(text, is_thinking, count):
    tokenizer = character_tokenizer()
    reader = TurnReader(Dialogue(tokenizer, "plain"), is_thinking=is_thinking)
    reader.read(tokenizer(text)["input_ids"], lambda: "", truncated=True)
    turn = ModelTurn("r", thought_tokens=reader.thought_tokens)
    answer = DIALECTS["responses"].complete(read("responses"), [turn])
    assert usage_of([turn, turn]).completion_tokens_details.reasoning_tokens == 2 * count
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == count
