"""FlexAttention over a tree of runs: the mask by brute force, and the rectangles' result. Forward only, on a CPU."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from forge.data.packing import pack
from forge.training import flex
from forge.training.attention import PackedLayout, packed_attention
from forge.training.distributed import join_ranks, leave_ranks
from forge.training.flex import Runs, TreeMask
from forge.training.policy import fuse_norms
from forge.training.settings import OptimizerSettings
from forge.training.trainer import PolicyTrainer
from forge.types import Episode

RUNS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 10**6)), min_size=1, max_size=9)


def tree_of(runs: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Lengths, and parents that come before: any earlier run, or none."""
    return [length for length, _ in runs], [chosen % (i + 1) - 1 for i, (_, chosen) in enumerate(runs)]


@given(RUNS, st.sampled_from([None, 1, 3, 8]))
def test_prefix_tree_mask_lets_tokens_attend_only_to_ancestors(runs, window):
    lengths, parents = tree_of(runs)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    paths: list[list[int]] = []
    for i, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), *range(starts[i], starts[i] + lengths[i])])
    count = sum(lengths)
    expected = torch.zeros(count, count, dtype=torch.bool)
    for i, path in enumerate(paths):
        for token in range(starts[i], starts[i] + lengths[i]):
            before = path[: path.index(token) + 1]
            expected[token, before if window is None else before[-window:]] = True
    tokens = torch.arange(count)
    assert torch.equal(TreeMask.from_lengths(lengths, parents).sees(tokens[:, None], tokens, window), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@settings(max_examples=5)
@given(RUNS)
def test_flex_attention_matches_packed_attention(window, key_heads, runs):
    lengths, parents = tree_of(runs)
    torch.manual_seed(len(lengths))
    query, key, value = (torch.randn(1, heads, sum(lengths), 16) for heads in (4, key_heads, key_heads))
    rectangles = PackedLayout.from_lengths(lengths, parents=parents)
    nothing = torch.empty(0, dtype=torch.long)
    flex = PackedLayout(nothing, nothing, nothing, [], TreeMask.from_lengths(lengths, parents))
    with torch.no_grad():
        expected, found = (
            packed_attention(None, query, key, value, layout=layout, sliding_window=window)[0]
            for layout in (rectangles, flex)
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@given(RUNS, st.sampled_from([4, 2, 1]), st.integers(0, 3))
def test_causal_kernel_of_long_sequences_matches_packed_attention(runs, key_heads, padding):
    """As the rectangles do; padding, sequences of one token, comes last."""
    lengths, parents = tree_of(runs)
    lengths, parents = lengths + [1] * padding, parents + [-1] * padding
    with mock.patch.object(flex, "LONG", 2):
        sequences = Runs.from_lengths(lengths, parents).long_sequences()
    continued = [run - 1 == parent for run, parent in enumerate(parents) if parent >= 0]
    paths = len(parents) - sum(parent >= 0 for parent in parents)
    if not all(continued):
        assert sequences == []
    if not sequences:
        return
    assert len(sequences) == paths
    torch.manual_seed(len(lengths))
    query, key, value = (torch.randn(1, heads, sum(lengths), 16) for heads in (4, key_heads, key_heads))
    rectangles = PackedLayout.from_lengths(lengths, parents=parents)
    expected = packed_attention(None, query, key, value, layout=rectangles)[0][0]
    torch.testing.assert_close(flex.causal_attention(query, key, value, sequences, None), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "parents", "sequences"),
    [
        ([4096], [-1], [4096]),
        ([100, 5000], [-1, 0], [5100]),
        ([100, 5000, 6000, 1, 1], [-1, 0, -1, -1, -1], [5100, 6000, 1, 1]),
        ([4095], [-1], []),
        ([5000, 200], [-1, -1], []),
        ([1, 5000], [-1, -1], []),
        ([5000, 10, 10], [-1, 0, 0], []),
        ([1, 1], [-1, -1], []),
    ],
)
def test_only_long_unshared_sequences_use_causal_kernel(lengths, parents, sequences):
    assert Runs.from_lengths(lengths, parents).long_sequences() == sequences


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_rms_norm_is_bit_identical_to_model_norm(dtype):
    norms = [Qwen3RMSNorm(64).to(dtype) for _ in range(2)]
    norms[0].weight.data.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(0))
    norms[1].load_state_dict(norms[0].state_dict())
    fuse_norms(norms[1])
    assert list(norms[1].state_dict()) == ["weight"]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(norms[0](x), norms[1](x))
    # What an accelerator computes, by the same operator in host memory.
    weight = norms[1].weight
    fused = torch.nn.functional.rms_norm(x, weight.shape, weight, norms[1].variance_epsilon)
    torch.testing.assert_close(fused, norms[0](x), rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_fsdp_passes_one_attention_mask_object_to_all_layers(tmp_path, monkeypatch):
    """FSDP copies a layer's arguments to cast them: each copy of a mask would make its own blocks."""
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2
    )
    config.intermediate_size, config.num_key_value_heads, config.head_dim = 64, 1, 16
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    batch = pack([Episode(prompt_ids=[5, 6, 7], response_ids=[i, 9, 10], reward=1.0, advantage=1.0) for i in (3, 4)])
    expected = PolicyTrainer(tmp_path, join_ranks(), OptimizerSettings()).logprobs(batch)
    made, blocks = [], Runs.blocks
    monkeypatch.setattr(Runs, "blocks", lambda runs, window: made.append(window) or blocks(runs, window))
    masked = lambda lengths, device, parents: PackedLayout.masked(TreeMask.from_lengths(lengths, parents))  # noqa: E731
    monkeypatch.setattr(PackedLayout, "from_lengths", masked)
    try:
        logprobs = PolicyTrainer(tmp_path, join_ranks(mesh=True), OptimizerSettings()).logprobs(batch)
    finally:
        leave_ranks()
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    assert made == [None]
