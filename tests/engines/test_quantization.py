"""Weights in 8 bits: the engine is that of the rounded weights, at the start and after each update."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from forge.engines import EmbeddedEngine, EngineSettings
from forge.engines.linear import Linear, quantize, widened
from forge.engines.settings import Quantization
from forge.engines.weights import Weights, weight_bytes
from forge.types import Completion, Sampling

from .conftest import Make, error_of, random_model

KINDS: tuple[Quantization, ...] = ("int8", "fp8")
PROMPT = [5, 9, 17, 2]
SAMPLING = Sampling(n=3, max_tokens=20, seed=4)


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """A matrix (out, in) rounded with a scale for each row, by numpy; float8_e4m3fn from its list of numbers."""
    values = weight.double().numpy()
    if kind == "int8":
        scale = np.abs(values).max(1, keepdims=True) / 127
        return torch.from_numpy(np.round(values / scale) * scale).float()
    magnitudes = [m / 8 * 2.0**-6 for m in range(8)]
    magnitudes += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    numbers = np.array(sorted({sign * number for number in magnitudes for sign in (-1, 1)}))
    scale = np.abs(values).max(1, keepdims=True) / 448
    scaled = values / scale
    nearest = numbers[np.abs(scaled[..., None] - numbers).argmin(-1)]
    return torch.from_numpy(nearest * scale).float()


def rounded_model(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """A copy whose layers have rounded matrices; experts are (experts, out, in), and a router stays."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in copied.named_parameters():
            if not re.search(r"layers\..*(proj|experts)", name) or weight.dim() < 2:
                continue
            rows = weight.detach().reshape(-1, weight.shape[-1])
            weight.copy_(rounded(rows, kind).view(weight.shape))
    return copied


def completions(engine: EmbeddedEngine) -> list[Completion]:
    return engine.submit(PROMPT, SAMPLING).result(60)


@pytest.mark.parametrize("family", ["qwen3", "llama-biased", "qwen3-moe", "gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_computes_with_rounded_weights_after_each_update(make: Make, family: str, kind: str):
    folder, first = make(family)
    second = random_model(family, seed=5)
    with EmbeddedEngine(folder, quantization=kind, device="cpu") as engine:
        for model, version in ((first, 0), (second, 1), (first, 2)):
            if version:
                engine.update_weights(model.state_dict().items(), version, f"digest {version}").result(60)
            for completion in completions(engine):
                assert completion.versions == [version] * len(completion.token_ids)
                # The numbers of float8 are as far apart as its rounding: one in many may fall to the other side.
                assert error_of(rounded_model(model, kind), completion) < 2e-3
                assert error_of(model, completion) > 2e-3


def weights_of(model: PreTrainedModel, dtype: torch.dtype, kind: Quantization | None = None) -> Weights:
    return Weights(model.config, model.state_dict().items(), dtype, torch.device("cpu"), quantization=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_router_embeddings_head_and_norms_are_not_quantized(make: Make, kind: Quantization):
    """A router's choice is discrete: a small error there is another expert. Names that contain `gate` are others."""
    _, model = make("qwen3-moe")
    weights = weights_of(model, torch.float32, kind)
    dense = weights_of(model, torch.float32)
    assert weights.head.scale is None
    assert torch.equal(weights.embed, dense.embed)
    for layer in weights.layers:
        experts = layer.feed_forward
        assert experts.router.scale is None  # type: ignore[union-attr]
        matrices = [layer.qkv, layer.output, *experts.gate_up, *experts.down]  # type: ignore[union-attr]
        assert {matrix.weight.element_size() for matrix in matrices} == {1}
        assert all(matrix.scale is not None for matrix in matrices)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_tensors(make: Make, kind: Quantization):
    _, model = make("qwen3")
    for quantization in (None, kind):
        weights = weights_of(model, torch.bfloat16, quantization)
        total = weights.embed.nbytes + weights.norm.nbytes + nbytes(weights.head)
        for layer in weights.layers:
            total += sum(nbytes(part) for part in (layer.qkv, layer.output))
            total += nbytes(layer.feed_forward.gate_up) + nbytes(layer.feed_forward.down)  # type: ignore[arg-type, union-attr]
            norms = (layer.input_norm, layer.mlp_norm, layer.qk_norm, layer.attended_norm, layer.fed_norm)
            total += sum(norm.nbytes for norm in norms if norm is not None)
        assert weight_bytes(model.config, torch.bfloat16, quantization) == total  # type: ignore[arg-type]


def nbytes(matrix: Linear) -> int:
    size = matrix.weight.numel() * matrix.weight.element_size()
    return size + sum(part.nbytes for part in (matrix.bias, matrix.scale) if part is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_fails_leaves_all_of_the_old_weights(make: Make, kind: str):
    folder, _ = make("qwen3")
    with EmbeddedEngine(folder, quantization=kind, device="cpu") as engine:
        before = completions(engine)
        tensors = dict(random_model("qwen3", seed=7).state_dict())
        tensors.pop("model.layers.2.mlp.down_proj.weight")
        with pytest.raises(ValueError, match=r"weight 'model\.layers\.2\.mlp\.down_proj\.weight' is missing"):
            engine.update_weights(tensors.items(), 1).result(60)
        assert [c.logprobs for c in completions(engine)] == [c.logprobs for c in before]
        assert engine.version == 0


def test_the_precision_of_what_was_published_makes_no_difference(make: Make):
    """An engine in bfloat16 rounds to its dtype before it quantises: float32 and bfloat16 give the same bytes."""
    _, model = make("qwen3")
    wide = model.state_dict()
    narrow = {name: tensor.bfloat16() for name, tensor in wide.items()}
    one, other = (
        Weights(model.config, tensors.items(), torch.bfloat16, torch.device("cpu"), quantization="fp8")
        for tensors in (wide, narrow)
    )
    for a, b in zip(one.layers, other.layers, strict=True):
        assert torch.equal(a.qkv.weight.view(torch.uint8), b.qkv.weight.view(torch.uint8))
        assert torch.equal(a.qkv.scale, b.qkv.scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_and_of_extremes(kind: str):
    nan, inf = float("nan"), float("inf")
    weight = torch.tensor([[0.0, 0.0, 0.0], [1e-30, -1e-30, 0.0], [3e38, -1e38, 1.0], [1.0, nan, 2.0], [1.0, inf, 2.0]])
    quantized, scale = quantize(weight, kind)  # type: ignore[arg-type]
    values = widened(quantized, torch.float32) * scale[:, None]
    assert torch.equal(values[0], torch.zeros(3))
    assert torch.allclose(values[1:3, :2], weight[1:3, :2], rtol=0.07, atol=0)
    assert values[3:].isnan().all()  # a diverged policy is seen
    product = Linear(quantized, None, scale)(torch.eye(3))
    assert torch.equal(product[:, :3], values[:3].T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_float8_is_widened_to_its_value(dtype: torch.dtype):
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[~numbers.float().isnan()]
    assert torch.equal(widened(numbers, dtype), numbers.to(dtype))


def test_it_is_of_the_embedded_engine():
    with pytest.raises(ValueError, match=r"generator\.quantization is of the embedded engine"):
        EngineSettings(engine="vllm", quantization="fp8")
    with pytest.raises(ValueError, match="quantization"):
        EngineSettings(quantization="int4")  # type: ignore[arg-type]
