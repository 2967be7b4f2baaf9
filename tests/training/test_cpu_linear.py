"""Products through oneDNN equal torch's to float32 rounding, in values and gradients."""

import pytest
import torch
from torch import nn

from forge.training import linear as cpu_linear


@pytest.mark.skipif(not cpu_linear.AVAILABLE, reason="this CPU has no AVX2")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5), (1, 5), (0, 5)])
def test_fast_cpu_linear_matches_float64(shape, bias):
    torch.manual_seed(0)
    layer = nn.Linear(5, 11, bias=bias)
    exact = nn.Linear(5, 11, bias=bias, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    model = nn.Sequential(layer)
    cpu_linear.speed_up(model)
    assert isinstance(layer, cpu_linear.FastLinear)
    x = torch.randn(shape, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    up = torch.randn(*shape[:-1], 11)
    y, y64 = model(x), exact(x64)
    (y * up).sum().backward()
    (y64 * up).sum().backward()
    pairs = [(y, y64), (x.grad, x64.grad), (layer.weight.grad, exact.weight.grad)]
    pairs += [(layer.bias.grad, exact.bias.grad)] if bias else []
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)


def test_fast_cpu_linear_falls_back_for_unsupported_dtypes():
    layer = nn.Linear(5, 11).double()
    cpu_linear.speed_up(layer)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))
