"""A session that asks for more at once than its limit: one sentence, and other sessions are unharmed."""

import asyncio
from types import SimpleNamespace

import httpx
import openai
import pytest

from forge_agents.settings import MAX_OPEN, SessionSettings

FLOOD = "flood"
QUICK = 20  # requests of the other session


@pytest.fixture
def gated(served, forced_policy):
    """The gateway, and an event until which the requests of the flood stay open."""
    gateway, run = served
    sample = forced_policy.generate.route

    async def make():
        return asyncio.Event()

    gate = run(make())

    async def wait_and_sample(prompt, **sampling):
        if FLOOD in forced_policy.tokenizer.decode(prompt):
            await gate.wait()
        return await sample(prompt, **sampling)

    forced_policy.generate = SimpleNamespace(route=wait_and_sample)
    yield gateway, run, gate
    forced_policy.generate = SimpleNamespace(route=sample)


def client(gateway, key, retries=0):
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=retries, timeout=60)


async def ask(asker, text):
    messages = [{"role": "user", "content": text}]
    answer = await asker.chat.completions.create(model="policy", messages=messages, max_tokens=4)
    return answer.choices[0].finish_reason


async def open_gate(gate):
    gate.set()


async def flood(gateway, run, gate):
    """What the clients of the session that floods, and those of another one, get."""
    keys = [gateway.open(SessionSettings(name=name, max_tokens=512, max_turns=64)).key for name in ("one", "other")]
    asker = client(gateway, keys[0])
    patient = client(gateway, keys[0], retries=8)
    other = client(gateway, keys[1])
    session = gateway.sessions[keys[0]]
    waiting = [asyncio.create_task(ask(asker, f"{FLOOD} {number}")) for number in range(MAX_OPEN)]
    while len(session.open_generations) < MAX_OPEN:
        await asyncio.sleep(0.01)
    rejected = await asyncio.gather(*(ask(asker, f"{FLOOD} more {n}") for n in range(8)), return_exceptions=True)
    later = asyncio.create_task(ask(patient, f"{FLOOD} later"))
    quick = await asyncio.gather(*(ask(other, f"quick {number}") for number in range(QUICK // 2)))
    quick += [await ask(other, f"again {number}") for number in range(QUICK // 2)]
    assert not any(task.done() for task in waiting)
    run(open_gate(gate))
    answers = await asyncio.gather(*waiting)
    patience = await later
    for asking in (asker, patient, other):
        await asking.close()
    return rejected, quick, answers, patience, [run(gateway.close(key)) for key in keys]


async def count_long(gateway, run):
    """What a session with long texts gets, and how many texts are tokenised."""
    settings = [SessionSettings(name=name, max_tokens=512, max_open=4) for name in ("long", "other")]
    long, other = [gateway.open(one).key for one in settings]
    rendered = []
    dialogue = gateway.policies["policy"].dialogue
    initial = dialogue.initial
    dialogue.initial = lambda *args: rendered.append(args) or initial(*args)
    headers = {"x-api-key": long}
    async with httpx.AsyncClient(timeout=60, base_url=gateway.url, headers=headers) as http:

        async def count(text):
            said = {"model": "policy", "messages": [{"role": "user", "content": text}]}
            return (await http.post("/v1/messages/count_tokens", json=said)).status_code

        statuses = await asyncio.gather(*(count("word " * 400_000) for _ in range(3)))
        assert not rendered
        several = await asyncio.gather(*(count("word " * 1000) for _ in range(12)))
        answer = await http.post(
            "/v1/chat/completions", json={"model": "policy", "messages": [{"role": "user", "content": "w " * 400_000}]}
        )
    quick = client(gateway, other)
    finish = await ask(quick, "quick")
    await quick.close()
    return statuses, several, answer.json()["choices"][0]["finish_reason"], finish, run(gateway.close(long))


def test_request_texts_far_beyond_limit_are_not_tokenised(served):
    statuses, several, finish, quick, record = asyncio.run(count_long(*served))
    assert statuses == [400] * 3
    assert {200, 429} >= set(several) >= {200}
    assert (finish, record.counts.get("max_tokens"), record.counts.get("max_turns")) == ("length", 1, None)
    assert quick in ("stop", "length")


def test_gateway_requests_beyond_limits_get_rate_limit_errors(gated):
    rejected, quick, answers, patience, (record, other) = asyncio.run(flood(*gated))
    for error in rejected:
        assert isinstance(error, openai.RateLimitError)
        assert (
            error.body["message"]
            == f"this session has {MAX_OPEN} open requests, the limit of a session: wait for their responses"
        )
        assert float(error.response.headers["Retry-After"]) > 0
    # A client that waits as the header says is answered, and so are all that were open.
    assert patience in ("stop", "length")
    assert set(answers) <= {"stop", "length"}
    assert (len(answers), len(quick)) == (MAX_OPEN, QUICK)
    # What was rejected has left no trace in the account.
    assert (len(record.runs["policy"]), len(record.delivered)) == (MAX_OPEN + 1, MAX_OPEN + 1)
    assert len(other.runs["policy"]) == QUICK
    episode = record.episode("policy", 1.0)
    assert episode.info["certificate"]["sampled"] == episode.info["certificate"]["trained"]
