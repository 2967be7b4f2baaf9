"""Operations of a forward pass, against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from forge.models.flops import count_causal, forward_flops
from tests.training.cases import tiny_model

LENGTH = 12


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_model_forward_flops_match_torch_flop_counter(family: str):
    model = tiny_model(family)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(3, 3 + LENGTH)[None])
    # Eager attention computes the whole square, and this module the half that is attended to.
    expected = forward_flops(model.config, LENGTH, LENGTH * LENGTH, LENGTH)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)
    assert (count_causal(LENGTH), count_causal(3, context=5)) == (sum(range(1, LENGTH + 1)), 6 + 7 + 8)
