"""Packing and splitting: nothing lost, nothing counted twice, and the loss and gradient of the padded form."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.utils.rnn import pad_sequence

from forge.actors import Trainer
from forge.algorithms.base import Aggregation
from forge.data.packing import pack, pack_tensors, split_batch
from forge.losses import (
    GRPOLoss,
    ReinforceLoss,
    SimpleGRPOLoss,
)
from forge.training.policy import Policy
from forge.training.step import call_by_name
from forge.types import Batch, Episode
from tests.training.cases import episodes, example, tiny_model

LENGTHS = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 9)), min_size=1, max_size=12)
RANKS = st.integers(1, 4)
AGGREGATION: st.SearchStrategy[Aggregation] = st.sampled_from(["token_mean", "sequence_mean"])
ARRAYS = ("tokens", "mask", "logprobs", "versions", "advantages", "weights", "ref_logprobs")


def rows_of(batch: Batch) -> list[tuple]:
    """Every sequence with all that is known of it."""
    return [
        tuple(tuple(getattr(own, name).tolist()) for name in ARRAYS)
        for own in (batch.select(np.array([i])) for i in range(len(batch)))
    ]


@given(LENGTHS, RANKS, st.integers(16, 60), st.integers(1, 3))
def test_split_batch_places_each_sequence_in_one_micro_batch(
    lengths: list[tuple[int, int]], ranks: int, max_tokens: int, at_least: int
):
    batch = example(0, lengths)
    shares = split_batch(batch, ranks=ranks, max_tokens=max_tokens, at_least=at_least)
    assert (len(shares), len({len(share) for share in shares})) == (ranks, 1)
    assert len(shares[0]) >= at_least
    micros = [micro for share in shares for micro in share]
    assert all(len(micro.tokens) == micro.lengths.sum() <= max_tokens for micro in micros)
    landed = [row for micro in micros if micro.mask.any() for row in rows_of(micro)]
    assert sorted(landed) == sorted(rows_of(batch))
    assert sum(micro.weights.sum() for micro in micros) == pytest.approx(1.0, abs=1e-5)


@given(LENGTHS)
def test_loss_aggregation_weighs_tokens_or_episodes_equally(lengths: list[tuple[int, int]]):
    responses = [response for _, response in lengths]
    token = pack(episodes(lengths), aggregation="token_mean")
    np.testing.assert_allclose(token.weights[token.mask], 1 / sum(responses), rtol=1e-6)
    sequence = pack(episodes(lengths), aggregation="sequence_mean")
    expected = np.repeat([1 / (n * len(lengths)) for n in responses], responses)
    np.testing.assert_allclose(sequence.weights[sequence.mask], expected, rtol=1e-6)
    for batch in (token, sequence):
        assert not batch.weights[~batch.mask].any()
        assert not batch.advantages[~batch.mask].any()


LOSS = GRPOLoss(0.2, 0.3, beta=0.1, entropy_coef=0.05)
MODEL = tiny_model()


def padded_loss(model: torch.nn.Module, batch: Batch, aggregation: Aggregation) -> torch.Tensor:
    """The loss as textbooks have it: plain transformers, [batch, seq], padding on the right."""
    lengths = batch.lengths.tolist()

    def rows(values: np.ndarray) -> torch.Tensor:
        return pad_sequence(torch.from_numpy(values).split(lengths), batch_first=True)

    tokens, mask = rows(batch.tokens), rows(batch.mask)[:, 1:]
    attended = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
    logp = model(tokens, attention_mask=attended.long()).logits[:, :-1].log_softmax(-1)
    taken = logp.gather(-1, tokens[:, 1:, None])[..., 0]
    entropy = -(logp.exp() * logp).sum(-1)
    assert batch.ref_logprobs is not None
    behaviour, advantages, ref = (rows(v)[:, 1:] for v in (batch.logprobs, batch.advantages, batch.ref_logprobs))
    ratio = torch.exp(taken - behaviour)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
    kl = torch.exp(ref - taken) - (ref - taken) - 1
    per_token = torch.where(mask, -surrogate + 0.1 * kl - 0.05 * entropy, 0.0)
    if aggregation == "token_mean":
        return per_token.sum() / mask.sum()
    return (per_token.sum(1) / mask.sum(1)).mean()


def packed_loss(policy: Policy, micro: Batch) -> torch.Tensor:
    logprobs, entropy = policy(micro)
    assert micro.ref_logprobs is not None
    behaviour, advantages, weights, ref = (
        torch.from_numpy(v[micro.mask]) for v in (micro.logprobs, micro.advantages, micro.weights, micro.ref_logprobs)
    )
    return LOSS(logprobs, behaviour, advantages, weights, ref, entropy)


@given(LENGTHS, RANKS, st.integers(16, 60), AGGREGATION)
@settings(max_examples=20)
def test_packed_split_matches_padded_loss_and_gradient(
    lengths: list[tuple[int, int]], ranks: int, max_tokens: int, aggregation: Aggregation
):
    batch = example(1, lengths, aggregation=aggregation)
    plain = copy.deepcopy(MODEL)
    expected = padded_loss(plain, batch, aggregation)
    expected.backward()
    policy = Policy(copy.deepcopy(MODEL))
    total = 0.0
    for share in split_batch(batch, ranks=ranks, max_tokens=max_tokens):
        for micro in share:
            loss = packed_loss(policy, micro)
            loss.backward()
            total += loss.item()
    assert total == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
    gradients = dict(policy.model.named_parameters())
    for name, parameter in plain.named_parameters():
        # Gradients here are of the order of one, so that float32 sums in another order differ by some 1e-6.
        torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=1e-5, atol=1e-5, msg=name)


def test_empty_micro_batch_has_zero_loss_and_zero_gradients():
    batch = example(0, [(3, 4)])
    working, idle = (share[0] for share in split_batch(batch, ranks=2, max_tokens=16))
    assert rows_of(working) == rows_of(batch)
    assert not idle.mask.any()
    policy = Policy(copy.deepcopy(MODEL))
    loss = packed_loss(policy, idle)
    loss.backward()
    assert loss.item() == 0.0
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
    assert batch.mask.any()  # the batch that it was made from is as it was


def test_split_batch_balances_tokens_over_ranks():
    lengths = [(1, n) for n in (40, 3, 17, 25, 8, 31, 12, 5, 22, 9)]
    loads = [sum(len(m.tokens) for m in share) for share in split_batch(example(0, lengths), ranks=2, max_tokens=64)]
    assert max(loads) <= 1.1 * sum(loads) / 2


def test_missing_behaviour_logprobs_are_packed_as_nan():
    batch = pack([Episode(prompt_ids=(1, 2), response_ids=[3, 4], advantage=1.0)])
    np.testing.assert_array_equal(batch.logprobs, [0.0, 0.0, math.nan, math.nan])
    assert batch.versions.tolist() == [-1] * 4


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_fully_masked_episode_has_zero_loss_weight(aggregation: Aggregation):
    known = episodes([(2, 3), (2, 2)])
    known[1].mask = [False] * 4
    batch = pack(known, aggregation=aggregation)
    assert np.isfinite(batch.weights).all()
    assert not batch.weights[5:].any()
    assert pack(known[1:], aggregation=aggregation).weights.tolist() == [0.0] * 4


def test_unpackable_episode_error_names_episode_number():
    scored = episodes([(2, 2), (2, 2)])
    unscored = Episode(prompt_ids=(1,), response_ids=[2], reward=1.0)
    with pytest.raises(ValueError, match="empty list"):
        pack([])
    with pytest.raises(ValueError, match="episode 2 has no advantage"):
        pack([*scored, unscored])
    with pytest.raises(ValueError, match="episode 0 must have at least one token before its first trained token"):
        pack([Episode(response_ids=[1, 2], advantage=1.0)])
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        pack(scored, aggregation="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a sequence of 9 tokens is longer than training.seq_len = 8"):
        split_batch(example(0, [(2, 3), (4, 5)]), ranks=1, max_tokens=8)


def test_inconsistent_episode_arguments_raise():
    with pytest.raises(ValueError, match="either a completion or prompt_ids"):
        Episode()
    with pytest.raises(ValueError, match="at least one response token"):
        Episode(prompt_ids=(1,), response_ids=[])
    with pytest.raises(ValueError, match="logprobs must have one entry for each of the 2 response tokens, got 1"):
        Episode(prompt_ids=(1,), response_ids=[2, 3], logprobs=[-1.0])


def tensors() -> tuple[dict, dict]:
    """Two rows: the first with a prompt that is padded on the left, the second with a gap in what is trained."""
    response = torch.tensor([[5, 6, 1, 0], [7, 8, 9, 1]])
    inputs = {
        "tokens": torch.cat([torch.tensor([[0, 3], [4, 3]]), response], 1),
        "mask": torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
    }
    targets = {
        "response": response,
        "padding_mask": torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]]),
        "advantages": torch.tensor([[2.0], [-1.0]]),
        "ref_logprobs": -torch.arange(1.0, 9.0).reshape(2, 4),
    }
    return inputs, targets


def test_pack_tensors_drops_padding_of_each_sequence():
    inputs, targets = tensors()
    batch = pack_tensors([inputs], [targets])
    assert batch.tokens.tolist() == [3, 5, 6, 1, 4, 3, 7, 8, 9, 1]
    assert batch.lengths.tolist() == [4, 6]
    assert batch.mask.tolist() == [False, True, True, True, False, False, True, False, True, True]
    assert batch.advantages.tolist() == [0, 2, 2, 2, 0, 0, -1, 0, -1, -1]
    assert batch.ref_logprobs.tolist() == [0, -1, -2, -3, 0, 0, -5, 0, -7, -8]
    assert np.isnan(batch.logprobs[batch.mask]).all()
    targets["behaviour_logprobs"] = targets["ref_logprobs"] / 2
    batch = pack_tensors([inputs], [targets])
    assert batch.logprobs.tolist() == [0, -0.5, -1, -1.5, 0, 0, -2.5, 0, -3.5, -4]
    halves = [{name: value[i : i + 1] for name, value in inputs.items()} for i in range(2)]
    wanted = [{name: value[i : i + 1] for name, value in targets.items()} for i in range(2)]
    assert rows_of(pack_tensors(halves, wanted)) == rows_of(batch)


@pytest.mark.parametrize("masked", [[0], [1], [0, 3], [1, 2, 3], [0, 2]])
@pytest.mark.parametrize("padded", [False, True])
def test_packed_fully_masked_rows_match_padded_loss(masked: list[int], padded: bool):
    """Against the losses of the documents, called on the tensors themselves."""
    generator = torch.Generator().manual_seed(len(masked))
    tokens = torch.randint(3, 20, (4, 7), generator=generator)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]])
    mask[masked] = 0
    given = {"tokens": tokens}
    if padded:  # as a batch whose last rows are empty
        given["mask"] = torch.ones_like(tokens).masked_fill(~mask.bool().any(1)[:, None], 0)
    logprobs = torch.randn(4, 4, generator=generator)
    targets = {
        "response": tokens[:, 3:],
        "padding_mask": mask,
        "advantages": torch.randn(4, 1, generator=generator),
        "ref_logprobs": torch.randn(4, 4, generator=generator),
    }
    for loss in (SimpleGRPOLoss(0.1), ReinforceLoss()):
        trainer = Trainer("unused", loss=loss)
        batch = trainer._pack_items([given], [targets])
        kept = mask.bool()
        sampled = {"behaviour_logprobs": targets["ref_logprobs"]} if isinstance(loss, ReinforceLoss) else {}
        inputs = {"logprobs": logprobs, "padding_mask": mask, **targets, **sampled}
        inputs["advantages"] = targets["advantages"].expand(4, 4)
        expected = call_by_name(loss, inputs)
        flat = {name: values[kept] for name, values in inputs.items() if name != "response"}
        flat["weights"] = torch.from_numpy(batch.weights[batch.mask])
        assert call_by_name(loss, flat).item() == pytest.approx(expected.item(), rel=1e-6)
