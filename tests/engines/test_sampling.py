"""Sampling: the right distribution, its log-probabilities, and seeds that hold whatever else runs."""

import math

import torch

from forge.engines import EmbeddedEngine
from forge.engines.sampling import draw_tokens, keep_top
from forge.types import Sampling

from .conftest import VOCAB, Make, logits_of


def test_sampler_frequencies_match_probabilities(make: Make) -> None:
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


def test_random_numbers_0_and_1_never_select_masked_tokens() -> None:
    logits = torch.full((2, 6), -torch.inf)
    logits[:, 2:4] = torch.tensor([0.3, 1.7])
    tokens, logprobs = draw_tokens(logits, torch.tensor([0.0, 1.0]), None)
    assert tokens.tolist() == [2, 3]
    assert torch.allclose(logprobs, logits.log_softmax(-1)[[0, 1], [2, 3]])


def test_top_k_breaks_ties_and_top_p_1_keeps_all_tokens() -> None:
    logits = torch.zeros(3, 8)
    kept = keep_top(logits, torch.tensor([3, 0, 0]), torch.tensor([1.0, 1.0, 0.5])).isfinite().sum(-1)
    assert kept.tolist() == [3, 8, 4]


def test_most_probable_token_is_kept_at_any_top_p() -> None:
    kept = keep_top(torch.randn(2, 50), torch.tensor([0, 3]), torch.tensor([1e-320, 1e-45])).isfinite().sum(-1)
    assert kept.tolist() == [1, 1]
