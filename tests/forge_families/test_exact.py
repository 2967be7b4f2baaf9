"""With `training.exact` the engine's log-probabilities are the trainer's bits, and any other bit ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge.algorithms import GRPO
from forge.data.packing import pack
from forge.engines import EmbeddedEngine
from forge.types import Batch, Episode, Sampling
from forge_families.exact import EngineDifference
from tests.training.cases import FAMILIES, VOCAB, example, make_trainer, weights_of, write_model


def exact_trainer(folder: Path, **settings: Any) -> Any:
    """A trainer whose adapters, if it has any, are not 0."""
    trainer = make_trainer(folder, **{"exact": True, "temperature": 0.7, **settings})
    for name, parameter in trainer.policy.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.linspace(-0.2, 0.2, parameter.numel()).view_as(parameter))
    return trainer


def sample_batch(trainer: Any, folder: Path, *, exact: bool = True, dtype: str = "float32", **_: Any) -> Batch:
    """Sample the trainer's weights with prompts of several lengths, shared, in pieces and in rows."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB, length).tolist() for length in (1, 3, 17, 33, 40)]
    with EmbeddedEngine(folder, device="cpu", slots=7, dtype=dtype, exact=exact, prefill_tokens=20) as engine:
        engine.update_weights(weights_of(trainer).items(), 0).result(60)
        futures = [engine.submit(prompt, Sampling(3, 20, 0.7, seed=i)) for i, prompt in enumerate(prompts)]
        completions = [completion for future in futures for completion in future.result(60)]
    return pack([Episode(completion, advantage=float(rng.normal())) for completion in completions])


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.full] * (name != "qwen3")) for name in FAMILIES if "moe" not in name],
)
def test_engine_and_exact_trainer_compute_equal_bits(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path, family, **({"original_max_position_embeddings": 64} if family == "phi3" else {}))
    settings = ({}, {"dtype": "bfloat16"}, {"seq_len": 70}, {"lora": {"rank": 2}}, {"exact": False})
    differences = []
    for changed in settings:
        trainer = exact_trainer(folder, **changed)
        batch = sample_batch(trainer, folder, **changed)
        differences.append(float(np.abs(trainer.logprobs(batch) - batch.logprobs)[batch.mask].max()))
    assert differences[:-1] == [0] * 4
    assert differences[-1] > 0


def test_exact_mode_raises_on_one_changed_weight_bit(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    trainer = exact_trainer(folder)
    batch = sample_batch(trainer, folder)
    # In the second step the same tokens are of the version before, and still checked.
    assert [trainer.train_step(batch, GRPO())["engine_difference"] for _ in range(2)] == [0, 0]

    trainer.engine_check.earlier[0][-1].view(torch.int32)[0] ^= 1
    changed = exact_trainer(folder)
    changed.policy.model.model.norm.weight.data.view(torch.int32)[0] ^= 1
    for damaged in (trainer, changed):
        with pytest.raises(EngineDifference, match=r"at \d+ of \d+ tokens of the same weights; the first is token \d+"):
            damaged.train_step(batch, GRPO())


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_exact_trainer_gradients_equal_default_trainer_gradients(tmp_path: Path, lora: dict[str, int] | None) -> None:
    gradients: list[dict[str, torch.Tensor]] = []
    for exact in (False, True):
        trainer = exact_trainer(write_model(tmp_path, "gemma3"), exact=exact, lora=lora)
        scores = trainer.policy(example(), 0.7)
        (scores.logprobs.cos() + scores.entropy.sin()).sum().backward()
        gradients.append({name: p.grad for name, p in trainer.policy.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        assert float((gradients[1].pop(name) - gradient).norm() / gradient.norm()) < 1e-4, name
