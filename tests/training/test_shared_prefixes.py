"""Sequences that share prefixes are computed as a tree, with the result of computing each sequence by itself."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from forge.data.prefixes import SAVED, find_prefixes, prefix_ids
from forge.training import policy as training_policy
from forge.training.policy import Policy, ScalarModel
from forge.types import Batch
from tests.training.cases import VOCAB, tiny_model, write_classifier

TREES = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.lists(st.lists(st.integers(0, 2), max_size=7))),
    min_size=1,
    max_size=5,
)


def batch_of(rows: list[list[int]], trained: int = 1) -> Batch:
    """The last tokens of each row are trained, from position `trained` on."""
    lengths = np.array([len(row) for row in rows])
    mask = np.concatenate([np.arange(len(row)) >= trained for row in rows])
    zeros = np.zeros(len(mask), np.float32)
    weights = np.linspace(-1, 1, len(mask)).astype(np.float32) * mask
    return Batch(np.concatenate(rows).astype(np.int64), lengths, mask, zeros, zeros, zeros, weights)


def rows_of(trees: list[tuple[list[int], list[list[int]]]]) -> list[list[int]]:
    """A row for each branch, and the trunk itself where it has none."""
    return [trunk + branch for trunk, branches in trees for branch in branches or [[]]]


def sampled(prompts: int, samples: int, prompt: int, answer: int, seed: int = 0) -> list[list[int]]:
    """Groups of random rows; the first two samples of a group go on together, as branches of an episode do."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(prompts):
        trunk = random.integers(0, VOCAB, prompt).tolist()
        group = [trunk + random.integers(0, VOCAB, random.integers(1, answer + 1)).tolist() for _ in range(samples)]
        group[1] = group[0] + random.integers(0, VOCAB, answer).tolist()
        rows += group
    return rows


class Norm(torch.nn.Module):
    """RMSNorm in the precision of its input: transformers' rounds to float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt() * self.weight


def in_float64(family: str) -> torch.nn.Module:
    model = tiny_model(family).double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.__class__ = Norm
    return model


@given(TREES, st.sampled_from([1, 4, 32, 10**9]))
def test_prefix_tree_paths_reconstruct_every_sequence(trees, saved: int):
    rows = rows_of(trees)
    batch = batch_of(rows)
    tree = find_prefixes(batch.tokens, batch.lengths, saved)
    starts = np.concatenate([[0], np.cumsum(tree.lengths)])
    first = 0
    for sequence, row in enumerate(rows):
        path, run = [], tree.last[sequence]
        while run >= 0:
            path = [*range(starts[run], starts[run + 1]), *path]
            assert tree.parents[run] < run
            run = tree.parents[run]
        assert path == tree.index[first : first + len(row)].tolist()
        assert batch.tokens[tree.source[path]].tolist() == row
        assert tree.positions[path].tolist() == list(range(len(row)))
        first += len(row)
    assert tree.cost(range(len(rows))) == len(tree.source) <= len(batch.tokens)
    if saved == 1:  # nothing is computed twice
        assert len(tree.source) == len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})
    if saved == 10**9:
        assert tree.lengths == [len(row) for row in rows]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_shared_prefix_logprobs_match_separate_sequences(family: str, seed: int, monkeypatch):
    monkeypatch.setattr(training_policy, "find_prefixes", partial(find_prefixes, saved=1 + 7 * (seed % 2)))
    model = in_float64(family)
    plain = copy.deepcopy(model)
    plain.config._attn_implementation = "sdpa"  # eager attention rounds to float32
    rows = sampled(prompts=3, samples=4, prompt=9, answer=8, seed=seed)
    batch = batch_of(rows, trained=5 if seed < 2 else 9)  # 5: some of the shared tokens are trained
    logprobs, entropy = Policy(model)(batch, temperature=0.8)
    expected_logprobs, expected_entropy = [], []
    for row, own in zip(rows, torch.from_numpy(batch.mask).split(batch.lengths.tolist()), strict=True):
        tokens = torch.tensor(row)
        logp = (plain(tokens[None]).logits[0, :-1] / 0.8).log_softmax(-1)[own[1:]]
        expected_logprobs.append(logp.gather(1, tokens[own][:, None])[:, 0])
        expected_entropy.append(-(logp.exp() * logp).sum(-1))
    expected = torch.cat(expected_logprobs), torch.cat(expected_entropy)
    torch.testing.assert_close(logprobs, expected[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(entropy, expected[1], rtol=0, atol=1e-10)
    share = torch.linspace(-1, 1, len(logprobs), dtype=torch.float64)
    (share @ logprobs + share.flip(0) @ entropy).backward()
    (share @ expected[0] + share.flip(0) @ expected[1]).backward()
    own_gradients = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(own_gradients[name].grad, parameter.grad, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("prompt", [3, 30, 41])
@pytest.mark.parametrize("family", ["mistral", "gemma3", "phi3", "olmoe"])
def test_shared_prefixes_match_separate_with_windows_and_experts(family: str, prompt: int, monkeypatch):
    """Prefixes shorter and longer than a window of 4 or 5, and 20 tokens at most with Phi-3's frequencies."""
    prompt = min(prompt, 9) if family == "phi3" else prompt
    rows = sampled(prompts=2, samples=4, prompt=prompt, answer=5, seed=prompt)
    model, batch = tiny_model(family), batch_of(rows, trained=2)
    monkeypatch.setattr(training_policy, "find_prefixes", partial(find_prefixes, saved=10**9))
    apart = Policy(model)(batch).logprobs
    monkeypatch.setattr(training_policy, "find_prefixes", partial(find_prefixes, saved=1))
    shared = Policy(model)(batch).logprobs
    assert tree_cost(batch, 1) < len(batch.tokens)
    torch.testing.assert_close(shared, apart, rtol=0, atol=2e-5)


def test_prefixes_are_shared_only_between_equal_replayed_experts():
    """The second sequence went another way from its third token on, the third one never."""
    batch = batch_of([[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 7, 4]])
    batch.experts = np.zeros((12, 2, 2), np.uint8)
    batch.experts[6, 1] = 3
    assert find_prefixes(prefix_ids(batch), batch.lengths, 1).index.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 0, 1, 2, 6]
    assert prefix_ids(batch_of([[5, 6]])).tolist() == [5, 6]


@pytest.mark.parametrize("head", ["value", "reward"])
def test_scalar_head_values_with_shared_prefixes_match_separate(head: str, tmp_path, monkeypatch):
    model = ScalarModel.from_pretrained(write_classifier(tmp_path), head)  # type: ignore[arg-type]
    batch = batch_of(sampled(2, 3, prompt=40, answer=6), trained=40)
    shared = model(batch).values
    monkeypatch.setattr(training_policy, "find_prefixes", partial(find_prefixes, saved=10**9))
    torch.testing.assert_close(shared, model(batch).values, rtol=0, atol=1e-5)


def tree_cost(batch: Batch, saved: int = SAVED) -> int:
    return len(find_prefixes(batch.tokens, batch.lengths, saved).source)
