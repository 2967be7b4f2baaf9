"""A part of `gpu.py`: attention of one long sequence by FlexAttention's mask, and by the library's causal kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from gpu_setup import Row, Setup
from gpu_speed import repeated
from torch import Tensor

from forge.training.flex import TreeMask, causal_attention, masked_attention

APART = 1e-2  # relative difference of results and gradients in bfloat16


def attention(setup: Setup) -> Iterator[Row]:
    """Rates of both, how far their results and gradients are apart, and whether the backward pass repeats its bits."""
    for length in (256,) if setup.quick else (65_536, 8192):
        yield from attention_of(length, setup)


def attention_of(length: int, setup: Setup) -> Iterator[Row]:
    """Of a sequence of so many tokens."""
    count = setup.shape["num_attention_heads"]
    key_heads = setup.shape["num_key_value_heads"]
    size = setup.shape["head_dim"]
    torch.manual_seed(0)

    def random(number: int) -> Tensor:
        drawn = torch.randn(1, length, number, size, device=setup.device, dtype=getattr(torch, setup.dtype))
        return drawn.transpose(1, 2).requires_grad_(setup.on_gpu)  # FlexAttention has no backward pass on a CPU

    inputs = random(count), random(key_heads), random(key_heads)
    mask = TreeMask.from_lengths([length], [-1])
    blocks = TreeMask(mask.runs, *(x.to(setup.device) for x in (mask.first, mask.end, mask.position))).blocks(None)
    ways: dict[str, Callable[[], Tensor]] = {
        "by a mask": lambda: masked_attention(*inputs, blocks, None),
        "causal": lambda: causal_attention(*inputs, [length], None),
    }
    operations = 2 * length**2 * count * size
    results = {}
    for way, act in ways.items():
        with torch.no_grad():
            forward = repeated(act, setup)
        figure = f"{operations / forward / 1e12:,.0f}"
        results[way] = [act().detach().float()]
        if setup.on_gpu:
            first, second = gradients(act, inputs), gradients(act, inputs)
            both = repeated(lambda: gradients(act, inputs), setup)  # noqa: B023
            bits = "the same" if all(map(torch.equal, first, second)) else "other"
            figure += f", {2.5 * operations / (both - forward) / 1e12:,.0f}; backward twice: {bits} bits"
            results[way] += [gradient.float() for gradient in first]
        yield Row(f"attention of {length:,} tokens, {way}: TFLOP/s forward, backward", figure)
    apart = max(float((a - b).norm() / b.norm()) for a, b in zip(*results.values(), strict=True))
    yield Row.at_most(f"attention of {length:,} tokens: the two apart, relative", apart, APART)


def gradients(act: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Gradients of the inputs, for the same random gradient of the result."""
    result = act()
    random = torch.Generator(result.device).manual_seed(1)
    seed = torch.randn(result.shape, generator=random, device=result.device, dtype=result.dtype)
    return list(torch.autograd.grad(result, inputs, seed))
