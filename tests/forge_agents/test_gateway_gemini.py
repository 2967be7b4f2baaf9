"""Google's paths at the gateway, as its clients call them."""

import json

import httpx
import pytest

from forge_agents.settings import SessionSettings

MODEL = "models/policy"
FIRST = {"role": "user", "parts": [{"text": "go"}]}
TOOLS = [{"functionDeclarations": [{"name": "run", "parameters": {"type": "OBJECT", "properties": {}}}]}]
CALL = '<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"}}\n</tool_call>'


@pytest.fixture
def post(served):
    gateway, run = served
    access = gateway.open(SessionSettings(max_tokens=1000, max_turn_tokens=100))

    def send(path, body, version="v1beta", **headers):
        headers = headers or {"x-goog-api-key": access.key}
        return httpx.post(f"{access.url}/{version}/{path}", json=body, headers=headers, timeout=60)

    send.key = access.key
    send.close = lambda: run(gateway.close(access.key))
    return send


def parts_of(answer):
    return answer["candidates"][0]["content"]["parts"]


def test_a_streamed_turn_is_continued_in_one_that_is_not(post, forced_policy):
    said = [CALL, "Done."]
    forced_policy.script = lambda prompt: said.pop(0)
    answer = post(f"{MODEL}:streamGenerateContent?alt=sse", {"contents": [FIRST], "tools": TOOLS})
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    call = next(part for event in events if "candidates" in event for part in parts_of(event) if "functionCall" in part)
    result = {"functionResponse": {**call["functionCall"], "response": {"output": "a.txt"}}}
    del result["functionResponse"]["args"]
    contents = [FIRST, {"role": "model", "parts": [call]}, {"role": "user", "parts": [result]}]
    # The second request by the other version of the path, with its key in the query.
    path = f"{MODEL}:generateContent?key={post.key}"
    second = post(path, {"contents": contents, "tools": TOOLS}, version="v1", accept="*/*")
    assert parts_of(second.json()) == [{"text": "Done."}]
    record = post.close()
    assert [run.parent for run in record.runs["policy"]] == [None, 0]
    assert record.episode("policy", 1.0).info["certificate"]["trained"] == forced_policy.sampled


def test_tokens_are_counted_as_a_request_has_them(post, forced_policy):
    forced_policy.script = lambda prompt: "Done."
    body = {"contents": [FIRST]}
    usage = post(f"{MODEL}:generateContent", body).json()["usageMetadata"]
    count = post(f"{MODEL}:countTokens", body).json()
    wrapped = post(f"{MODEL}:countTokens", {"generateContentRequest": {**body, "model": MODEL}}).json()
    assert count == wrapped == {"totalTokens": usage["promptTokenCount"]}


def test_errors_are_in_googles_form(post):
    body = {"contents": [FIRST]}
    wrong = [
        (post("models/other:generateContent", body), 404, "NOT_FOUND"),
        (post(f"{MODEL}:generateContent", body, accept="*/*"), 401, "UNAUTHENTICATED"),
        (post(f"{MODEL}:streamGenerateContent", body), 400, "INVALID_ARGUMENT"),
        (post(f"{MODEL}:generateContent", [1]), 400, "INVALID_ARGUMENT"),
        (post(f"{MODEL}:countTokens", {"generateContentRequest": 1}), 400, "INVALID_ARGUMENT"),
        (post(f"{MODEL}:embedContent", body), 404, "NOT_FOUND"),
    ]
    for answer, status, name in wrong:
        assert answer.status_code == status == answer.json()["error"]["code"]
        assert answer.json()["error"]["status"] == name
