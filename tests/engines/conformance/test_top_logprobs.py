"""The most probable tokens at each position, for those who ask: those of the distribution that was drawn from."""

import math
from typing import Any

import pytest

from forge.types import Sampling

from ..conftest import EOS, check_shape, logits_of, oracle
from .conftest import Hold, Subject, wait_for

ASKED = [
    Sampling(n=2, max_tokens=120, temperature=0, top_logprobs=5),
    Sampling(n=3, max_tokens=150, temperature=0.7, top_k=12, top_p=0.8, seed=1, top_logprobs=20),
    Sampling(n=3, max_tokens=150, temperature=1.5, seed=2),
    Sampling(n=3, max_tokens=40, temperature=1.5, seed=3, top_logprobs=1),
    Sampling(n=2, max_tokens=9, temperature=1.5, top_k=3, seed=4, top_logprobs=20),
]


@pytest.mark.parametrize("mode", ["finish", "recompute"])
def test_engine_top_logprobs_match_transformers(subject: Subject, engine: Any, mode: str) -> None:
    engine.on_update = mode
    # More samples than slots, that end at different times, under two versions.
    hold = Hold(pieces=20)
    listeners = [hold, *[None] * (len(ASKED) - 1)]
    futures = [
        engine.submit([i + 1, i + 2, 9], sampling, listener=listener)
        for i, (sampling, listener) in enumerate(zip(ASKED, listeners, strict=True))
    ]
    wait_for(hold.holds.is_set)
    update = subject.update(1)
    hold.release()
    update.result(60)
    seen = set()
    for future, sampling in zip(futures, ASKED, strict=True):
        completions = future.result(60)
        check_shape(completions, sampling, {EOS})
        for completion in completions:
            seen |= set(completion.versions)
            if not sampling.top_logprobs:
                assert completion.top_logprobs == []
                continue
            logits = {version: logits_of(model, completion).tolist() for version, model in subject.models.items()}
            assert len(completion.top_logprobs) == len(completion.token_ids)
            for i, (version, found) in enumerate(zip(completion.versions, completion.top_logprobs, strict=True)):
                cuts = (sampling.temperature, sampling.top_k, sampling.top_p) if sampling.temperature else (1.0, 0, 1.0)
                probs = oracle(logits[version][i], *cuts)
                likely = sorted(map(math.log, probs.values()), reverse=True)[: sampling.top_logprobs]
                assert list(found.values()) == pytest.approx(likely, abs=1e-4)
                assert list(found.values()) == pytest.approx([math.log(probs[token]) for token in found], abs=1e-4)
                token, logprob = completion.token_ids[i], completion.logprobs[i]
                assert found.get(token, logprob) == logprob
                assert token in found or len(found) == sampling.top_logprobs
    assert seen == {0, 1}


@pytest.mark.parametrize("count", [-1, 21, 2.5])
def test_too_many_top_logprobs_raise(count: Any) -> None:
    with pytest.raises(ValueError, match="top_logprobs must be 0 to 20"):
        Sampling(top_logprobs=count)
