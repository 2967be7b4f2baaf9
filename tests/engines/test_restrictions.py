"""What bounds sampling: which tokens are excluded, and log-probabilities that the trainer computes again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from forge.data.packing import pack
from forge.engines import EmbeddedEngine
from forge.models.tokenizer import open_tokenizer
from forge.types import Completion, Episode, Sampling
from tests.training.cases import make_trainer

from .conftest import Make, error_of, logits_of

BOUNDS = [
    {"top_p": 0.7},
    {"top_k": 5},
    {"repetition_penalty": 1.3},
    {"top_p": 0.9, "top_k": 20, "repetition_penalty": 0.8},
]


def sampled(folder: Path, **settings: Any) -> list[Completion]:
    prompt = settings.pop("prompt", [4, 5, 6])
    request = Sampling(**{"n": 8, "max_tokens": 24, "seed": 3, **settings})
    with EmbeddedEngine(folder, slots=6) as engine:  # fewer rows than samples, so that some move
        return engine.submit(prompt, request).result(60)


def kept(model: PreTrainedModel, completion: Completion, temperature: float, **bounds: float) -> list[set[int]]:
    """The tokens that may be drawn at each position, by the definitions, one position and one token at a time."""
    allowed = []
    logits = logits_of(model, completion).double()
    for position, row in enumerate(logits.tolist()):
        seen = {*completion.prompt_ids, *completion.token_ids[:position]}
        penalty = bounds.get("repetition_penalty", 1.0)
        row = [(x / penalty if x > 0 else x * penalty) if token in seen else x for token, x in enumerate(row)]
        weights = np.exp((np.array(row) - max(row)) / temperature)
        order = np.argsort(-weights, kind="stable")
        if bounds.get("top_k"):
            weights[order[int(bounds["top_k"]) :]] = 0.0
        share = weights / weights.sum()
        before = np.concatenate([[0.0], np.cumsum(share[order])[:-1]])
        chosen = order[(before < bounds.get("top_p", 1.0) - 1e-9) & (share[order] > 0)]
        allowed.append({int(token) for token in chosen})
    return allowed


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_top_k_and_top_p_sampling_records_policy_logprobs(make: Make, bounds: dict[str, float]):
    folder, model = make("llama", spread=0.2)
    completions = sampled(folder, temperature=0.8, logprobs_of="policy", **bounds)
    for completion in completions:
        allowed = kept(model, completion, 0.8, **bounds)
        assert all(token in choices for token, choices in zip(completion.token_ids, allowed, strict=True))
        assert error_of(model, completion, 0.8) < 1e-5
    # Renormalised log-probabilities are of the same tokens, and larger where tokens were excluded.
    drawn = sampled(folder, temperature=0.8, **bounds)
    assert [c.token_ids for c in drawn] == [c.token_ids for c in completions]
    assert max(error_of(model, completion, 0.8) for completion in drawn) > 1e-2


def test_trainer_logprobs_match_top_k_top_p_sampling(make: Make):
    folder, _ = make("qwen3", spread=0.2)
    completions = sampled(folder, temperature=0.7, top_p=0.6, repetition_penalty=1.2, logprobs_of="policy")
    batch = pack([Episode(completion, 0.0, advantage=1.0) for completion in completions])
    trainer = make_trainer(folder, temperature=0.7)
    assert np.abs(trainer.logprobs(batch) - batch.logprobs)[batch.mask].max() < 1e-5
    renormalised = sampled(folder, temperature=0.7, top_p=0.6)
    others = pack([Episode(completion, 0.0, advantage=1.0) for completion in renormalised])
    assert np.abs(trainer.logprobs(others) - others.logprobs)[others.mask].max() > 0.05


def test_repetition_penalty_persists_across_recompute_weight_update(make: Make):
    folder, model = make("llama")
    weights = list(model.state_dict().items())
    with EmbeddedEngine(folder, slots=4, on_update="recompute") as engine:
        first = engine.submit([4, 5], Sampling(max_tokens=40, seed=5, temperature=0.9, repetition_penalty=3.0))
        engine.update_weights(weights, 1).result(60)
        [completion] = first.result(60)
    [whole] = sampled(folder, n=1, max_tokens=40, seed=5, temperature=0.9, repetition_penalty=3.0, prompt=[4, 5])
    assert completion.token_ids == whole.token_ids
    assert len({*completion.token_ids}) > 30


def texts(folder: str, **settings: Any) -> list[tuple[str, str]]:
    tokenizer = open_tokenizer(folder)
    with EmbeddedEngine(folder, slots=16) as engine:
        request = Sampling(**{"n": 12, "max_tokens": 60, "seed": 0, "temperature": 2.0, **settings})
        completions = engine.submit(tokenizer("abc")["input_ids"], request).result(60)
    return [(str(tokenizer.decode(c.token_ids, skip_special_tokens=True)), c.finish) for c in completions]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty must be > 0"),
        ({"stop": "\n"}, "stop must be a list of texts"),
        ({"logprobs_of": "raw"}, "logprobs_of must be drawn or policy"),
    ],
)
def test_invalid_top_k_top_p_and_penalty_values_raise(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)
