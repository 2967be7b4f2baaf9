"""Families that only transformers computes are trained as transformers trains them, and written as it writes them."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from forge.engines import EmbeddedEngine
from forge.losses import SFTLoss
from forge.models.architecture import check_config
from forge.models.find import check_classifier
from forge.training import checkpoint
from forge.training.settings import Parallelism
from forge.types import Sampling
from forge_families import probe
from forge_families.probe import find_traits, make_policy, shrink_config
from tests.training.cases import TOKENIZER, example, largest_difference, make_trainer, weights_of

from .cases import KINDS, batch_of, draw_config, score_plainly, small_config, small_model, write_family


def check_gradients(kind: str, values: dict[str, Any]) -> None:
    """Compare a policy in training with transformers' model: its scores, and gradients of all parameters."""
    model = small_model(kind, **values)
    plain = copy.deepcopy(model)
    batch = batch_of()
    policy = make_policy(model).train()
    scores = policy(batch, temperature=0.8)
    expected = score_plainly(plain, batch, 0.8)
    torch.testing.assert_close(tuple(scores), expected, rtol=0, atol=1e-4)

    share = torch.linspace(-1, 1, len(expected[0])) / len(expected[0])
    for logprobs, entropy in (scores, expected):
        (share @ logprobs + share.flip(0) @ entropy).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    largest = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-4 * max(1, largest), msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_policy_of_each_family_matches_transformers(kind: str):
    assert find_traits(small_config(kind)).attention == KINDS[kind][1]
    check_gradients(kind, {})


@pytest.mark.parametrize("seed", range(6))
def test_policy_of_random_config_matches_transformers(seed: int):
    check_gradients(*draw_config(seed))


@pytest.mark.parametrize("kind", ["glm4_moe", "gpt_oss", "qwen3_5_text"])
def test_resumed_and_exported_family_model_equals_trained_model(tmp_path: Path, kind: str):
    start = write_family(tmp_path / "start", kind)
    trainer, resumed = make_trainer(start), make_trainer(start)
    trainer.train_step(example(0), SFTLoss())
    path = checkpoint.save_checkpoint(trainer, tmp_path / "checkpoints")
    checkpoint.load_checkpoint(resumed, path)
    for each in (trainer, resumed):
        each.train_step(example(1), SFTLoss())
    assert largest_difference(weights_of(trainer), weights_of(resumed)) == 0
    assert largest_difference(weights_of(trainer), weights_of(make_trainer(start))) > 1e-4

    # The names of the files are those of the model on the hub, buffers included.
    checkpoint.export_model(trainer, tmp_path / "end", start)
    assert load_file(tmp_path / "end/model.safetensors").keys() == load_file(start / "model.safetensors").keys()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    batch = batch_of()
    with torch.no_grad():
        expected = score_plainly(plain, batch, 1.0)
    torch.testing.assert_close(tuple(trainer.policy(batch)), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3", "gemma4"])
def test_language_part_of_image_checkpoint_trains_and_generates(tmp_path: Path, kind: str):
    whole = AutoModelForImageTextToText.from_config(shrink_config(AutoConfig.for_model(kind)), dtype=torch.float32)
    whole.save_pretrained(tmp_path / "start")
    TOKENIZER.save_pretrained(tmp_path / "start")
    trainer = make_trainer(tmp_path / "start")
    trainer.train_step(example(0), SFTLoss())
    checkpoint.export_model(trainer, tmp_path / "end", tmp_path / "start")
    names = [load_file(tmp_path / folder / "model.safetensors").keys() for folder in ("start", "end")]
    assert names[1] <= names[0]

    engine = EmbeddedEngine(tmp_path / "end", slots=8, max_seq_len=64)
    (answer,) = engine.submit([5, 6, 7], Sampling(max_tokens=8, seed=0)).result()
    engine.close()
    batch = batch_of((3 + len(answer.token_ids),))
    batch.tokens[:] = [5, 6, 7, *answer.token_ids]
    with torch.no_grad():
        logprobs = trainer.policy(batch).logprobs[2:]
    torch.testing.assert_close(logprobs, torch.tensor(answer.logprobs), rtol=0, atol=1e-4)


def test_lora_with_gradient_checkpointing_trains_a_model_family(tmp_path: Path):
    start = write_family(tmp_path / "start", "gpt_oss")
    trainer = make_trainer(start, lora={"rank": 4}, gradient_checkpointing=True)
    losses = [trainer.train_step(example(0), SFTLoss())["loss"] for _ in range(6)]
    assert losses[-1] < losses[0]
    assert all("lora" in name for name in trainer.weights())


def test_probe_answers_are_kept_for_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[str] = []

    def ask(config: PreTrainedConfig) -> tuple[str, str]:
        asked.append(config.model_type)
        return config.model_type, ""

    for kind in ("glm4_moe", "gpt_oss", "glm4_moe"):
        monkeypatch.setattr(probe, "_ANSWERS", {})  # as in a new process
        assert probe.recall_answer(small_config(kind), ask) == kind
    assert asked == ["glm4_moe", "gpt_oss"]


def test_model_that_cannot_be_shrunk_is_trained_in_padded_rows(caplog: pytest.LogCaptureFixture):
    config = AutoConfig.for_model("xmod")  # asks for a language before its first forward pass
    with caplog.at_level(logging.INFO):
        traits = find_traits(config)
    assert traits.attention == "eager"
    assert "cannot be cut to a small model" in traits.reason
    assert "xmod is trained in padded rows" in caplog.text


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("bert", {}, "bidirectional attention"),
        ("glm4", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_unsupported_model_config_raises_one_line_error(kind: str, values: dict[str, Any], message: str):
    config = AutoConfig.for_model(kind, **values)
    with pytest.raises(ValueError, match=message) as raised:
        check_config(config)
    assert "\n" not in str(raised.value)


def test_features_requiring_packed_attention_raise_without_support():
    config = shrink_config(AutoConfig.for_model("gpt_oss"))
    with pytest.raises(ValueError, match=r"gpt_oss models have no critics and reward models: packed attention does"):
        check_classifier(config)
    with pytest.raises(ValueError, match=r"have no parallelism.context_parallel_degree"):
        Parallelism(context_parallel_degree=2).check(config)
    with pytest.raises(ValueError, match="tensor_parallel_degree: gpt_oss models are not supported"):
        Parallelism(tensor_parallel_degree=2).check(config)
