"""Adapters on a base of four bits: trainer, engine and export compute with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forge.losses import SFTLoss
from forge.training import checkpoint
from forge_families.four_bits import QuantizedLoraLinear, round_model
from tests.emulated import emulated
from tests.training.cases import example, largest_difference, make_trainer, weights_of, write_model

from .cases import batch_of, score_plainly, write_family


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_four_bit_base_model_computes_and_exports_rounded_weights(tmp_path: Path, kind: str):
    start = (write_model if kind == "qwen3" else write_family)(tmp_path / "start", kind)
    rounded = round_model(str(start), str(tmp_path / "rounded"), None)
    plain = AutoModelForCausalLM.from_pretrained(rounded)
    original = AutoModelForCausalLM.from_pretrained(start)
    batch = batch_of((5, 12, 30))
    with torch.no_grad():
        expected, unrounded = (score_plainly(model, batch, 1.0) for model in (plain, original))
    assert (expected[0] - unrounded[0]).abs().max() > 1e-2

    trainer = make_trainer(Path(rounded), lora={"rank": 4, "quantize": "nf4"}, learning_rate=1e-2)
    layers = [module for module in trainer.policy.modules() if isinstance(module, QuantizedLoraLinear)]
    assert layers
    assert all(2 * layer.packed.numel() == layer.in_features * layer.out_features for layer in layers)
    torch.testing.assert_close(tuple(trainer.policy(batch)), expected, rtol=0, atol=1e-4)
    whole = make_trainer(Path(rounded), lora={"rank": 4}, learning_rate=1e-2)
    for step in range(3):
        losses = [each.train_step(example(step), SFTLoss())["loss"] for each in (trainer, whole)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-4)

    # The factors are all that changes; the export is the rounded base with the adapters merged.
    assert largest_difference(weights_of(trainer), weights_of(whole)) < 1e-3
    checkpoint.export_model(trainer, tmp_path / "end", start)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    with torch.no_grad():
        exported = score_plainly(merged, batch, 1.0)
    torch.testing.assert_close(tuple(trainer.policy(batch)), exported, rtol=0, atol=1e-4)
    assert (exported[0] - expected[0]).abs().max() > 1e-3


def test_four_bit_base_model_moves_to_trainer_device(tmp_path: Path):
    start, lora = write_model(tmp_path / "start"), {"rank": 4, "quantize": "nf4"}
    expected = make_trainer(start, lora=lora).train_step(example(0), SFTLoss())["loss"]
    with emulated():
        trainer = make_trainer(start, lora=lora)
        trainer.offload()
        assert trainer.train_step(example(0), SFTLoss())["loss"] == pytest.approx(expected, abs=1e-5)


def test_four_bit_rounding_is_idempotent_and_kept_on_resume(tmp_path: Path):
    start = write_model(tmp_path / "start")
    once = round_model(str(start), str(tmp_path / "once"), None)
    twice = round_model(once, str(tmp_path / "twice"), None)
    read = [dict(AutoModelForCausalLM.from_pretrained(path).named_parameters()) for path in (once, twice)]
    assert all(torch.equal(read[0][name], read[1][name]) for name in read[0])

    # A resumed run reads the copy of its start, another run of the same name makes its own.
    file = Path(twice) / "model.safetensors"
    written = file.read_bytes()
    round_model(str(start), twice, ["q_proj"], keep=True)
    assert file.read_bytes() == written
    round_model(str(start), twice, ["q_proj"])
    assert file.read_bytes() != written
