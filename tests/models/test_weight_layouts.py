"""Names between trainer, engine and peft, and adapters merged in closed form."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge.models import FAMILIES
from forge.models.weight_layouts import (
    HEAD,
    engine_layout,
    is_derived,
    merge_adapters,
    plain_name,
    read_adapters,
    split_experts,
)

CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
}
AT = "base_model.model.model.layers.0.self_attn.q_proj"
PLAIN = "model.layers.0.self_attn.q_proj"


def config(model_type: str = "qwen3", tied: bool = False, **extra: Any) -> Any:
    return SimpleNamespace(model_type=model_type, tie_word_embeddings=tied, **{**CONFIG, **extra})


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_engine_weight_layout_covers_each_transformers_tensor_once(model_type: str, tied: bool, biased: bool) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    extra = {} if model_type in ("qwen2", "mistral", "phi3") else {"attention_bias": biased}
    kind = AutoConfig.for_model(
        model_type, **CONFIG, head_dim=8, tie_word_embeddings=tied, pad_token_id=0, bos_token_id=None, **extra
    )
    state = AutoModelForCausalLM.from_config(kind).state_dict()
    parts = [part for whole in engine_layout(kind).values() for part in whole]
    assert {part.name: part.shape for part in parts} == {
        name: tuple(tensor.shape) for name, tensor in split_experts(state.items()) if not is_derived(name, tied)
    }
    assert len({part.name for part in parts}) == len(parts)


def test_fused_weight_layout_parts_keep_row_order() -> None:
    table = engine_layout(config(head_dim=16))
    at = "model.layers.1.self_attn."
    assert [(part.name, part.rows) for part in table["layers.1.qkv.weight"]] == [
        (at + "q_proj.weight", 64),
        (at + "k_proj.weight", 32),
        (at + "v_proj.weight", 32),
    ]
    assert [part.name for part in table["layers.0.gate_up.weight"]] == [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ]
    assert [(part.rows, part.shape) for part in table["layers.0.qk_norm"]] == [(4, (16,)), (2, (16,))]
    assert "head.weight" in table
    assert "head.weight" not in engine_layout(config(tied=True))


@pytest.mark.parametrize(
    "suffix",
    [
        ".lora_embedding_A.default",
        ".lora_magnitude_vector.default.weight",
        ".lora_B.default.bias",
        ".modules_to_save.default.weight",
        ".original_module.weight",
    ],
)
def test_unmergeable_lora_adapter_raises(suffix: str) -> None:
    with pytest.raises(ValueError, match=rf"{AT}{suffix}"):
        plain_name(AT + suffix)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        f"{AT}.lora_A.default.weight": torch.randn(3, 5),
        f"{AT}.base_layer.weight": torch.randn(7, 5),
        "base_model.model.model.norm.weight": torch.randn(5),
        f"{AT}.lora_B.default.weight": torch.randn(7, 3),
        f"{AT}.base_layer.bias": torch.randn(7),
    }


def base_of(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is no factor, under plain names."""
    return {plain_name(name): tensor for name, tensor in named.items() if ".lora_" not in name}


def test_merged_lora_adapter_equals_closed_form() -> None:
    named = tensors()
    a, base, norm, b, bias = (tensor.clone() for tensor in named.values())
    factors = read_adapters(named.items())
    assert factors.keys() == {f"{PLAIN}.lora_A.weight", f"{PLAIN}.lora_B.weight"}
    assert read_adapters(factors.items()).keys() == factors.keys()
    factors[f"{PLAIN}.lora_B.weight"] = factors[f"{PLAIN}.lora_B.weight"] * 4  # alpha / rank
    plain_weights = base_of(named)
    merged = dict(merge_adapters(plain_weights.items(), factors))
    assert merged.keys() == {f"{PLAIN}.weight", f"{PLAIN}.bias", "model.norm.weight"}
    assert merged[f"{PLAIN}.weight"].dtype == torch.float32
    expected = base.double() + 12 / 3 * b.double() @ a.double()
    assert torch.allclose(merged[f"{PLAIN}.weight"].double(), expected, atol=1e-5)
    assert merged["model.norm.weight"] is plain_weights["model.norm.weight"]
    assert merged[f"{PLAIN}.bias"] is plain_weights[f"{PLAIN}.bias"]
    assert torch.equal(named[f"{AT}.base_layer.weight"], base)
    assert torch.equal(merged["model.norm.weight"], norm)
    assert torch.equal(merged[f"{PLAIN}.bias"], bias)
    assert list(merge_adapters([(HEAD, base)], {})) == [(HEAD, base)]


@pytest.mark.parametrize("lost", ["lora_A.default.weight", "lora_B.default.weight"])
def test_missing_lora_adapter_factor_error_names_factor(lost: str) -> None:
    named = tensors()
    del named[f"{AT}.{lost}"]
    with pytest.raises(ValueError, match=rf"{PLAIN}\.lora_.* needs '{PLAIN}\.{lost[:6]}"):
        read_adapters(named.items())


def test_lora_adapter_with_wrong_shape_or_base_model_raises() -> None:
    factors, weight = read_adapters(tensors().items()), f"{PLAIN}.weight"
    with pytest.raises(ValueError, match=r"lora_A.*shape \(3, 5\).* need \(3, 4\)"):
        dict(merge_adapters([(weight, torch.zeros(7, 4))], factors))
    with pytest.raises(ValueError, match=r"lora_B.*shape \(7, 3\).* need \(6, 3\)"):
        dict(merge_adapters([(weight, torch.zeros(6, 5))], factors))
    two = factors | {"other.lora_A.weight": torch.ones(2, 5), "other.lora_B.weight": torch.ones(7, 2)}
    with pytest.raises(ValueError, match=r"other\.lora_A\.weight' has shape \(2, 5\)"):
        list(merge_adapters([(weight, torch.zeros(7, 5)), ("other.weight", torch.zeros(7, 5))], two))
    with pytest.raises(ValueError, match=rf"{PLAIN}\.weight.*only matrices"):
        dict(merge_adapters([(weight, torch.zeros(6))], factors))
    with pytest.raises(ValueError, match=rf"{PLAIN}\.lora_A\.weight' has no base"):
        dict(merge_adapters([("model.norm.weight", torch.zeros(6))], factors))
    with pytest.raises(ValueError, match="is not a LoRA factor"):
        dict(merge_adapters([], {"model.norm.weight": torch.zeros(6)}))


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("updates", [1, 40])
def test_repeated_bfloat16_lora_merges_do_not_accumulate_rounding(scale: float, updates: int) -> None:
    """Merged from the base at every update, what is rounded does not add up: half a step of bfloat16 at most."""
    generator = torch.Generator().manual_seed(0)
    base = {"layer.weight": torch.randn(24, 16, generator=generator).bfloat16()}
    for _ in range(updates):
        factors = {
            "layer.lora_A.weight": torch.randn(3, 16, generator=generator),
            "layer.lora_B.weight": torch.randn(24, 3, generator=generator) * scale,
        }
        merged = dict(merge_adapters(base.items(), factors))["layer.weight"]
    exact = (
        base["layer.weight"].double()
        + factors["layer.lora_B.weight"].double() @ factors["layer.lora_A.weight"].double()
    )
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged.double(), exact, rtol=1e-6, atol=1e-7)
    assert ((merged.bfloat16().double() - exact).abs() <= exact.abs() / 256 + 1e-7).all()
