"""Google's dialect: what Gemini CLI sends and reads. benchmarks/agent_clients.py runs the program itself."""

import json

import pytest

from forge_agents.dialects.gemini import GeminiDialect
from forge_agents.messages import BadRequest, Call, Delta, ModelTurn

DIALECT = GeminiDialect()
USER = {"role": "user", "parts": [{"text": "Do it."}]}
CALLS = (Call("call_1", "read", '{"path": "a"}'), Call("call_2", "read", '{"path": "b"}'))
TURN = ModelTurn("resp_1", "Two files.", "I need both.", CALLS, "tool_calls", None, 21, 4, 9)
PARAMETERS = {"type": "object", "properties": {"file_path": {"type": "string"}}}


def read(**fields):
    return DIALECT.read({"model": "m", "stream": True, "contents": [USER], **fields})


def written_events(turn):
    """The answers that a stream of a turn has."""
    writer = DIALECT.events(read(), ["resp_1"])
    data = writer.begin(21) + writer.delta(Delta(0, thought=turn.thought)) + writer.ping()
    for begin in range(0, len(turn.content), 5):
        data += writer.delta(Delta(0, content=turn.content[begin : begin + 5]))
    for call in turn.calls:
        data += writer.delta(Delta(0, call=call))
    data += writer.end([turn])
    lines = data.decode().split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_an_answer_and_its_stream_come_back_as_they_were():
    plain = DIALECT.complete(read(), [TURN])
    assert plain["candidates"][0]["finishReason"] == "STOP"
    events = written_events(TURN)
    parts = [part for event in events for item in event.get("candidates", ()) for part in item["content"]["parts"]]
    assert events[-1]["usageMetadata"] == plain["usageMetadata"]
    assert plain["usageMetadata"]["totalTokenCount"] == 30
    for content in (plain["candidates"][0]["content"], {"role": "model", "parts": parts}):
        turn = read(contents=[USER, content]).messages[1]
        assert turn == {"role": "assistant", "content": "Two files.", "thought": "I need both.", "calls": list(CALLS)}


def test_an_answer_that_was_cut():
    turn = ModelTurn("resp_1", "A text that", finish="length")
    assert DIALECT.complete(read(), [turn])["candidates"][0]["finishReason"] == "MAX_TOKENS"
    assert written_events(turn)[-1]["candidates"][0]["finishReason"] == "MAX_TOKENS"


def results(*ids):
    parts = [
        {"functionResponse": {**({"id": identity} if identity else {}), "name": "read", "response": response}}
        for identity, response in zip(ids, ({"output": "fine"}, {"error": "no such file"}, {"lines": 2}), strict=False)
    ]
    return {"role": "user", "parts": [*parts, {"text": "Go on."}]}


@pytest.mark.parametrize("ids", [("call_2", "call_1"), (None, None)])
def test_results_of_tools(ids):
    named = bool(ids[0])
    calls = [{**({"id": f"call_{n + 1}"} if named else {}), "name": "read", "args": {}} for n in range(2)]
    model = {"role": "model", "parts": [{"functionCall": call, "thoughtSignature": "x"} for call in calls]}
    _, turn, *tools, user = read(contents=[USER, model, results(*ids)]).messages
    assert [tool["content"] for tool in tools] == ["fine", "error: no such file"]
    answered = [tool["call_id"] for tool in tools]
    made = [call.id for call in turn["calls"]]
    assert answered == (list(ids) if named else made)
    assert user == {"role": "user", "content": "Go on."}


def test_fields():
    declaration = {"name": "read", "description": "Reads.", "parameters_json_schema": PARAMETERS}
    google = {"type": "OBJECT", "properties": {"file_path": {"type": "STRING"}}}
    request = read(
        system_instruction={"parts": [{"text": "Be brief."}]},
        tools=[{"functionDeclarations": [declaration, {"name": "list", "parameters": google}]}, {"googleSearch": {}}],
        toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["read"]}},
        generationConfig={
            "temperature": 1,
            "maxOutputTokens": 7,
            "stopSequences": ["x"],
            "responseMimeType": "application/json",
            "responseSchema": {"type": "STRING", "nullable": True},
            "candidateCount": 1,
        },
        safetySettings=[],
    )
    assert request.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Do it."})
    assert [tool["function"]["name"] for tool in request.tools] == ["read", "list"]
    assert [tool["function"]["parameters"] for tool in request.tools] == [PARAMETERS] * 2
    assert request.tool_choice == "function:read"
    assert (request.max_tokens, request.stop, request.stream) == (7, ("x",), True)
    assert request.schema == {"type": ["string", "null"]}
    assert request.overridden == {"temperature": 1}


IMAGE = {"inlineData": {"mimeType": "image/png", "data": ""}}
REJECTED = [
    ({"contents": []}, "contents must be a list of at least one content"),
    ({"contents": [{"role": "robot", "parts": []}]}, "contents[0].role 'robot' is neither user nor model"),
    ({"contents": [{"parts": [IMAGE]}]}, "contents[0].parts[0]: 'inlineData' is not supported: this model reads text"),
    ({"contents": [results(None)]}, "contents[0]: there is no call of 'read' that this is the result of"),
    ({"generationConfig": {"candidateCount": 3}}, "candidateCount = 3 is not supported"),
    ({"generationConfig": {"frequencyPenalty": 0.5}}, "frequencyPenalty = 0.5 is not supported"),
    ({"generationConfig": {"maxTokens": 5}}, "unknown field 'maxTokens'"),
    ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "responseMimeType 'text/x.enum' is not supported"),
    ({"cachedContent": "cachedContents/1"}, "cachedContent = 'cachedContents/1' is not supported"),
    ({"tools": [{"computerUse": {}}]}, "tools[0]: the tool 'computerUse' is not supported"),
    ({"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}}, "toolConfig: the mode 'SOME' is not supported"),
]


@pytest.mark.parametrize(("fields", "message"), REJECTED)
def test_what_cannot_be_honoured_is_named(fields, message):
    with pytest.raises(BadRequest) as error:
        read(**fields)
    assert str(error.value).startswith(message)


def test_errors():
    body = DIALECT.error(BadRequest("it is so", status=429))
    assert body == {"error": {"code": 429, "message": "it is so", "status": "RESOURCE_EXHAUSTED"}}
