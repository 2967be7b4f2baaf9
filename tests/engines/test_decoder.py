"""The embedded engine agrees with transformers: every family, mixed lengths, any sampling, to rounding."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forge.engines import EmbeddedEngine
from forge.types import Sampling

from .conftest import FAMILIES, VOCAB, Make, error_of, random_model

PROMPTS = [[5], [7, 8], list(range(10, 41)), [1, 2, 3, 4, 5, 6, 7], [59] * 20]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_logprobs_and_greedy_tokens_match_transformers(make: Make, family: str, tied: bool) -> None:
    folder, model = make(family, tied)
    with EmbeddedEngine(folder, slots=8) as engine:
        sampled = [engine.submit(p, Sampling(n=2, max_tokens=24, temperature=0.8, seed=1)) for p in PROMPTS]
        greedy = [engine.submit(p, Sampling(max_tokens=24, temperature=0)) for p in PROMPTS]
        for future in sampled:
            assert max(error_of(model, c, 0.8) for c in future.result(30)) < 1e-4
        for prompt, future in zip(PROMPTS, greedy, strict=True):
            (completion,) = future.result(30)
            assert error_of(model, completion) < 1e-4
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)  # type: ignore[operator]
            assert completion.token_ids == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("budget", [1, 7, 40])
def test_decoder_logprobs_match_transformers_at_any_prefill_tokens(make: Make, budget: int) -> None:
    folder, model = make("llama-scaled")
    with EmbeddedEngine(folder, slots=8, prefill_tokens=budget) as engine:
        futures = [engine.submit(p, Sampling(max_tokens=9, seed=2)) for p in PROMPTS]
        assert max(error_of(model, future.result(30)[0]) for future in futures) < 1e-4
        assert engine.stats()["prefilled_tokens"] == sum(len(p) - 1 for p in PROMPTS)


def test_bfloat16_decoder_logprobs_are_close_to_float32(make: Make) -> None:
    folder, model = make("qwen3")
    with EmbeddedEngine(folder, slots=4, dtype="bfloat16") as engine:
        (completion,) = engine.submit(PROMPTS[2], Sampling(max_tokens=8, seed=0)).result(30)
        assert error_of(model, completion) < 1.0


def test_sharded_checkpoint_loads_and_missing_shard_raises(make: Make) -> None:
    folder, model = make("qwen2")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    with EmbeddedEngine(folder, slots=2) as engine:
        assert error_of(model, engine.submit([1, 2], Sampling(max_tokens=5)).result(30)[0]) < 1e-4
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(FileNotFoundError, match=r"index\.json names"):
        EmbeddedEngine(folder)


def test_decoder_of_incomplete_model_directory_raises(make: Make, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model directory .* does not exist"):
        EmbeddedEngine(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        EmbeddedEngine(tmp_path)
    folder, _ = make()
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no weights"):
        EmbeddedEngine(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, r"weight '.*' is missing"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "does not support this model's"),
    ],
)
def test_decoder_of_unsupported_model_raises(make: Make, change: dict[str, object], message: str) -> None:
    folder, _ = make("qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        EmbeddedEngine(folder)


@pytest.mark.parametrize(
    "change",
    [{"hidden_act": "gelu"}, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}],
)
def test_config_values_unsupported_by_decoder_run_in_transformers_modules(
    make: Make, change: dict[str, object]
) -> None:
    folder, _ = make("qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with EmbeddedEngine(folder, slots=4) as engine:
        futures = [engine.submit(prompt, Sampling(max_tokens=12, seed=2)) for prompt in PROMPTS]
        assert max(error_of(model, future.result(30)[0]) for future in futures) < 1e-4


def test_max_seq_len_beyond_longrope_short_factors_raises(make: Make) -> None:
    folder, _ = make("phi3-long")
    with pytest.raises(ValueError, match=r"generator\.max_seq_len must be 2 to 72 for this model, got 73"):
        EmbeddedEngine(folder, max_seq_len=73)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "phi3"])
def test_prompts_longer_than_sliding_window_match_transformers(tmp_path: Path, family: str) -> None:
    model = random_model(family)
    model.config.max_position_embeddings = 400
    model.save_pretrained(tmp_path)
    with EmbeddedEngine(tmp_path, slots=4, prefill_tokens=90) as engine:
        prompts = [[i * i % VOCAB for i in range(count)] for count in (130, 300, 64, 8)]
        futures = [engine.submit(prompt, Sampling(n=2, max_tokens=20, seed=3)) for prompt in prompts]
        assert max(error_of(model, c) for future in futures for c in future.result(60)) < 1e-4


@pytest.mark.parametrize(
    "arguments", [{"slots": 0}, {"max_seq_len": 97}, {"max_seq_len": 1}, {"dtype": "float16"}, {"prefill_tokens": 0}]
)
def test_invalid_engine_arguments_raise(make: Make, arguments: dict[str, object]) -> None:
    folder, _ = make()
    with pytest.raises(ValueError, match=next(iter(arguments))):
        EmbeddedEngine(folder, **arguments)  # type: ignore[arg-type]
