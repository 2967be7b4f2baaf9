"""Sessions over a tiny model, by the vendors' clients."""

import asyncio
import json
import threading

import httpx
import openai
import pytest

from forge_agents.record import SessionRecord
from forge_agents.settings import SessionSettings

TOOL = {
    "type": "function",
    "function": {"name": "run", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}},
}
CALL = 'I look.\n<tool_call>\n{"name": "run", "arguments": {"b": 1, "cmd": "ls  -l"}}\n</tool_call>'


def opened(served, **settings):
    gateway, _ = served
    return gateway.open(SessionSettings(**{"max_tokens": 1000, "max_turn_tokens": 24, "seed": 1} | settings))


def closed(served, access) -> SessionRecord:
    gateway, run = served
    return run(gateway.close(access.key))


def client_of(access, **options):
    return openai.OpenAI(base_url=f"{access.url}/v1", api_key=access.key, **{"max_retries": 0, "timeout": 60} | options)


def ask(client, messages, **options):
    return client.chat.completions.create(model="policy", messages=messages, **options)


def script(policy, *says):
    said = list(says)
    policy.script = lambda prompt: said.pop(0) if said else "Done."


def test_gateway_conversation_is_recorded_as_one_branch(served, forced_policy, bpe):
    access = opened(served)
    with client_of(access) as client:
        messages = [{"role": "user", "content": "hello"}]
        for word in ("more", "and more", "last"):
            message = ask(client, messages).choices[0].message
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": word}]
    record = closed(served, access)
    runs = record.runs["policy"]
    assert [run.parent for run in runs] == [None, 0, 1]
    episode = record.episode("policy", 1.0)
    assert not episode.branches
    assert sum(episode.mask) == forced_policy.sampled == episode.info["certificate"]["trained"]
    expected = forced_policy.logprobs(episode.tokens)
    for trained, logprob, reference in zip(episode.mask, episode.logprobs, expected, strict=True):
        assert not trained or logprob == pytest.approx(reference, abs=1e-5)
    # A turn was not tokenised again: the tokens that were sampled stand in the episode.
    first = runs[0].completion.token_ids
    start = episode.turns[0].start
    assert episode.tokens[start : start + len(first)] == first


def test_resent_tool_calls_without_thoughts_extend_the_same_branch(served, forced_policy):
    script(forced_policy, "<think>\nwhat now\n</think>\n\n" + CALL, "Done.")
    access = opened(served, max_turn_tokens=None)
    with client_of(access) as client:
        messages = [{"role": "user", "content": "go"}]
        message = ask(client, messages, tools=[TOOL]).choices[0].message
        assert (message.reasoning_content, message.content) == ("what now", "I look.")
        (call,) = message.tool_calls
        arguments = json.dumps(dict(reversed(json.loads(call.function.arguments).items())), indent=2)
        again = {"role": "assistant", "content": " I  look.", "tool_calls": [call.model_dump()]}
        again["tool_calls"][0]["function"]["arguments"] = arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "a b"}
        answer = ask(client, [*messages, again, result], tools=[TOOL])
        assert answer.choices[0].message.content == "Done."
        assert answer.usage.prompt_tokens_details.cached_tokens > 0
    record = closed(served, access)
    assert [run.parent for run in record.runs["policy"]] == [None, 0]
    assert record.episode("policy", 1.0).info["roots"] == {"start": 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: [*m[:1], {**m[1], "content": "something else"}, *m[2:]], "edited"),
        (lambda m: [{"role": "system", "content": "other"}, *m[1:]], "edited"),
        (lambda m: [m[0], {"role": "user", "content": "Summary: " + m[2]["content"]}], "start"),
        (lambda m: [{"role": "user", "content": "a new one"}], "start"),
    ],
)
def test_edited_message_history_starts_branch_with_reason(served, forced_policy, change, reason):
    script(forced_policy, "A long enough answer that a summary of it is recognised later on.", "Two.", "Three.")
    access = opened(served, max_turn_tokens=None)
    messages = [{"role": "system", "content": "you are"}, {"role": "user", "content": "go"}]
    with client_of(access) as client:
        for word in ("next", "then"):
            answer = ask(client, messages).choices[0].message.content
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": word}]
        ask(client, change(messages))
    record = closed(served, access)
    run = record.runs["policy"][-1]
    assert (run.parent, run.reason) == (None, reason)
    episode = record.episode("policy", 0.0)
    assert len(episode.branches) == 1
    assert sum(map(sum, (episode.mask, episode.branches[0].mask))) == forced_policy.sampled


def test_response_to_disconnected_client_is_not_trained(served, forced_policy):
    access = opened(served)
    body = {"model": "policy", "messages": [{"role": "user", "content": "slow"}]}
    entered, release = threading.Event(), threading.Event()
    forced_policy.script = None
    gateway, run = served
    original = forced_policy._generate

    async def slow(prompt, **sampling):
        entered.set()
        await asyncio.to_thread(release.wait, 30)
        return await original(prompt, **sampling)

    forced_policy.generate.route = slow
    try:
        headers = {"Authorization": f"Bearer {access.key}"}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{access.url}/v1/chat/completions", json=body, headers=headers, timeout=0.5)
        assert entered.wait(30)
        release.set()
        # Its client asks again, and gets another answer.
        retried = httpx.post(f"{access.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert retried.status_code == 200
        while len(gateway.sessions[access.key].trees["policy"].runs) < 2:
            run(asyncio.sleep(0.01))
    finally:
        forced_policy.generate.route = original
    record = closed(served, access)
    (orphan,) = (run for run in record.runs["policy"] if run.id not in record.delivered)
    account = record.episode("policy", 1.0).info["certificate"]
    assert account["orphan"] == len(orphan.completion.token_ids) > 0
    assert account["sampled"] == forced_policy.sampled


def test_invalid_gateway_request_error_is_one_sentence(served):
    access = opened(served)
    other = opened(served)
    url = f"{access.url}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {access.key}"}
    body = {"model": "policy", "messages": [{"role": "user", "content": "go"}]}

    def post(body, headers=headers):
        answer = httpx.post(url, json=body, headers=headers, timeout=60)
        return answer.status_code, answer.json()["error"]["message"]

    closed(served, other)
    for key in (other.key, "wrong"):
        sentence = "the API key is missing or wrong, or the session of the key has ended"
        assert post(body, {"Authorization": f"Bearer {key}"}) == (401, sentence)
    status, sentence = post({**body, "n": 4096})
    assert status == 400
    assert "4096" in sentence
    status, sentence = post({**body, "messages": [{"role": "user", "content": "x" * (10 << 20)}]})
    assert status == 413
    status, sentence = post({**body, "model": "gpt-5"})
    assert (status, sentence) == (404, "model 'gpt-5' is not served by this gateway: use policy")
    status, sentence = post({**body, "logit_bias": {"1": 5}})
    assert status == 400
    assert "logit_bias" in sentence
    # The episode has lost nothing by that.
    assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
    assert httpx.post(f"{access.url}/s/{access.key}/v1/chat/completions", json=body, timeout=60).status_code == 200


def test_failed_response_stream_is_not_recorded_as_turn(served, forced_policy, monkeypatch):
    script(forced_policy, "A first answer of several words.", "A second one.")
    access = opened(served, max_turn_tokens=None)
    original = forced_policy._next
    reads = 0

    async def failing(stream):
        nonlocal reads
        reads += 1
        if reads == 2:
            raise RuntimeError("all replicas are gone")
        return await original(stream)

    monkeypatch.setattr(forced_policy.next_pieces, "route", failing)
    messages = [{"role": "user", "content": "go"}]
    with client_of(access) as client:
        with pytest.raises(openai.APIError, match="not available now: all replicas are gone"):
            for _ in ask(client, messages, stream=True):
                pass
        content = "".join(chunk.choices[0].delta.content or "" for chunk in ask(client, messages, stream=True))
    assert content == "A second one."
    record = closed(served, access)
    assert len(record.runs["policy"]) == len(record.delivered) == 1
