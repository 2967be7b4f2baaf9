"""What narrows the distribution: the tokens that are left, with the log-probabilities among them."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from forge.engines import load_engine
from forge.types import Sampling
from forge_agents.grammar import json_grammar

from ...forge_envs.core.conftest import bpe  # noqa: F401
from ..conftest import logits_of, random_model
from .conftest import LONGEST, Subject

SCHEMA = {
    "type": "object",
    "properties": {"right": {"type": "boolean"}},
    "required": ["right"],
    "additionalProperties": False,
}


def test_repetition_penalty_matches_transformers(subject: Subject, engine: Any) -> None:
    prompt = [7, 8, 9]
    sampling = Sampling(max_tokens=30, temperature=0, repetition_penalty=1.4)
    completion = engine.submit(prompt, sampling).result(60)[0]
    expected = subject.models[0].generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, repetition_penalty=1.4
    )
    assert completion.token_ids == expected[0, len(prompt) :].tolist()
    plain = engine.submit(prompt, Sampling(max_tokens=30, temperature=0)).result(60)[0]
    assert plain.token_ids != completion.token_ids


def test_policy_logprobs_are_computed_before_top_p_or_nan(subject: Subject, engine: Any) -> None:
    """The embedded engine reports them before anything is excluded; vLLM cannot, and says so."""
    sampling = Sampling(2, 12, temperature=0.7, top_p=0.8, seed=5, logprobs_of="policy")
    for completion in engine.submit([4, 5, 6], sampling).result(60):
        if subject.name == "vllm":
            assert all(math.isnan(logprob) for logprob in completion.logprobs)
            continue
        logprobs = (logits_of(subject.models[0], completion) / 0.7).log_softmax(-1)
        expected = logprobs[range(len(completion.token_ids)), completion.token_ids].tolist()
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.fixture(scope="module")
def reader(
    subject: Subject,
    bpe: PreTrainedTokenizerFast,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Any, PreTrainedModel]]:
    """An engine of the same kind that has a tokenizer, and its model."""
    subject.close()  # the memory of one vLLM
    folder = tmp_path_factory.mktemp("reader")
    model = random_model(
        "qwen3",
        tied=True,
        seed=0,
        eos=bpe.eos_token_id,
        spread=0.2,
        vocab_size=len(bpe),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=LONGEST,
    )
    model.save_pretrained(folder)
    bpe.save_pretrained(folder)
    engine = load_engine(subject.name, folder, slots=8)
    yield engine, model
    engine.close()


def test_stop_texts_end_completions(reader: Any, bpe: PreTrainedTokenizerFast) -> None:  # noqa: F811
    engine, _ = reader
    free = engine.submit([5, 6, 7], Sampling(max_tokens=60, seed=3)).result(60)[0]
    text = bpe.decode(free.token_ids)
    stop = text[len(text) // 2 :][:3]
    ended = engine.submit([5, 6, 7], Sampling(max_tokens=60, seed=3, stop=(stop,))).result(60)[0]
    count = len(ended.token_ids)
    assert ended.token_ids == free.token_ids[:count]
    assert ended.logprobs == pytest.approx(free.logprobs[:count], abs=1e-4)
    assert ended.finish == "stop"
    assert stop in bpe.decode(ended.token_ids)
    assert stop not in bpe.decode(ended.token_ids[:-1])


def test_grammar_limits_completions_to_matching_text(reader: Any, bpe: PreTrainedTokenizerFast) -> None:  # noqa: F811
    engine, _ = reader
    sampling = Sampling(n=3, max_tokens=60, seed=1, grammar=json_grammar(SCHEMA))
    for completion in engine.submit([5, 6, 7], sampling).result(60):
        assert completion.finish == "stop"
        assert bpe.decode(completion.token_ids[:-1]) in ('{"right":true}', '{"right":false}')
        assert all(logprob <= 0 for logprob in completion.logprobs)
