"""What clients may ask for, and what they are told where it cannot be done."""

import pytest

from forge.serve.requests import BadRequest, parse

CHAT = {"messages": [{"role": "user", "content": "a"}]}
TEXT = {"prompt": "a"}


def test_a_completion_means_what_openai_says(tokenizer):
    job = parse({"model": "tiny", "prompt": "abc"}, tokenizer, "tiny", chat=False)
    assert job.prompts == [tokenizer("abc")["input_ids"]]
    assert (job.sampling.n, job.sampling.max_tokens, job.sampling.temperature) == (1, 16, 1.0)
    assert (job.stop, job.logprobs, job.stream) == ([], False, False)


@pytest.mark.parametrize(
    ("asked", "told", "top"),
    [
        (TEXT, False, 0),
        (TEXT | {"logprobs": 0}, True, 0),
        (TEXT | {"logprobs": 20}, True, 20),
        (CHAT | {"top_logprobs": 0}, False, 0),
        (CHAT | {"logprobs": True}, True, 0),
        (CHAT | {"logprobs": True, "top_logprobs": 5}, True, 5),
    ],
    ids=str,
)
def test_log_probabilities_are_asked_for(tokenizer, asked, told, top):
    job = parse(asked, tokenizer, "tiny", chat="messages" in asked)
    assert (job.logprobs, job.sampling.top_logprobs) == (told, top)


@pytest.mark.parametrize(
    ("prompt", "count"), [("ab", 1), (["ab", "c"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2)], ids=str
)
def test_prompts_come_as_texts_or_token_ids(tokenizer, prompt, count):
    job = parse({"prompt": prompt}, tokenizer, "tiny", chat=False)
    assert len(job.prompts) == count
    assert all(isinstance(token, int) for ids in job.prompts for token in ids)


def test_a_chat_goes_through_the_models_template(tokenizer):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 5, "stop": "x", "n": 2}
    job = parse(body, tokenizer, "tiny", chat=True)
    assert tokenizer.decode(job.prompts[0]) == "<user>hello</><assistant>"
    assert (job.sampling.max_tokens, job.sampling.n, job.stop) == (5, 2, ["x"])


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"prompt": ""}, "prompt", "none empty"),
        ({"prompt": []}, "prompt", "none empty"),
        ({}, "prompt", "a text or a list"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "judge", "content": "a"}]}, "messages", "no role judge"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "only text"),
        (TEXT | {"temprature": 1}, "temprature", "did you mean 'temperature'"),
        (TEXT | {"temperature": -1}, None, "temperature must be"),
        (TEXT | {"top_p": 0}, None, "top_p must be"),
        (TEXT | {"n": -1}, None, "n must be"),
        (TEXT | {"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
        (TEXT | {"logprobs": 21}, "logprobs", "0 to 20, got 21"),
        (TEXT | {"logprobs": "5"}, "logprobs", "0 to 20"),
        (TEXT | {"logprobs": True}, "logprobs", "0 to 20, got True"),
        (TEXT | {"top_logprobs": 5}, "top_logprobs", "did you mean 'logprobs'"),
        (TEXT | {"logprobs": 1, "echo": True}, "echo", "not scored"),
        (TEXT | {"stop_token_ids": "12"}, "stop_token_ids", "list of token ids"),
        (TEXT | {"stop_token_ids": [None]}, "stop_token_ids", "list of token ids"),
        (TEXT | {"n": 5000}, "n", "more than 4096"),
        ({"prompt": [True, 5]}, "prompt", "a text or a list"),
        (CHAT | {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "own template"),
        (TEXT | {"best_of": 3}, "best_of", "ask for n samples"),
        (TEXT | {"stop": [""]}, "stop", "not empty"),
        (TEXT | {"stream": "yes"}, "stream", "true or false"),
        (TEXT | {"seed": "one"}, "seed", "must be a number"),
        (TEXT | {"n": 1.5}, "n", "without a fraction"),
        (CHAT | {"tools": [{"type": "function"}]}, "tools", "not supported"),
        (CHAT | {"top_logprobs": 3}, "top_logprobs", "needs logprobs: true"),
        (CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20, got 21"),
        (CHAT | {"logprobs": True, "top_logprobs": True}, "top_logprobs", "must be a number"),
        (CHAT | {"logprobs": 3}, "logprobs", "true or false"),
        (CHAT | {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        (CHAT | {"model": "other"}, "model", "ask for 'tiny'"),
        ([], None, "JSON object"),
        (TEXT | {"stop": ["a"] * 17}, "stop", "at most 16 strings, got 17"),
        (TEXT | {"stop": "a" * 257}, "stop", "at most 256 characters, got 257"),
        (TEXT | {"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024"),
        (TEXT | {"temperature": 10**400}, "temperature", "at most 64 bits"),
        (TEXT | {"top_p": 10**400}, "top_p", "at most 64 bits"),
        (TEXT | {"seed": -(2**63) - 1}, "seed", "at most 64 bits"),
        (TEXT | {"max_tokens": float("inf")}, "max_tokens", "without a fraction"),
        ({"prompt": ["a"] * 4097}, "n", "4097 prompts of 1 samples are more than 4096"),
        ({"prompt": ["a"] * 3, "n": 1366}, "n", "3 prompts of 1366 samples are more than 4096"),
        ({"prompt": "a" * (2**20 + 1)}, "prompt", "at most 1048576 characters or token ids, got 1048577"),
        ({"prompt": [5] * (2**20 + 1)}, "prompt", "at most 1048576 characters or token ids, got 1048577"),
        ({"prompt": [5] * 2000, "n": 2500}, "n", "would repeat 5000000 tokens"),
        ({"messages": CHAT["messages"] * 4097}, "messages", "at most 4096, got 4097"),
        ({"messages": [{"role": "user", "content": "a" * 2**20}] * 2}, "messages", "at most 1048576 characters"),
    ],
)
def test_what_cannot_be_done_is_said(tokenizer, body, param, says):
    with pytest.raises(BadRequest, match=says) as caught:
        parse(body, tokenizer, "tiny", chat="messages" in body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body", [TEXT | {"a" * 10**6: 1}, TEXT | {"model": "a" * 10**6}, TEXT | {"logit_bias": "a" * 10**6}]
)
def test_an_error_repeats_only_the_beginning_of_a_value(tokenizer, body):
    with pytest.raises(BadRequest) as caught:
        parse(body, tokenizer, "tiny", chat=False)
    assert len(f"{caught.value}{caught.value.param}") < 500


def test_a_model_without_a_template_is_for_completions(tokenizer):
    import copy

    plain = copy.copy(tokenizer)
    plain.chat_template = None
    with pytest.raises(BadRequest, match="/v1/completions"):
        parse(CHAT, plain, "tiny", chat=True)
