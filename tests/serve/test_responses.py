"""Answers about tokens whose texts do not tell them apart."""

import json
import math
from functools import partial

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from forge.data.spelling import spelled
from forge.serve.requests import GenerationJob
from forge.serve.responses import Answer, encode
from forge.types import Completion, Sampling


@pytest.fixture(scope="module")
def llama_tokenizer():
    """As those of Llama 2: a space before the first word is lost, and bytes have tokens of their own."""
    names = ["<unk>", "yes", "▁yes", "▁no", "<0xE2>", "<0x9F>", "<0x0A>"]
    inner = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def answered(tokenizer, chat, completion):
    sampling = Sampling(top_logprobs=4)
    job = GenerationJob([[3]], sampling, [], logprobs=True, chat=chat)
    return Answer(job, tokenizer, partial(spelled, tokenizer), "m").choice(0, "", completion, "length")["logprobs"]


def test_tokens_of_one_text_share_an_entry(llama_tokenizer):
    top = {token: math.log(p) for token, p in {2: 0.5, 1: 0.2, 3: 0.1, 4: 0.08}.items()}
    completion = Completion(
        "", [5, 6], [math.log(0.05), -1.0], {}, (3,), [0, 0], "length", top_logprobs=[top, {6: -1.0}]
    )
    told = answered(llama_tokenizer, False, completion)
    assert told["tokens"] == [r"bytes:\x9f", "\n"]
    likely = {text: math.exp(p) for text, p in told["top_logprobs"][0].items()}
    assert likely == pytest.approx({"yes": 0.7, "no": 0.1, r"bytes:\xe2": 0.08, r"bytes:\x9f": 0.05})
    assert told["top_logprobs"][1] == {"\n": -1.0}
    assert told["text_offset"] == [0, 0]
    chat = answered(llama_tokenizer, True, completion)["content"][0]
    assert (chat["token"], chat["bytes"]) == (r"bytes:\x9f", [0x9F])
    assert [(one["token"], one["logprob"]) for one in chat["top_logprobs"]] == [
        ("yes", top[2]),
        ("yes", top[1]),
        ("no", top[3]),
        (r"bytes:\xe2", top[4]),
    ]


@pytest.mark.parametrize(
    "value",
    [{}, [], {"a": {"b": []}}, {"a": list(range(257))}, [{"x": [1, {}]}] * 1000, {'é"': ["\ud800", None, 1.5, True]}],
    ids=lambda value: str(value)[:12],
)
def test_json_in_parts_is_the_same_json(value):
    assert encode(value) == json.dumps(value).encode()


def test_a_whole_answer_is_json(llama_tokenizer):
    job = GenerationJob([[3], [1, 2]], Sampling(), [], logprobs=False, chat=False)
    answer = Answer(job, llama_tokenizer, partial(spelled, llama_tokenizer), "m")
    choices = [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]
    parsed = json.loads(b"".join(answer.complete([encode(choice) for choice in choices], 7)))
    assert parsed["choices"] == choices
    assert parsed["usage"] == {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
