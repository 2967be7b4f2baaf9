"""The embedded engine on transformers' modules agrees with transformers: tokens, log-probabilities, updates, bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV3Config,
    Exaone4Config,
    Gemma2Config,
    Glm4Config,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    MambaConfig,
    Olmo3Config,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

import forge
from forge.engines import EmbeddedEngine
from forge.models.weight_layouts import merge_adapters
from forge.types import Sampling
from forge_families.engine import find_tier
from forge_families.probe import build_small_model
from forge_families.weights import read_parameters
from tests.emulated import emulated

from ..engines.conftest import check_by_hand, drive, error_of
from .cases import small_config, write_family

VOCAB = 61
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
HYBRID = ["linear_attention", "full_attention"] * 2
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "num_local_experts": 0}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt_oss": (GptOssConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS}),
    "gemma2": (Gemma2Config, {**WINDOWS, "attn_logit_softcapping": 5.0}),
    "glm4": (Glm4Config, {}),
    "granite": (GraniteConfig, {"attention_multiplier": 0.1, "logits_scaling": 2.0}),
    "cohere2": (Cohere2Config, WINDOWS),
    "olmo3": (Olmo3Config, WINDOWS),
    "exaone4": (Exaone4Config, WINDOWS),
    "gpt2": (GPT2Config, {}),
    "deepseek_v3": (DeepseekV3Config, {"first_k_dense_replace": 1, "head_dim": 8, **LATENT, **EXPERTS}),
    "qwen3_5_text": (Qwen3_5TextConfig, {"layer_types": HYBRID, **DELTA}),
    "lfm2": (Lfm2Config, {"layer_types": ["conv", "full_attention"] * 2, "full_attn_idxs": None}),
    "granitemoehybrid": (GraniteMoeHybridConfig, {"layer_types": ["mamba", "attention"] * 2, **MAMBA2}),
    "mamba": (MambaConfig, {"state_size": 8}),
}
FAST = ("gpt_oss", "deepseek_v3", "qwen3_5_text")
RECURRENT = ("qwen3_5_text", "lfm2", "granitemoehybrid", "mamba")
SEPARATE = ("bloom", "nemotron_h")  # each row by transformers: with its cache, or by passes of all tokens
PROMPTS = [[5], [7, 8], list(range(10, 51)), [1, 2, 3, 4, 5, 6, 7], [59] * 20]
Make = Callable[..., tuple[Path, PreTrainedModel]]


def random_model(name: str, seed: int = 0, **sizes: Any) -> PreTrainedModel:
    """A model whose caps, sinks and windows change its results."""
    if name in SEPARATE:
        return build_small_model(small_config(name, vocab_size=VOCAB, eos_token_id=None), seed)
    kind, extra = MODELS[name]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if name == "deepseek_v3" else 2,
        "head_dim": 16,
        "max_position_embeddings": 320,
        **{"pad_token_id": 0, "eos_token_id": None, "bos_token_id": None},
    }
    if name == "gpt2":
        settings = {"vocab_size": VOCAB, "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 320}
        settings |= {"eos_token_id": None, "bos_token_id": None}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**settings | extra | sizes), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # A delta net with larger weights multiplies roundings, those of transformers as well.
            (
                parameter.normal_(0, 0.08 if name == "qwen3_5_text" else 0.25)
                if parameter.dim() > 1
                else parameter.uniform_(0.5, 1.5)
            )
    return model


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(name: str, **sizes: Any) -> tuple[Path, PreTrainedModel]:
        model = random_model(name, **sizes)
        model.save_pretrained(tmp_path)
        return tmp_path, model

    return make


@pytest.mark.parametrize(
    "name", [*FAST, *SEPARATE, *(pytest.param(name, marks=pytest.mark.full) for name in MODELS if name not in FAST)]
)
def test_engine_with_transformers_modules_matches_transformers_tokens(make: Make, name: str) -> None:
    folder, model = make(name)
    with EmbeddedEngine(folder, slots=4) as engine:
        sampled = [engine.submit(p, Sampling(n=2, max_tokens=12, temperature=0.8, seed=1)) for p in PROMPTS]
        greedy = [engine.submit(p, Sampling(max_tokens=8, temperature=0)) for p in PROMPTS]
        for future in sampled:
            assert max(error_of(model, c, 0.8) for c in future.result(60)) < 1e-4
        for prompt, future in zip(PROMPTS, greedy, strict=True):
            (completion,) = future.result(60)
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)  # type: ignore[operator]
            assert completion.token_ids == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("name", "device"),
    [("gpt_oss", emulated), *((name, nullcontext) for name in ("gpt_oss", "qwen3_5_text", "mamba", "bloom"))],
)
def test_chunked_prompt_prefill_in_modules_matches_transformers(make: Make, name: str, device: Any) -> None:
    folder, model = make(name)
    with device(), EmbeddedEngine(folder, slots=4, prefill_tokens=7) as engine:
        futures = [engine.submit(p, Sampling(max_tokens=9, seed=2)) for p in PROMPTS]
        assert max(error_of(model, future.result(60)[0]) for future in futures) < 1e-4
        assert engine.stats()["prefilled_tokens"] == sum(len(p) - 1 for p in PROMPTS)


@pytest.mark.parametrize("name", [*FAST, *SEPARATE])
def test_samples_of_one_prompt_share_one_prefill(make: Make, name: str) -> None:
    folder, model = make(name)
    prompt = PROMPTS[2]
    with EmbeddedEngine(folder, slots=4) as engine:
        completions = engine.submit(prompt, Sampling(n=7, max_tokens=20, seed=3)).result(60)
        assert engine.stats()["prefilled_tokens"] == len(prompt) - 1
        assert max(error_of(model, completion) for completion in completions) < 1e-4
        assert len({tuple(completion.token_ids) for completion in completions}) > 1
        # Only layers with keys and values have blocks of prompts for later requests.
        engine.submit(prompt, Sampling(max_tokens=2)).result(60)
        assert bool(engine.stats()["reused_tokens"]) == (name not in (*RECURRENT, *SEPARATE))


@pytest.mark.parametrize(
    "name",
    [
        *("gpt_oss", "bloom"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("deepseek_v3", "gpt2", "gemma2", "olmo3")),
    ],
)
def test_module_engine_bits_are_independent_of_other_requests(make: Make, name: str) -> None:
    # All widths are multiples of 32, as vectorised functions round the rest of a tensor otherwise.
    sizes = {"gpt2": {"n_embd": 96}, "deepseek_v3": {"hidden_size": 96, "n_routed_experts": 32}}
    folder, _ = make(name, **sizes.get(name, {"hidden_size": 96}))
    requests = [(prompt, Sampling(n=2, max_tokens=24, seed=i, temperature=0.9)) for i, prompt in enumerate(PROMPTS)]
    results = []
    for slots, others, pieces in ((2, 0, 4096), (8, 3, 4096), (24, 20, 9)):
        with EmbeddedEngine(folder, slots=slots, prefill_tokens=pieces, prefix_cache_mb=0) as engine:
            for i in range(others):
                engine.submit([i + 1] * (3 * i + 1), Sampling(max_tokens=10 + 2 * i, seed=i))
            futures = [engine.submit(*request) for request in requests]
            results.append([(c.token_ids, c.logprobs) for future in futures for c in future.result(60)])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "continue") for name in ("gpt_oss", "gpt2", "bloom")),
        ("olmo3", "recompute"),
        ("bloom", "recompute"),
    ],
)
def test_module_engine_tokens_record_sampling_weight_version(make: Make, name: str, mode: str) -> None:
    folder, first = make(name)
    models = {0: first, 1: random_model(name, seed=1), 2: random_model(name, seed=2)}
    with EmbeddedEngine(folder, slots=5, on_update=mode) as engine:
        updates: list[Any] = []
        drive(engine, {6: update(engine, models, updates, 1), 13: update(engine, models, updates, 2)})
        futures = [
            engine.submit(PROMPTS[4], Sampling(n=6, max_tokens=12, seed=1)),
            engine.submit([4], Sampling(max_tokens=24)),
        ]
        versions = set()
        for future in futures:
            for completion in future.result(60):
                versions.update(completion.versions)
                check_by_hand(models, completion, keep=mode == "continue")
        assert [future.result(60) for future in updates] == [None, None]
        assert versions == {0, 1, 2}


def update(engine: EmbeddedEngine, models: dict[int, PreTrainedModel], futures: list[Any], version: int) -> Any:
    return lambda: futures.append(
        engine.update_weights(models[version].named_parameters(), version, f"digest {version}")
    )


@pytest.mark.parametrize("name", [*RECURRENT, *SEPARATE])
def test_recurrent_states_are_reset_after_weight_update(make: Make, name: str) -> None:
    folder, _ = make(name)
    model = random_model(name, seed=1)
    with EmbeddedEngine(folder, slots=3) as engine:
        engine.submit([5, 6, 7], Sampling(n=5, max_tokens=9, seed=1)).result(60)
        engine.release().result(60)
        engine.update_weights(model.named_parameters(), 1, "digest 1").result(60)
        for prompt in ([9], PROMPTS[2]):  # rows that earlier samples had
            for completion in engine.submit(prompt, Sampling(n=4, max_tokens=12, seed=2)).result(60):
                assert error_of(model, completion) < 1e-4
                assert set(completion.versions) == {1}


def test_weight_update_with_wrong_tensor_names_tensor_in_error(make: Make) -> None:
    folder, model = make("gpt_oss")
    tensors = dict(model.named_parameters())
    name = "model.layers.1.mlp.experts.down_proj"
    with EmbeddedEngine(folder, slots=2) as engine:
        for change, message in (
            ({name: None}, f"{name}' is missing"),
            ({"model.extra": tensors[name]}, "model.extra' is not a weight of this model"),
            ({name: tensors[name][:1]}, rf"{name}' has shape \(1, "),
        ):
            changed = {key: value for key, value in {**tensors, **change}.items() if value is not None}
            with pytest.raises(ValueError, match=message):
                engine.update_weights(changed.items(), 1).result(60)
        twice = [*tensors.items(), (name, tensors[name])]
        with pytest.raises(ValueError, match=f"{name}' is not a weight of this model, or was given twice"):
            engine.update_weights(twice, 1).result(60)
        assert error_of(model, engine.submit([1, 2], Sampling(max_tokens=5)).result(60)[0]) < 1e-4


def test_lora_adapters_are_merged_by_module_name(make: Make) -> None:
    folder, model = make("gpt_oss")
    module = "model.layers.1.self_attn.q_proj"
    factors = {f"{module}.lora_A.weight": torch.randn(2, 64), f"{module}.lora_B.weight": torch.randn(64, 2)}
    with EmbeddedEngine(folder, slots=2) as engine:
        merged = merge_adapters(read_parameters(folder), factors)
        engine.update_weights(merged, 1, "digest 1").result(60)
        model.get_submodule(module).weight.data.addmm_(*reversed(factors.values()))
        assert error_of(model, engine.submit([1, 2], Sampling(max_tokens=9, seed=1)).result(60)[0]) < 1e-4


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(("kind", "settings"), [("gpt_oss", {"lora": {"rank": 4}}), ("qwen3_5_text", {})])
def test_engine_and_trainer_logprobs_of_a_family_agree_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = forge.train(
        str(write_family(tmp_path / "model", kind)),
        dataset=[{"question": word, "answer": word[::-1]} for word in ("abc", "cab", "bca", "acb")],
        prompt_template="{question}x",
        reward="CharacterMatch",
        name="family",
        steps=3,
        batch_size=4,
        n_samples=4,
        max_tokens=8,
        seq_len=256,
        learning_rate=1e-3,
        max_policy_age=0,
        services={"reward": None},
        **settings,
    )
    differences = [row["train/engine_difference"] for row in result.metrics if "train/engine_difference" in row]
    assert len(differences) == 3
    assert max(differences) < 1e-4


def test_model_without_supported_forward_names_unsupported_feature() -> None:
    with pytest.raises(ValueError, match=r"engine does not support this model's modules .*shared_kv_states"):
        find_tier(AutoConfig.for_model("gemma4_unified_assistant"))
