"""Sampling: the right distribution, its log-probabilities, and seeds that hold whatever else runs."""

from __future__ import annotations

import math

import pytest
import torch

from forge.engines import EmbeddedEngine
from forge.engines.sampling import draw, keep_top, uniforms
from forge.types import Sampling

from .conftest import VOCAB, Make, error_of, logits_of


def oracle(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """The sampled distribution, token by token in plain Python."""
    highest = max(logits)
    weights = {i: math.exp((x - highest) / temperature) for i, x in enumerate(logits)}
    ranked = sorted(weights, key=lambda i: -weights[i])[: top_k or len(weights)]
    total = sum(weights[i] for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        if mass >= top_p:
            break
        kept.append(i)
        mass += weights[i] / total
    return {i: weights[i] / sum(weights[j] for j in kept) for i in kept}


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (12, 0.8), (1, 1.0), (0, 1e-6), (1000, 0.999)])
def test_logprobs_with_top_k_and_top_p_match_an_oracle(make: Make, top_k: int, top_p: float) -> None:
    folder, model = make("qwen2")
    with EmbeddedEngine(folder, slots=8) as engine:
        plain = engine.submit([9, 9], Sampling(max_tokens=12, seed=8))
        cut = engine.submit([4, 5, 6], Sampling(3, 12, temperature=1.5, top_k=top_k, top_p=top_p, seed=5))
        for completion in cut.result(30):
            for token, logprob, logits in zip(
                completion.token_ids, completion.logprobs, logits_of(model, completion).double().tolist(), strict=True
            ):
                assert logprob == pytest.approx(math.log(oracle(logits, 1.5, top_k, top_p)[token]), abs=1e-4)
        assert error_of(model, plain.result(30)[0]) < 1e-4  # a neighbour that cuts changes nothing


def test_frequencies_match_the_probabilities(make: Make) -> None:
    folder, model = make("llama")
    with EmbeddedEngine(folder, slots=256) as engine:
        completions = engine.submit([11, 12], Sampling(n=4000, max_tokens=1, temperature=2.0, seed=0)).result(60)
    probs = (logits_of(model, completions[0])[0] / 2.0).softmax(-1)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=VOCAB)
    common = probs * 4000 >= 5
    expected = torch.cat([probs[common], probs[~common].sum()[None]]) * 4000
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    chi_square = ((observed - expected) ** 2 / expected.clamp_min(1e-9)).sum().item()
    freedom = int(common.sum())
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_seeded_tokens_do_not_depend_on_the_batch(make: Make) -> None:
    folder, _ = make("qwen3")
    wanted = Sampling(n=3, max_tokens=30, top_p=0.9, seed=42)
    with EmbeddedEngine(folder, slots=7) as engine:
        alone = [c.token_ids for c in engine.submit([1, 2, 3], wanted).result(30)]
        others = [engine.submit([i] * (i + 1), Sampling(n=1 + i % 3, max_tokens=5 + i)) for i in range(9)]
        crowded = engine.submit([1, 2, 3], wanted)
        others += [engine.submit([i], Sampling(n=2, max_tokens=17, temperature=0)) for i in range(9)]
        assert [c.token_ids for c in crowded.result(30)] == alone
        fewer = engine.submit([1, 2, 3], Sampling(n=2, max_tokens=10, top_p=0.9, seed=42)).result(30)
        assert [c.token_ids for c in fewer] == [ids[:10] for ids in alone[:2]]
        assert len({tuple(ids) for ids in alone}) == 3
        unseeded = [engine.submit([1, 2, 3], Sampling(max_tokens=30)) for _ in range(2)]
        assert unseeded[0].result(30)[0].token_ids != unseeded[1].result(30)[0].token_ids
        for future in others:
            future.result(30)


def test_a_number_at_either_end_never_draws_an_impossible_token() -> None:
    logits = torch.full((2, 6), -torch.inf)
    logits[:, 2:4] = torch.tensor([0.3, 1.7])
    tokens, logprobs = draw(logits, torch.tensor([0.0, 1.0]), None)
    assert tokens.tolist() == [2, 3]
    assert torch.allclose(logprobs, logits.log_softmax(-1)[[0, 1], [2, 3]])


def test_top_k_breaks_ties_and_top_p_of_one_keeps_all() -> None:
    logits = torch.zeros(3, 8)
    kept = keep_top(logits, torch.tensor([3, 0, 0]), torch.tensor([1.0, 1.0, 0.5])).isfinite().sum(-1)
    assert kept.tolist() == [3, 8, 4]


def test_numbers_of_a_longer_request_begin_like_those_of_a_shorter_one() -> None:
    assert torch.equal(uniforms(7, 1, 50)[:20], uniforms(7, 1, 20))
    assert not torch.equal(uniforms(7, 1, 20), uniforms(7, 2, 20))
    assert not torch.equal(uniforms(7, 1, 20), uniforms(8, 1, 20))
    assert len(uniforms(-1, 0, 3)) == 3


def test_a_tiny_temperature_is_like_greedy(make: Make) -> None:
    folder, _ = make("llama")
    with EmbeddedEngine(folder, slots=4) as engine:
        greedy, cold = (engine.submit([5, 6], Sampling(max_tokens=10, temperature=t, seed=0)) for t in (0.0, 1e-30))
        assert greedy.result(30)[0].token_ids == cold.result(30)[0].token_ids
        assert cold.result(30)[0].logprobs == pytest.approx([0.0] * 10, abs=1e-3)
