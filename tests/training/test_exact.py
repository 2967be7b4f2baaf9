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
from forge.training.exact import EngineDifference
from forge.training.trainer import PolicyTrainer
from forge.types import Batch, Episode, Sampling
from tests.training.cases import FAMILIES, VOCAB, make_trainer, weights_of, write_model

DENSE = [name for name in FAMILIES if name not in ("qwen3_moe", "olmoe")]


def sample(trainer: PolicyTrainer, folder: Path, *, exact: bool, dtype: str = "float32") -> Batch:
    """Sample the trainer's weights with prompts of several lengths, some of them shared, in pieces and in rows."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB, length).tolist() for length in (1, 3, 17, 33, 40)]
    with EmbeddedEngine(folder, device="cpu", slots=7, dtype=dtype, exact=exact, prefill_tokens=20) as engine:
        engine.update_weights(weights_of(trainer).items(), 0).result(60)
        futures = [engine.submit(prompt, Sampling(3, 20, 0.7, seed=i)) for i, prompt in enumerate(prompts)]
        completions = [completion for future in futures for completion in future.result(60)]
    return pack([Episode(completion, advantage=float(rng.normal())) for completion in completions])


def move_adapters(trainer: Any) -> None:
    torch.manual_seed(0)
    for name, parameter in trainer.policy.named_parameters():
        if "lora_B" in name:  # which starts as 0
            torch.nn.init.normal_(parameter, std=0.1)


def difference(trainer: PolicyTrainer, batch: Batch) -> float:
    return float(np.abs(trainer.logprobs(batch) - batch.logprobs)[batch.mask].max())


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "qwen3" else pytest.mark.full) for name in DENSE]
)
def test_engine_and_exact_trainer_compute_equal_bits(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path, family, **({"original_max_position_embeddings": 64} if family == "phi3" else {}))
    for settings in ({}, {"dtype": "bfloat16"}, {"seq_len": 70}, {"lora": {"rank": 2}}):
        trainer: Any = make_trainer(folder, exact=True, temperature=0.7, **settings)
        move_adapters(trainer)
        dtype = settings.get("dtype", "float32")
        assert difference(trainer, sample(trainer, folder, exact=True, dtype=dtype)) == 0

    # Without it they differ.
    plain = make_trainer(folder, temperature=0.7)
    assert difference(plain, sample(plain, folder, exact=False)) > 0


def test_one_changed_bit_of_weights_raises(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    trainer = make_trainer(folder, exact=True, temperature=0.7)
    batch = sample(trainer, folder, exact=True)
    assert trainer.train_step(batch, GRPO())["engine_difference"] == 0
    # The next step trains on the same tokens, which are of the version before: still checked.
    assert trainer.train_step(batch, GRPO())["engine_difference"] == 0

    trainer.engine_check.earlier[0][-1].view(torch.int32)[0] ^= 1
    with pytest.raises(EngineDifference, match=r"at \d+ of \d+ tokens of the same weights; the first is token \d+"):
        trainer.train_step(batch, GRPO())
    changed = make_trainer(folder, exact=True, temperature=0.7)
    changed.policy.model.model.norm.weight.data.view(torch.int32)[0] ^= 1
    with pytest.raises(EngineDifference):
        changed.train_step(batch, GRPO())


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_exact_gradients_equal_ordinary_ones(tmp_path: Path, lora: dict[str, int] | None) -> None:
    folder = write_model(tmp_path, "gemma3")
    gradients = []
    for exact in (False, True):
        trainer = make_trainer(folder, exact=exact, lora=lora)
        move_adapters(trainer)
        batch = sample(trainer, folder, exact=False)
        scores = trainer.policy(batch, 0.7)
        (scores.logprobs.cos() + scores.entropy.sin()).sum().backward()
        gradients.append({name: p.grad for name, p in trainer.policy.named_parameters() if p.grad is not None})
    ordinary, exact_ones = gradients
    assert ordinary.keys() == exact_ones.keys()
    for name, gradient in ordinary.items():
        assert float((exact_ones[name] - gradient).norm() / gradient.norm()) < 1e-4, name
