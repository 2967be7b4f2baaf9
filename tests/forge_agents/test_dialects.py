"""The vendors' own clients read every answer, and what they send back reads as what was answered."""

import json

import pytest
from pydantic import BaseModel

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

from benchmarks.scripted_gateway import ScriptedGateway  # noqa: E402
from forge_agents.messages import BadRequest, Call, ModelTurn  # noqa: E402

CALLS = (
    Call("", "write", '{ "text":  "hé \\"x\\"", "path": "a.txt" }'),
    Call("", "read", "{}"),
)
TURNS = {
    "text": ModelTurn("", "A text of\nsome length – é.", prompt_tokens=21, completion_tokens=9),
    "thought": ModelTurn("", "Forty-two.", "Let me think about this.", prompt_tokens=21, completion_tokens=9),
    "cut": ModelTurn("", "A text that is", finish="length", prompt_tokens=21, completion_tokens=9),
    "only a thought": ModelTurn("", "", "Without end", finish="length", prompt_tokens=21, completion_tokens=9),
    "calls": ModelTurn(
        "", "Two files.", "I need both.", CALLS, "tool_calls", prompt_tokens=21, cached_tokens=4, completion_tokens=9
    ),
    "bare call": ModelTurn("", "", "", CALLS[:1], "tool_calls", prompt_tokens=21, completion_tokens=9),
}
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": n, "parameters": PARAMETERS}} for n in ("write", "read")]
FLAT_TOOLS = [{"type": "function", "name": n, "parameters": PARAMETERS, "strict": False} for n in ("write", "read")]
CLAUDE_TOOLS = [{"name": n, "input_schema": PARAMETERS} for n in ("write", "read")]
QUESTION = [{"role": "user", "content": "Do it."}]


class Answer(BaseModel):
    value: int


@pytest.fixture(scope="module")
def address():
    """The gateway and its URL, for all tests."""
    gateway = ScriptedGateway(lambda request: [])
    with gateway.serve() as url:
        yield gateway, url


@pytest.fixture
def gateway(address):
    gateway, _ = address
    gateway.failure = None
    gateway.requests.clear()
    gateway.bodies.clear()
    return gateway


@pytest.fixture
def gpt(address):
    with openai.OpenAI(base_url=f"{address[1]}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def claude(address):
    with anthropic.Anthropic(base_url=address[1], api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(params=TURNS)
def turn(request, gateway):
    gateway.answer = lambda _: [TURNS[request.param]]
    return TURNS[request.param]


def meaning(message):
    """A turn of the assistant without the spelling of its arguments."""
    calls = [(call.id, call.name, json.loads(call.arguments)) for call in message.get("calls", ())]
    return message["role"], message["content"], message.get("thought", ""), calls


def expected(turn, prefix, number=0):
    """What a turn must read as when a client sends it back."""
    calls = [
        (f"{prefix}{number}x0x{index}", call.name, json.loads(call.arguments)) for index, call in enumerate(turn.calls)
    ]
    return "assistant", turn.content, turn.thought, calls


# Chat Completions


def chat_plain(client, **extra):
    return client.chat.completions.create(model="m", messages=QUESTION, tools=CHAT_TOOLS, **extra)


def chat_raw(client):
    """The message that a program builds which adds the chunks up by itself."""
    message = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chat_plain(client, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for piece in choice.delta.tool_calls or ():
                if piece.id:
                    function = {"name": piece.function.name, "arguments": ""}
                    message["tool_calls"].append({"id": piece.id, "type": "function", "function": function})
                message["tool_calls"][piece.index]["function"]["arguments"] += piece.function.arguments or ""
            finish = choice.finish_reason or ""
    return message, finish, chunk.usage


def chat_helper(client):
    options = {"include_usage": True}
    with client.chat.completions.stream(
        model="m", messages=QUESTION, tools=CHAT_TOOLS, stream_options=options
    ) as events:
        assert "chunk" in [event.type for event in events]
        return events.get_final_completion()


def test_gateway_chat_completion_works_with_openai_client(gpt, gateway, turn):
    plain = chat_plain(gpt).choices[0].message
    raw, finish, usage = chat_raw(gpt)
    assert finish == turn.finish
    assert (usage.prompt_tokens, usage.completion_tokens) == (21, 9)
    messages = [(0, plain), (0, plain.model_dump()), (0, plain.model_dump(exclude_none=True)), (1, raw)]
    if turn.finish != "length":
        messages.append((2, chat_helper(gpt).choices[0].message))
    for number, message in messages:
        gpt.chat.completions.create(model="m", messages=[*QUESTION, message, *QUESTION])
        assert meaning(gateway.requests[-1][1].messages[1]) == expected(turn, "call_", number)


# Responses


def without_ids(item):
    ids = ("id", "call_id", "encrypted_content")
    return {name: value for name, value in item.to_dict().items() if name not in ids}


def test_streamed_responses_api_output_equals_plain_output(gpt, turn):
    plain = gpt.responses.create(model="m", input="Do it.", tools=FLAT_TOOLS)
    events = list(gpt.responses.create(model="m", input="Do it.", tools=FLAT_TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert [without_ids(item) for item in last.output] == [without_ids(item) for item in plain.output]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in last.output]
    deltas = "".join(event.delta for event in events if event.type == "response.reasoning_summary_text.delta")
    assert deltas == turn.thought
    if turn.finish == "length":
        assert events[-1].type == "response.incomplete"
        return
    with gpt.responses.stream(model="m", input="Do it.", tools=FLAT_TOOLS) as stream:
        final = stream.get_final_response()
    assert final.output_text == turn.content
    arguments = [item.arguments for item in final.output if item.type == "function_call"]
    assert arguments == [call.arguments for call in turn.calls]


def test_gateway_responses_api_works_with_openai_client(gpt, gateway, turn):
    plain = gpt.responses.create(model="m", input="Do it.", tools=FLAT_TOOLS).output
    *_, last = gpt.responses.create(model="m", input="Do it.", tools=FLAT_TOOLS, stream=True)
    bare = [{name: value for name, value in item.to_dict().items() if name != "id"} for item in plain]
    for number, items in ((0, plain), (1, last.response.output), (0, bare)):
        result = {"type": "function_call_output", "call_id": "call_x", "output": "fine"}
        gpt.responses.create(model="m", input=[*QUESTION, *items, result])
        read = gateway.requests[-1][1].messages
        assert [message["role"] for message in read] == ["user", "assistant", "tool"]
        assert meaning(read[1]) == expected(turn, "call_", number)


# Messages


def ask_claude(client, messages=QUESTION, **extra):
    return client.messages.create(model="m", max_tokens=99, messages=messages, tools=CLAUDE_TOOLS, **extra)


def test_gateway_messages_api_works_with_anthropic_client(claude, gateway, turn):
    with claude.messages.stream(model="m", max_tokens=99, messages=QUESTION, tools=CLAUDE_TOOLS) as events:
        streamed = events.get_final_message().content
    plain = ask_claude(claude).content
    for number, content in ((0, streamed), (1, plain), (1, [block.to_dict() for block in plain])):
        ask_claude(claude, [*QUESTION, {"role": "assistant", "content": content}, *QUESTION])
        assert meaning(gateway.requests[-1][1].messages[1]) == expected(turn, "toolu_", number)


def test_anthropic_tool_runner_works_with_gateway_messages_api(claude, gateway):
    @anthropic.beta_tool
    def write(path: str) -> str:
        """Write a file.

        Args:
            path: where.
        """
        return f"wrote {path}"

    call = Call("", "write", '{"path": "a"}')
    turns = [ModelTurn("", calls=(call,), finish="tool_calls"), ModelTurn("", "Done.")]
    gateway.answer = lambda _: [turns[len(gateway.requests)]]
    runner = claude.beta.messages.tool_runner(model="m", max_tokens=99, messages=QUESTION, tools=[write])
    assert runner.until_done().content[0].text == "Done."
    last = gateway.requests[-1][1].messages
    assert [message["role"] for message in last] == ["user", "assistant", "tool"]
    assert (last[2]["content"], last[2]["name"]) == ("wrote a", "write")


# Schemas


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client, which sends the parsed object
def test_api_clients_parse_schema_constrained_answers(gpt, claude, gateway):
    gateway.answer = lambda _: [ModelTurn("", '{"value": 42}')]
    parsed = gpt.chat.completions.parse(model="m", messages=QUESTION, response_format=Answer)
    assert parsed.choices[0].message.parsed == Answer(value=42)
    # The client sends the parsed object back alongside the text.
    gpt.chat.completions.create(model="m", messages=[*QUESTION, parsed.choices[0].message, *QUESTION])
    assert gateway.requests.pop()[1].messages[1]["content"] == '{"value": 42}'
    assert gpt.responses.parse(model="m", input="Do it.", text_format=Answer).output_parsed == Answer(value=42)
    message = claude.messages.parse(model="m", max_tokens=99, messages=QUESTION, output_format=Answer)
    assert message.parsed_output == Answer(value=42)
    schemas = [request.schema for _, request in gateway.requests]
    assert [schema["properties"]["value"]["type"] for schema in schemas] == ["integer"] * 3


# Errors

ERRORS = {
    400: (openai.BadRequestError, anthropic.BadRequestError, "invalid_request_error", "invalid_request_error"),
    401: (openai.AuthenticationError, anthropic.AuthenticationError, "authentication_error", "authentication_error"),
    404: (openai.NotFoundError, anthropic.NotFoundError, "not_found_error", "not_found_error"),
    429: (openai.RateLimitError, anthropic.RateLimitError, "rate_limit_error", "rate_limit_error"),
    503: (openai.InternalServerError, anthropic.InternalServerError, "server_error", "overloaded_error"),
}


@pytest.mark.parametrize("status", ERRORS)
def test_gateway_errors_raise_matching_client_exceptions(gpt, claude, gateway, status):
    of_openai, of_anthropic, openai_type, anthropic_type = ERRORS[status]

    def fail(request):
        raise BadRequest("it is so", "model", status, "a_code")

    gateway.answer = fail
    for ask in (chat_plain, lambda client: client.responses.create(model="m", input="Do it.")):
        with pytest.raises(of_openai, match="it is so") as error:
            ask(gpt)
        assert (error.value.code, error.value.param, error.value.type) == ("a_code", "model", openai_type)
    with pytest.raises(of_anthropic, match="it is so") as error:
        ask_claude(claude)
    assert error.value.body["error"]["type"] == anthropic_type
