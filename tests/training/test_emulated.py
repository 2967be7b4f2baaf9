"""Training on an emulated accelerator: the CPU's numbers, every tensor on the device, and few waits of the host."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from forge.training import checkpoint
from forge.training.checkpoint import Background
from forge.training.trainer import PolicyTrainer
from tests.emulated import NAME, Emulation, emulated
from tests.training.cases import (
    example,
    largest_difference,
    make_trainer,
    regression,
    targets,
    tiny_model,
    write_model,
)
from tests.training.ranks import LOSS
from tests.training.test_precision import reference

LENGTHS = [(3, 5), (1, 9), (6, 2), (2, 1), (4, 4), (5, 7)]
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": {"rank": 4}},
    "checkpointing": {"gradient_checkpointing": True},
    "updates": {"mini_batches": 2, "epochs": 2},
    "muon": {"optimizer": "muon"},
}


class Outcome(NamedTuple):
    """A trainer after two steps, and its numbers in host memory."""

    trainer: PolicyTrainer
    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    logprobs: np.ndarray


def train(model: Path, **settings: Any) -> Outcome:
    torch.manual_seed(0)
    trainer = make_trainer(model, gradient_accumulation_steps=2, **settings)
    metrics = [trainer.train_step(example(seed, LENGTHS), LOSS) for seed in range(2)]
    weights = {name: weight.cpu().float() for name, weight in trainer.weights().items()}
    return Outcome(trainer, metrics, weights, trainer.logprobs(example(9, LENGTHS)))


def misplaced(trainer: PolicyTrainer, device: str = NAME) -> list[str]:
    """Names of what is not on the device: parameters, their gradients, buffers and all state of the optimiser."""
    tensors = dict(trainer.policy.named_parameters())
    tensors |= {f"gradient of {name}": tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}
    tensors |= dict(trainer.policy.named_buffers())
    assert trainer.optimizer.state
    for number, state in enumerate(trainer.optimizer.state.values()):
        tensors |= {f"{name} of parameter {number}": value for name, value in state.items() if torch.is_tensor(value)}
    return [name for name, tensor in tensors.items() if tensor.device.type != device]


def compare(found: Outcome, expected: Outcome) -> tuple[float, float, float]:
    metrics = [
        abs(numbers[name] - others[name])
        for numbers, others in zip(found.metrics, expected.metrics, strict=True)
        for name in others
    ]
    weights = largest_difference(found.weights, expected.weights)
    return max(metrics), weights, float(np.abs(found.logprobs - expected.logprobs).max())


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe", "gemma3"])
def mild(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    written = tiny_model(request.param)
    with torch.no_grad():
        for parameter in written.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.1)
    written.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("which", SETTINGS)
def test_a_step_is_the_cpus(which: str, mild: Path):
    expected = train(mild, **SETTINGS[which])
    with emulated() as emulation:
        found = train(mild, **SETTINGS[which])
        print(mild.name, which, compare(found, expected), misplaced(found.trainer), len(found.trainer.optimizer.state))
        for n in (2, 6):
            found.trainer.passes = found.trainer.passes.model_copy(update={"gradient_accumulation_steps": n})
            with emulation.counted() as waits:
                m = found.trainer.train_step(example(5, LENGTHS), LOSS)
            print(m["micro_batches"], m["updates"], waits)
        with emulation.counted() as waits:
            found.trainer.logprobs(example(5, LENGTHS))
        print(waits)
