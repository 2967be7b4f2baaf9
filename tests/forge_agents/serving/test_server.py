"""`forge serve` as its clients see it: the openai package, on real generators."""

import asyncio

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from forge_verifiers import LMJudge

SAID = [{"role": "user", "content": "hello"}]


def join_chunks(chunks, kind):
    """Return each choice's text and its reason to end."""
    texts, reasons = {}, {}
    for chunk in chunks:
        for choice in chunk.choices:
            text = choice.delta.content if kind == "chat" else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            reasons[choice.index] = choice.finish_reason
    return texts, reasons


@pytest.mark.parametrize("stop", [None, ["a", "bc", "X"]], ids=["whole", "stop"])
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_streamed_server_chunks_join_to_whole_completion(client, kind, stop):
    create = client.chat.completions.create if kind == "chat" else client.completions.create
    asked = {"messages": SAID} if kind == "chat" else {"prompt": "ab"}
    settings = {"model": "tiny", "n": 3, "max_tokens": 60, "seed": 5, "temperature": 0.8, "stop": stop, **asked}
    whole = create(**settings)
    chunks = list(create(**settings, stream=True, stream_options={"include_usage": True}))
    texts, reasons = join_chunks(chunks, kind)
    for choice in whole.choices:
        text = choice.message.content if kind == "chat" else choice.text
        assert (texts[choice.index], reasons[choice.index]) == (text, choice.finish_reason)
        assert not any(word in text for word in stop or ())
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > len(texts)


def test_forge_serve_logprobs_match_transformers(client, model, tokenizer):
    answer = client.completions.create(
        model="tiny", prompt="hello", n=3, max_tokens=40, temperature=0.7, logprobs=3, seed=2
    )
    prompt = tokenizer("hello")["input_ids"]
    assert answer.usage.prompt_tokens == len(prompt)
    for choice in answer.choices:
        expected = next_logprobs(model, prompt, choice.token_ids, 0.7)
        drawn = [row[token].item() for row, token in zip(expected, choice.token_ids, strict=True)]
        assert choice.logprobs.token_logprobs == pytest.approx(drawn, abs=1e-4)
        for found, row in zip(choice.logprobs.top_logprobs, expected, strict=True):
            assert list(found.values()) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def next_logprobs(model, prompt_ids, token_ids, temperature=1.0):
    """By transformers, in the place of each of `token_ids`: (tokens, V)."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = plain(torch.tensor([[*prompt_ids, *token_ids]])).logits[0, len(prompt_ids) - 1 :]
    return (logits / temperature).log_softmax(-1)[: max(len(token_ids), 1)]


def test_llm_judge_score_equals_served_model_probabilities(served, model, tokenizer):
    prompt = tokenizer(f"<user>hello{tokenizer.eos_token}<assistant>")["input_ids"]
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("settings", "kind", "says"),
    [
        ({"model": "other"}, openai.NotFoundError, "use tiny"),
        ({"temperature": -1}, openai.BadRequestError, "temperature must be"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens must be"),
        ({"logprobs": 21}, openai.BadRequestError, "logprobs must be"),
        ({"prompt": [5] * 300}, openai.BadRequestError, "shorter than generator.max_seq_len"),
        ({"prompt": [4000]}, openai.BadRequestError, "token ids must be"),
        ({"prompt": ["a", "b"]}, openai.BadRequestError, "one text"),
        ({"presence_penalty": 0.5}, openai.BadRequestError, "not supported"),
        ({"extra_body": {"top_k": 2**70}}, openai.BadRequestError, "top_k"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_rejected_serving_request_errors_name_the_field(client, settings, kind, says, stream):
    with pytest.raises(kind, match=says):
        client.completions.create(**{"model": "tiny", "prompt": "a", "stream": stream} | settings)
