"""A packed forward pass is every sequence's own forward pass, for each model family, and so are its gradients."""

import copy

import numpy as np
import pytest
import torch

from forge.training.policy import Policy
from forge.types import Batch
from tests.training.cases import FAMILIES, VOCAB, tiny_model

LENGTHS = [5, 1, 12, 3, 12, 2, 1, 9]


def batch_of(lengths: list[int]) -> Batch:
    """Random tokens; all but the first of each sequence are trained."""
    total = sum(lengths)
    first = np.cumsum([0, *lengths[:-1]])
    mask = np.ones(total, dtype=np.bool_)
    mask[first] = False
    random = np.random.default_rng(0)
    zeros = np.zeros(total, dtype=np.float32)
    return Batch(random.integers(0, VOCAB, total), np.array(lengths), mask, zeros, zeros, zeros, zeros)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [LENGTHS, [1, 2], [16]], ids=str)
def test_packed_logprobs_and_entropy_match_transformers(family: str, lengths: list[int]):
    model = tiny_model(family)
    plain = copy.deepcopy(model)
    batch = batch_of(lengths)
    logprobs, entropy = Policy(model)(batch, temperature=0.8)

    expected_logprobs, expected_entropy = [], []
    for own in torch.from_numpy(batch.tokens).split(lengths):
        logp = (plain(own[None]).logits[0, :-1] / 0.8).log_softmax(-1)
        expected_logprobs.append(logp.gather(1, own[1:, None])[:, 0])
        expected_entropy.append(-(logp.exp() * logp).sum(-1))
    expected = torch.cat(expected_logprobs), torch.cat(expected_entropy)
    torch.testing.assert_close(logprobs, expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, expected[1], rtol=0, atol=1e-5)

    share = torch.linspace(-1, 1, len(logprobs)) / len(logprobs)
    (share @ logprobs + share.flip(0) @ entropy).backward()
    (share @ expected[0] + share.flip(0) @ expected[1]).backward()
    own_gradients = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(own_gradients[name].grad, parameter.grad, rtol=0, atol=1e-5, msg=name)


def test_packed_sequence_logprobs_are_independent_of_neighbours():
    policy = Policy(tiny_model())
    alone = policy(batch_of([12]))[0]
    together = batch_of([12, 12, 10, 3])
    torch.testing.assert_close(policy(together)[0][:11], alone, rtol=0, atol=1e-5)
    together.tokens[12:] = (together.tokens[12:] + 1) % VOCAB
    torch.testing.assert_close(policy(together)[0][:11], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 6, 11])
def test_packed_sliding_window_attention_matches_transformers(window: int):
    """Sequences shorter and longer than the window, of as many whole windows and of some more."""
    model = tiny_model("qwen2", use_sliding_window=True, sliding_window=window, max_window_layers=1)
    batch = batch_of([1, 6, 12, 17, 17, 23])
    expected = [
        model(own[None]).logits[0, :-1].log_softmax(-1).gather(1, own[1:, None])[:, 0]
        for own in torch.from_numpy(batch.tokens).split(batch.lengths.tolist())
    ]
    torch.testing.assert_close(Policy(model)(batch)[0], torch.cat(expected), rtol=0, atol=1e-5)


def test_sequence_beyond_longrope_short_factors_raises():
    policy = Policy(tiny_model("phi3"))
    policy(batch_of([20, 20]))
    with pytest.raises(ValueError, match="21 tokens is too long: this model's longrope is supported up to 20 tokens"):
        policy(batch_of([21]))
