"""The endpoint as its clients see it: the openai package, on real generators."""

import asyncio
import json
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from forge.rewards import LMJudge
from tests.serve.conftest import eventually

SAID = [{"role": "user", "content": "hello"}]
DIGEST = {"0": ""}  # of weights that were never published


def joined(chunks):
    """By choice: the text, the tokens and the last word of a stream."""
    choices = {}
    for chunk in chunks:
        for choice in chunk.choices:
            kept = choices.setdefault(
                choice.index, {"text": "", "token_ids": [], "versions": [], "finish_reason": None}
            )
            assert kept["finish_reason"] is None
            kept["text"] += choice.delta.content if hasattr(choice, "delta") else choice.text
            kept["token_ids"] += choice.token_ids
            kept["versions"] += choice.versions
            kept["finish_reason"] = choice.finish_reason
    return choices


def test_chat(client, tokenizer):
    answer = client.chat.completions.create(model="tiny", messages=SAID, max_tokens=12, seed=1, logprobs=True)
    choice = answer.choices[0]
    assert (answer.object, answer.model, choice.message.role) == ("chat.completion", "tiny", "assistant")
    assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    assert tokenizer.decode(answer.prompt_token_ids) == "<user>hello</><assistant>"
    assert choice.versions == [0] * len(choice.token_ids)
    assert choice.weights == DIGEST
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert answer.usage.completion_tokens == len(choice.token_ids) == len(choice.logprobs.content)
    assert client.models.list().data[0].id == client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'tiny' alone"):
        client.models.retrieve("other")


def test_several_prompts_of_several_samples(client, tokenizer):
    prompts = ["ab", "cde", "f"]
    answer = client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=5, seed=1, echo=True)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for choice in answer.choices:
        prompt = prompts[choice.index // 2]
        assert choice.prompt_token_ids == tokenizer(prompt)["input_ids"]
        assert choice.text == prompt + tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        assert choice.finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)
    assert answer.usage.prompt_tokens == 6


@pytest.mark.parametrize("stop", [None, ["a", "bc", "X"]], ids=["whole", "stop"])
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_a_stream_is_the_whole_in_parts(client, kind, stop):
    settings = {"model": "tiny", "n": 3, "max_tokens": 60, "seed": 5, "temperature": 0.8, "stop": stop}
    if kind == "chat":
        create, settings = client.chat.completions.create, settings | {"messages": SAID}
    else:
        create, settings = client.completions.create, settings | {"prompt": ["ab", "c"], "echo": True}
    whole = create(**settings)
    chunks = list(create(**settings, stream=True, stream_options={"include_usage": True}))
    parts = joined(chunks)
    for choice in whole.choices:
        part = parts[choice.index]
        assert part["text"] == (choice.message.content if kind == "chat" else choice.text)
        for name in ("token_ids", "versions", "finish_reason"):
            assert part[name] == getattr(choice, name)
        if stop:
            assert not any(one in part["text"].removeprefix("ab").removeprefix("c") for one in stop)
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 2 * len(parts) if not stop else len(chunks) > len(parts)


def test_logprobs_are_those_of_transformers(client, model, tokenizer):
    answer = client.completions.create(
        model="tiny", prompt="hello", n=3, max_tokens=40, temperature=0.7, logprobs=1, seed=2
    )
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    streamed = client.completions.create(
        model="tiny", prompt="hello", n=3, max_tokens=40, temperature=0.7, logprobs=1, seed=2, stream=True
    )
    parts = {}
    for chunk in streamed:
        for choice in chunk.choices:
            for name in ("token_logprobs", "text_offset"):
                parts.setdefault((choice.index, name), []).extend(getattr(choice.logprobs, name))
    for choice in answer.choices:
        tokens = torch.tensor([[*choice.prompt_token_ids, *choice.token_ids]])
        with torch.no_grad():
            logprobs = (plain(tokens).logits[0] / 0.7).log_softmax(-1)
        first = len(choice.prompt_token_ids)
        expected = [logprobs[first + i - 1, token].item() for i, token in enumerate(choice.token_ids)]
        assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)
        assert choice.logprobs.tokens == [tokenizer.decode([token]) for token in choice.token_ids]
        assert parts[choice.index, "token_logprobs"] == choice.logprobs.token_logprobs
        assert parts[choice.index, "text_offset"] == choice.logprobs.text_offset
    chat = client.chat.completions.create(model="tiny", messages=SAID, max_tokens=8, logprobs=True, temperature=0)
    greedy = torch.tensor([[*chat.prompt_token_ids, *chat.choices[0].token_ids]])
    with torch.no_grad():
        best = plain(greedy).logits[0].log_softmax(-1).max(-1)
    first = len(chat.prompt_token_ids) - 1
    assert best.indices[first:-1].tolist() == chat.choices[0].token_ids


def next_logprobs(model, prompt_ids, token_ids, temperature=1.0):
    """By transformers, in the place of each of `token_ids`: (tokens, V)."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = plain(torch.tensor([[*prompt_ids, *token_ids]])).logits[0, len(prompt_ids) - 1 :]
    return (logits / temperature).log_softmax(-1)[: max(len(token_ids), 1)]


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_the_likeliest_tokens_are_those_of_transformers(client, model, tokenizer, kind):
    settings = {"model": "tiny", "n": 2, "max_tokens": 30, "temperature": 0.7, "seed": 4, "stop": ["a", "7"]}
    if kind == "chat":
        create = client.chat.completions.create
        settings |= {"messages": SAID, "logprobs": True, "top_logprobs": 20}
    else:
        create, settings = client.completions.create, settings | {"prompt": "ab", "logprobs": 3}
    answer, streamed = create(**settings), defaultdict(list)
    for chunk in create(**settings, stream=True):
        for choice in chunk.choices:
            told = choice.logprobs
            streamed[choice.index] += (
                told.content if kind == "chat" else zip(told.tokens, told.top_logprobs, strict=True)
            )
    for choice in answer.choices:
        prompt = answer.prompt_token_ids if kind == "chat" else choice.prompt_token_ids
        expected = next_logprobs(model, prompt, choice.token_ids, 0.7)
        logprobs, told = choice.logprobs, []
        if kind == "chat":
            assert streamed[choice.index] == logprobs.content
            told = [[(one.token, one.logprob) for one in entry.top_logprobs] for entry in logprobs.content]
        else:
            assert streamed[choice.index] == list(zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
            for token, logprob, top in zip(
                logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
            ):
                assert top[token] == logprob
                assert len(top) <= 4
                told.append(list(top.items())[:3])
        count = 20 if kind == "chat" else 3
        for found, row in zip(told, expected, strict=True):
            likely = row.topk(count)
            assert [text for text, _ in found] == [tokenizer.decode([token]) for token in likely.indices]
            assert [logprob for _, logprob in found] == pytest.approx(likely.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_judge_reads_the_models_own_probabilities(served, model, tokenizer, endpoint):
    prompt = tokenizer("<user>hello</><assistant>" if endpoint == "chat" else "hello")["input_ids"]
    probs = next_logprobs(model, prompt, [])[0].exp()
    # A random model: the likeliest words that it has, but for letters, which have a second spelling.
    yes, no = [token for token in probs.argsort(descending=True).tolist() if not tokenizer.decode([token]).isalpha()][
        :2
    ]
    words = {"yes": tokenizer.decode([yes]), "no": tokenizer.decode([no])}

    async def run():
        judge = LMJudge(
            served.address,
            "tiny",
            template="{response}",
            frame=False,
            endpoint=endpoint,
            scoring="logprob",
            top=20,
            **words,
        )
        try:
            return await judge.score("p", ["hello"])
        finally:
            await judge.close()

    found = asyncio.run(run())
    assert not found.reasons
    assert found.values.item() == pytest.approx((probs[yes] / (probs[yes] + probs[no])).item(), abs=1e-4)


def test_token_ids_are_a_prompt_again(client):
    whole = client.chat.completions.create(model="tiny", messages=SAID, max_tokens=30, temperature=0)
    ids = whole.choices[0].token_ids
    rest = client.completions.create(
        model="tiny", prompt=whole.prompt_token_ids + ids[:10], max_tokens=len(ids) - 10, temperature=0
    ).choices[0]
    assert rest.token_ids == ids[10:]
    assert rest.prompt_token_ids == whole.prompt_token_ids + ids[:10]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("settings", "kind", "says"),
    [
        ({"model": "other"}, openai.NotFoundError, "ask for 'tiny'"),
        ({"temperature": -1}, openai.BadRequestError, "temperature must be"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens must be"),
        ({"n": 0}, openai.BadRequestError, "n must be"),
        ({"logprobs": 21}, openai.BadRequestError, "logprobs must be 0 to 20"),
        ({"prompt": [5] * 300}, openai.BadRequestError, "no room"),
        ({"prompt": [4000]}, openai.BadRequestError, "token ids must be"),
        ({"presence_penalty": 0.5}, openai.BadRequestError, "not supported"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_is_refused_is_said(client, settings, kind, says, stream):
    with pytest.raises(kind, match=says):
        client.completions.create(**{"model": "tiny", "prompt": "a", "stream": stream} | settings)


def test_what_no_client_should_send(served):
    for method, path, body, status in (
        ("POST", "/completions", "{", 400),
        ("POST", "/completions", "[" * 20_000, 400),
        ("POST", "/completions", '{"prompt": "a", "temperature": 1' + "0" * 400 + "}", 400),
        ("POST", "/completions", '{"prompt": "a", "max_tokens": 1e400}', 400),
        ("POST", "/completions", '{"prompt": [' + "[]," * 300_000 + "[]]}", 400),
        ("POST", "/nothing", "{}", 404),
        ("GET", "/completions", None, 405),
    ):
        answer = served.ask(method, path, body)
        assert (answer.status, bool(json.loads(answer.read())["error"]["message"])) == (status, True)
    assert len(json.loads(served.ask("GET", "/health", None).read())["engines"]) == 2


@pytest.mark.parametrize("settings", [{"stop": ["x", "yz"]}, {"stream": True}, {"echo": True}], ids=str)
def test_the_event_loop_makes_no_texts(served, monkeypatch, settings):
    decode, threads = type(served.tokenizer).decode, set()

    def watched(*args, **kwargs):
        threads.add(threading.get_ident())
        return decode(*args, **kwargs)

    monkeypatch.setattr(type(served.tokenizer), "decode", watched)
    body = {"model": "tiny", "prompt": "a", "n": 3, "max_tokens": 5, **settings}
    assert served.ask("POST", "/completions", json.dumps(body)).read()
    assert threads
    assert served.thread.ident not in threads


def test_a_long_answer_is_taken_as_a_stream(served, monkeypatch):
    monkeypatch.setattr("forge.serve.server.MAX_OUTPUT", 1000)
    body = {"model": "tiny", "prompt": "a", "n": 200, "max_tokens": 200, "logprobs": 20}
    answer = served.ask("POST", "/completions", json.dumps(body))
    assert (answer.status, "ask for fewer samples" in answer.read().decode()) == (400, True)
    eventually(lambda: not served.busy(), 30)


LONG = {"model": "tiny", "prompt": "a", "n": 400, "max_tokens": 200}


@pytest.mark.parametrize("settings", [{"stream": True}, {}, {"stop": "never said"}], ids=["stream", "whole", "stop"])
def test_a_client_that_goes_away_ends_its_generation(served, settings):
    before = sum(stats["generated_tokens"] for stats in served.stats())
    if settings.get("stream"):
        with served.client.completions.create(**LONG, stream=True) as stream:
            assert next(iter(stream)).choices
            assert served.busy()
    else:
        with pytest.raises(openai.APITimeoutError):
            served.client.with_options(timeout=0.3).completions.create(**LONG, **settings)
    eventually(lambda: not served.busy(), 5)
    drawn = sum(stats["generated_tokens"] for stats in served.stats()) - before
    assert drawn < 400 * 30, "that is most of what was asked for"


@pytest.mark.full
def test_when_generators_are_killed_answers_are_begun_anew_and_streams_say_so(served):
    settings = {**LONG, "n": 150, "seed": 1}
    create = served.client.completions.create
    raw = served.ask("POST", "/completions", json.dumps({**settings, "stream": True}))
    begun = raw.readline()
    with ThreadPoolExecutor() as threads, create(**settings, stream=True) as stream:
        assert next(stream).choices[0].token_ids
        whole = threads.submit(create, **settings)
        stopped = threads.submit(create, **settings, stop="never said")
        eventually(lambda: sum(stats["waiting"] for stats in served.stats()) > 300)
        served.kill()
        with pytest.raises(openai.APIError, match="was lost"):
            list(stream)
        answers = [[choice.token_ids for choice in answer.result(60).choices] for answer in (whole, stopped)]
    assert (len(answers[0]), answers[0]) == (150, answers[1])
    text = (begun + raw.read()).decode()
    assert (raw.status, "[DONE]" in text) == (200, False)
    assert json.loads(text.strip().splitlines()[-1].removeprefix("data: "))["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    "more",
    [{"stop_token_ids": [10**30]}, {"stop_token_ids": [100_000]}, {"top_k": 2**70}, {"priority": 2**70}],
    ids=lambda more: next(iter(more)),
)
def test_a_request_that_cannot_be_computed_ends_no_engine(client, more):
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="ab", max_tokens=2, extra_body=more)
    assert client.completions.create(model="tiny", prompt="ab", max_tokens=2).choices[0].token_ids
