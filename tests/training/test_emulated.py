"""Training on an emulated accelerator: the CPU's numbers, every tensor on the device, and few waits of the host."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from forge.training.trainer import PolicyTrainer
from tests.emulated import NAME, emulated, lines
from tests.training.cases import example, largest_difference, make_trainer, regression, targets
from tests.training.ranks import LOSS
from tests.training.test_precision import reference

LENGTHS = [(3, 5), (1, 9), (6, 2), (2, 1), (4, 4), (5, 7)]
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": {"rank": 4}},
    "checkpointing": {"gradient_checkpointing": True},
    "updates": {"mini_batches": 2, "epochs": 2},
}
HALF: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 weights": {"dtype": "bfloat16", "weights_dtype": "bfloat16", "optimizer_dtype": "float32"},
}
# Largest differences to the CPU, where attention adds in another order: measured 3e-7 (relative to numbers above 1),
# 3e-6 and 5e-7.
METRICS, WEIGHTS, LOGPROBS = 1e-6, 5e-5, 2e-5
WAITS_OF_UPDATE, WAITS_OF_MICRO_BATCH = 2, 0  # the loss with the gradient's norm, and the metrics


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
    return Outcome(trainer, metrics, on_host(trainer), trainer.logprobs(example(9, LENGTHS)))


def on_host(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """Weights of transformers, adapters merged."""
    return {name: weight.detach().cpu().float() for name, weight in trainer.export_weights()}


def misplaced(trainer: PolicyTrainer, device: str = NAME) -> list[str]:
    """Names of parameters, their gradients, buffers and state of the optimiser that are on another device."""
    tensors = dict(trainer.policy.named_parameters())
    tensors |= {f"gradient of {name}": tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}
    tensors |= dict(trainer.policy.named_buffers())
    assert trainer.optimizer.state
    for number, state in enumerate(trainer.optimizer.state.values()):
        tensors |= {f"{name} of parameter {number}": value for name, value in state.items() if torch.is_tensor(value)}
    return [name for name, tensor in tensors.items() if tensor.device.type != device]


def assert_equal(metrics: dict[str, float], expected: dict[str, float]) -> None:
    assert metrics.keys() == expected.keys()
    apart = {name: abs(metrics[name] - value) / max(1, abs(value)) for name, value in expected.items()}
    assert max(apart.values()) < METRICS, apart


def check_places(trainer: PolicyTrainer) -> None:
    """Training, scoring, and moves to host memory and back leave nothing elsewhere."""
    trainer.train_step(example(2, LENGTHS), LOSS)
    assert misplaced(trainer) == []
    trainer.offload()
    assert misplaced(trainer, "cpu") == []
    trainer.onload()
    assert misplaced(trainer) == []
    trainer.offload()
    trainer.train_step(example(3, LENGTHS), LOSS)
    assert misplaced(trainer) == []


def check_waits(model: Path, *, recorded: bool = False, **settings: Any) -> None:
    """The host waits a fixed number of times an update, and not in its micro-batches."""
    counts, updates = [], 0.0
    with emulated() as emulation:
        trainer = make_trainer(model, **settings)
        for parts in (1, 3):
            trainer.passes = trainer.passes.model_copy(update={"gradient_accumulation_steps": parts})
            batch = example(parts, LENGTHS)
            if recorded:
                batch.recorded = np.where(batch.mask, np.cumsum(batch.mask) - 1, -1)
            with emulation.counted() as waits:
                metrics = trainer.train_step(batch, LOSS)
            counts.append(waits)
            updates = metrics["updates"]
            assert metrics["micro_batches"] == parts * updates
    few, many = counts
    assert (many - few).total() <= 2 * updates * WAITS_OF_MICRO_BATCH, lines(many - few)
    assert few.total() <= updates * (WAITS_OF_UPDATE + WAITS_OF_MICRO_BATCH) + recorded, lines(few)


def check_step(model: Path, expected: Outcome, **settings: Any) -> None:
    """Two steps are the CPU's, and everything is in its place."""
    with emulated():
        found = train(model, **settings)
        check_places(found.trainer)
    for metrics, others in zip(found.metrics, expected.metrics, strict=True):
        assert_equal(metrics, others)
    assert largest_difference(found.weights, expected.weights) < WEIGHTS
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=LOGPROBS)


@pytest.mark.parametrize("which", SETTINGS)
def test_training_step_on_emulated_device_matches_cpu(which: str, mild: dict[str, Path]):
    check_step(mild["qwen3"], train(mild["qwen3"], **SETTINGS[which]), **SETTINGS[which])


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3"])
def test_moe_and_gemma_steps_on_emulated_device_match_cpu(family: str, mild: dict[str, Path]):
    check_step(mild[family], train(mild[family]))


@pytest.mark.parametrize("which", HALF)
def test_half_precision_step_on_emulated_device_is_close_to_float32(which: str, mild: dict[str, Path]):
    """Closer than its rounding, 2^-8 of a number; log-probabilities are about -3.5, and .003 apart."""
    expected = train(mild["qwen3"])
    with emulated():
        found = train(mild["qwen3"], **HALF[which])
        dtypes = {parameter.dtype for parameter in found.trainer.policy.parameters()}
        check_places(found.trainer)
    assert dtypes == {getattr(torch, HALF[which].get("weights_dtype", "float32"))}
    assert 0 < np.abs(found.logprobs - expected.logprobs).max() < 2**-6
    assert largest_difference(found.weights, expected.weights) < 2**-7


@pytest.mark.full
@pytest.mark.parametrize("which", SETTINGS | HALF)
def test_training_step_has_fixed_number_of_host_synchronisations(which: str, mild: dict[str, Path]):
    check_waits(mild["qwen3"], **(SETTINGS | HALF)[which])


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3"])
def test_moe_and_gemma_steps_have_fixed_number_of_host_synchronisations(family: str, mild: dict[str, Path]):
    check_waits(mild[family])


def test_recorded_token_metrics_are_copied_to_host_once_per_step(mild: dict[str, Path]):
    check_waits(mild["qwen3"], recorded=True)


@pytest.mark.parametrize("head", ["value", "reward"])
def test_scalar_head_on_emulated_device_matches_cpu(head: str, mild: dict[str, Path]):
    def outcome() -> tuple[PolicyTrainer, dict[str, float], np.ndarray]:
        trainer = make_trainer(mild["qwen3"], head=head)
        metrics = trainer.train_step(targets(0, LENGTHS), regression)
        return trainer, metrics, trainer.predict(targets(1, LENGTHS))

    _, metrics, expected = outcome()
    with emulated():
        trainer, found, values = outcome()
        assert misplaced(trainer) == []
    assert_equal(found, metrics)
    np.testing.assert_allclose(values, expected, rtol=0, atol=LOGPROBS)


def test_reference_logprobs_on_emulated_device_match_cpu(mild: dict[str, Path]):
    batch = example(0, LENGTHS)
    expected = reference(mild["qwen3"]).logprobs(batch)
    with emulated() as emulation:
        frozen = reference(mild["qwen3"])
        assert {parameter.device for parameter in frozen.policy.parameters()} == {emulation.device}
        found = frozen.logprobs(batch)
    np.testing.assert_allclose(found, expected, rtol=0, atol=LOGPROBS)
