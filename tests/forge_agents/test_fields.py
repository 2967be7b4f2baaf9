"""What each dialect reads: every field is honoured, known to change nothing, or named in an error of one line."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("anthropic")
pytest.importorskip("openai")

from forge_agents.dialects.anthropic import AnthropicDialect
from forge_agents.dialects.chat import ChatDialect
from forge_agents.dialects.responses import ResponsesDialect
from forge_agents.messages import BadRequest

DIALECTS = {
    "chat": ChatDialect(),
    "responses": ResponsesDialect(),
    "anthropic": AnthropicDialect(),
}
OPENAI_AND_ANTHROPIC = ("chat", "responses", "anthropic")
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
    ("chat", {"n": 4096}, "n = 4096 is more than 16 answers of one request: send several requests"),
    ("chat", {"n": 0}, "n must be a whole number, 1 or more, got 0"),
    ("chat", {"max_tokens": 1.5}, "max_tokens must be a whole number, 1 or more, got 1.5"),
    ("chat", {"stream": "yes"}, "stream must be true or false, got 'yes'"),
    ("chat", {"frequency_penalty": 0.5}, "frequency_penalty = 0.5 is not supported"),
    ("chat", {"logit_bias": {"5": 1}}, "logit_bias = {'5': 1} is not supported"),
    ("chat", {"stop": ["a"] * 17}, "stop must be at most 16 texts of at most 256 characters"),
    ("chat", {"stop": [""]}, "stop must be a text or a list of texts that are not empty"),
    ("chat", {"top_logprobs": 3}, "top_logprobs needs logprobs: true"),
    ("chat", {"logprobs": True, "top_logprobs": 99}, "top_logprobs must be a whole number, 0 to 20, got 99"),
    ("chat", {"messages": []}, "messages must have at least one message"),
    ("chat", {"messages": "Do it."}, "messages must be a list of objects, got 'Do it.'"),
    ("chat", {"messages": [USER] * 4097}, "messages must be at most 4096, got 4097"),
    ("chat", {"messages": [{"role": "user"}]}, "messages[0].content must be a text"),
    ("chat", {"messages": [{"role": "robot"}]}, "messages[0].role 'robot' is none of system, user, assistant and tool"),
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
    ("chat", {"tool_choice": "required"}, "tool_choice asks for a call, and there are no tools"),
    (
        "chat",
        {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "write"}}},
        "tool_choice names 'write', which is none of the tools",
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
    ("responses", {"include": ["file_search_call.results"]}, "include of 'file_search_call.results' is not supported"),
    ("responses", {"tools": [{"type": "custom", "name": "patch"}]}, "tools[0]: a tool of type 'custom' is not"),
    ("responses", {"tools": [{**FLAT_TOOL, "name": "a.b"}]}, "tools[0].name 'a.b' has other characters than"),
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
    ("anthropic", {"thread": {"type": "create"}}, "thread is not supported: send the whole history"),
    (
        "anthropic",
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        "tools[0]: a tool of type 'bash_20250124' is",
    ),
    ("anthropic", {"mcp_servers": [{"name": "a"}]}, "mcp_servers = [{'name': 'a'}] is not supported"),
    ("anthropic", {"tool_choice": {"type": "some"}}, "tool_choice of type 'some' is not supported"),
    ("anthropic", {"output_config": {"task_budget": {}}}, "output_config supports effort and format alone"),
    (
        "anthropic",
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management: the edit 'clear_tool_uses_20250919' is not supported",
    ),
    ("anthropic", {"messages": [USER, {"role": "assistant", "content": "It"}]}, "the last message is the assistant's"),
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
def test_what_cannot_be_honoured_is_named(dialect, fields, message):
    with pytest.raises(BadRequest) as error:
        read(dialect, **fields)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert error.value.status == 400


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("body", [None, [], "text", {}, {"model": "m"}])
def test_a_body_without_its_fields_is_named(dialect, body):
    with pytest.raises(BadRequest):
        DIALECTS[dialect].read(body)


def test_a_rejected_thread_tells_the_client_to_send_everything():
    with pytest.raises(BadRequest) as error:
        read("anthropic", thread={"type": "continue", "previous_message_id": "msg_1"})
    details = AnthropicDialect().error(error.value)["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


NEUTRAL = {
    "chat": {
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "modalities": ["text"],
        "user": "u",
        "store": True,
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "functions": None,
        "an_unknown_field": None,
        "response_format": {"type": "text"},
    },
    "responses": {
        "background": False,
        "conversation": None,
        "store": False,
        "truncation": "auto",
        "include": ["reasoning.encrypted_content"],
        "client_metadata": {"a": "b"},
        "text": {"format": {"type": "text"}},
        "service_tier": "auto",
        "tools": [{"type": "web_search"}],
    },
    "anthropic": {
        "metadata": {"user_id": "u"},
        "container": None,
        "mcp_servers": [],
        "thread": None,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "cache_control": {"type": "ephemeral"},
        "service_tier": "auto",
    },
}


@pytest.mark.parametrize("dialect", NEUTRAL)
def test_what_changes_nothing_is_accepted(dialect):
    assert read(dialect, **NEUTRAL[dialect]) == read(dialect)


def test_settings_of_sampling_are_the_runs():
    assert read("chat", temperature=0.2, seed=1, top_p=None).overridden == {"temperature": 0.2, "seed": 1}
    request = read("responses", reasoning={"effort": "low"}, text={"verbosity": "low"})
    assert request.overridden == {"reasoning": {"effort": "low"}, "verbosity": "low"}
    request = read("anthropic", thinking={"type": "adaptive"}, top_k=5, output_config={"effort": "high"})
    assert request.overridden == {"thinking": {"type": "adaptive"}, "top_k": 5, "effort": "high"}


def test_fields_of_a_request():
    request = read(
        "chat",
        n=3,
        max_tokens=5,
        max_completion_tokens=7,
        stop="x",
        stream=True,
        stream_options={"include_usage": True},
    )
    assert (request.samples, request.max_tokens, request.stop) == (3, 7, ("x",))
    assert (request.stream, request.stream_usage) == (True, True)
    request = read("responses", max_output_tokens=7, previous_response_id="resp_1", stream=True)
    assert (request.max_tokens, request.previous, request.stream) == (7, "resp_1", True)
    request = read("anthropic", max_tokens=7, stop_sequences=["x", "y"])
    assert (request.max_tokens, request.stop, request.stream) == (7, ("x", "y"), False)


def test_tools_are_the_same_in_every_dialect():
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
def test_which_tools_must_be_called(dialect, tool, choice, expected):
    assert read(dialect, tools=[tool], tool_choice=choice).tool_choice == expected
    assert read(dialect, tools=[tool], tool_choice=None).tool_choice == "auto"


def test_parallel_calls():
    assert not read("chat", parallel_tool_calls=False).parallel_calls
    assert not read("responses", parallel_tool_calls=False).parallel_calls
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert not read("anthropic", tool_choice=choice).parallel_calls
    assert all(read(dialect).parallel_calls for dialect in OPENAI_AND_ANTHROPIC)


def test_schemas_of_answers():
    wrapped = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    flat = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    requests = [
        read("chat", response_format=wrapped),
        read("responses", text={"format": flat}),
        read("anthropic", output_config={"format": {"type": "json_schema", "schema": SCHEMA}}),
        read("anthropic", output_format={"type": "json_schema", "schema": SCHEMA}),
    ]
    assert [request.schema for request in requests] == [SCHEMA] * 4
    for request in (
        read("chat", response_format={"type": "json_object"}),
        read("responses", text={"format": {"type": "json_object"}}),
    ):
        assert request.schema == {"type": "object"}


SYSTEM = {"role": "system", "content": "One.\n\nTwo."}
LATER = {"role": "user", "content": "Later."}


def test_system_messages_become_one():
    messages = [
        {"role": "system", "content": "One."},
        {"role": "developer", "content": [{"type": "text", "text": "Two."}]},
        USER,
        {"role": "system", "content": "Later."},
    ]
    assert read("chat", messages=messages).messages == (SYSTEM, USER, LATER)
    request = read("responses", instructions="One.", input=messages[1:])
    assert request.messages == (SYSTEM, USER, LATER)
    request = read("anthropic", system="One.", messages=[{"role": "system", "content": "Two."}, USER, messages[3]])
    assert request.messages == (SYSTEM, USER, LATER)
    billing = {"type": "text", "text": "x-anthropic-billing-header: v=1"}
    blocks = [{"type": "text", "text": "One."}, {"type": "text", "text": "\nTwo.", "cache_control": {}}]
    assert read("anthropic", system=[billing, *blocks]).messages == (SYSTEM, USER)
    assert read("anthropic", system=[billing]).messages == (USER,)


def test_parts_of_a_text_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for dialect in ("chat", "anthropic"):
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}, USER]
        texts = [message["content"] for message in read(dialect, messages=messages).messages]
        assert texts == ["a\nb", "ab", "Do it."]


def test_results_of_tools():
    results = [
        {"type": "text", "text": "Before."},
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "fine"}]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no such file", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t3", "content": "Error: no such file", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t4"},
        {"type": "text", "text": "Go on."},
    ]
    use = {"type": "tool_use", "id": "t2", "name": "read", "input": {"b": 1, "a": 2}}
    messages = [{"role": "assistant", "content": [use]}, {"role": "user", "content": results}]
    request = read("anthropic", messages=messages)
    assert request.messages[0]["calls"][0].arguments == '{"b": 1, "a": 2}'
    assert [(message["role"], message["content"], message.get("name")) for message in request.messages[1:]] == [
        ("user", "Before.", None),
        ("tool", "fine", ""),
        ("tool", "error: no such file", "read"),
        ("tool", "Error: no such file", ""),
        ("tool", "", ""),
        ("user", "Go on.", None),
    ]


def test_the_text_of_arguments_is_kept():
    call = {**CALL, "function": {"name": "read", "arguments": '{ "a" :1}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "c1", "content": "fine"}]
    request = read("chat", messages=messages)
    assert request.messages[1]["calls"][0].arguments == '{ "a" :1}'
    assert request.messages[2] == {"role": "tool", "content": "fine", "call_id": "c1", "name": "read"}


def test_thoughts_come_back_under_several_names():
    for fields in ({"reasoning_content": "Hm."}, {"reasoning": "Hm."}):
        messages = [USER, {"role": "assistant", "content": "Yes.", **fields}]
        assert read("chat", messages=messages).messages[1]["thought"] == "Hm."
    for fields in (
        {"summary": [{"type": "summary_text", "text": "Hm."}], "content": None},
        {"summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    ):
        items = [USER, {"type": "reasoning", "id": "rs_1", "encrypted_content": "x", **fields}]
        assert read("responses", input=items).messages[1]["thought"] == "Hm."
    blocks = [{"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": "Hm.", "signature": "s"}]
    messages = [USER, {"role": "assistant", "content": blocks}, USER]
    assert read("anthropic", messages=messages).messages[1] == {"role": "assistant", "content": "", "thought": "Hm."}


def test_pieces_of_a_turn_in_separate_messages_are_one_turn():
    pieces = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "text", "text": "Two files."},
        {"type": "tool_use", "id": "t1", "name": "read", "input": {}},
        {"type": "tool_use", "id": "t2", "name": "read", "input": {}},
    ]
    messages = [{"role": "assistant", "content": [piece]} for piece in pieces]
    [turn, _] = read("anthropic", messages=[*messages, USER]).messages
    assert (turn["thought"], turn["content"], [call.id for call in turn["calls"]]) == (
        "Hm.",
        "Two files.",
        ["t1", "t2"],
    )


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
        "include": ["message.output_text.logprobs"],
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
def test_any_other_value_is_read_or_named(dialect, data):
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


@pytest.mark.parametrize("dialect", BODIES)
def test_a_body_of_many_levels_is_named(dialect):
    deep = []
    for _ in range(50_000):
        deep = [deep]
    body = {"model": "m", **BODIES[dialect]}
    for path in places(body):
        with pytest.raises(BadRequest, match=r"the body (has more than 128 levels|must be a JSON object)"):
            DIALECTS[dialect].read(replaced(body, path, deep))


def test_arguments_of_many_levels_are_named():
    function = {"name": "read", "arguments": "[" * 50_000}
    message = {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}
    with pytest.raises(BadRequest, match="must be the text of a JSON object"):
        read("chat", messages=[message])


def test_a_thought_within_the_text_is_the_thought_of_the_turn():
    from forge_agents.dialects.fields import assistant

    assert assistant("", "<think>\nWhy\n</think>\n\nSo.") == assistant("Why", "So.")
    assert assistant("", "Open <think> and </think>.")["content"] == "Open <think> and </think>."
