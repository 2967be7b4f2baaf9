"""AdamW with state of another dtype than the weights': against plain formulas, on one rank and on four."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from forge.runtime.store import VersionStore
from forge.training import checkpoint
from forge.training.distributed import Ranks, join
from forge.training.optimizers import build_optimizer, join_bits, split_bits
from forge.training.settings import OptimizerSettings, Parallelism
from forge.training.trainer import PolicyTrainer
from tests.training import conftest
from tests.training.cases import example, largest_difference, make_trainer, write_model
from tests.training.layouts import degrees
from tests.training.ranks import LOSS, whole

HALF = {"dtype": "bfloat16", "weights_dtype": "bfloat16"}
KINDS: dict[str, dict[str, Any]] = {
    "float32 state": {"optimizer_dtype": "float32", **HALF},
    "bfloat16 state": {"optimizer_dtype": "bfloat16"},
}
LAYOUTS = {"shards": (1, 4, 1, 1), "copies": (2, 2, 1, 1), "tensor": (1, 2, 1, 2)}
ON_FOUR = [("float32 state", "tensor"), ("float32 state", "copies"), ("bfloat16 state", "shards")]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("wide"), hidden_size=128, intermediate_size=128)


def exact_weights(trainer: PolicyTrainer) -> dict[str, Tensor]:
    """The float32 weights that the optimiser updates, whole."""
    found = {}
    for name, parameter in trainer.policy.named_parameters():
        state = trainer.optimizer.state[parameter]
        weight = whole(parameter.detach())
        found[name] = weight.float().clone()
        if "remainder" in state:
            found[name] = join_bits(weight, whole(state["remainder"].int()))  # gloo gathers no int16
    return found


def train(trainer: PolicyTrainer, *seeds: int) -> list[dict[str, float]]:
    return [trainer.train_step(example(seed), LOSS) for seed in seeds]


def recorded(trainer: PolicyTrainer, steps: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """The clipped gradients of some steps, and the weights before each and at the end."""
    gradients, weights = [], [exact_weights(trainer)]

    def note(*_: Any) -> None:
        named = trainer.policy.named_parameters()
        gradients.append({name: parameter.grad.detach().double() for name, parameter in named})

    handle = trainer.optimizer.register_step_pre_hook(note)
    for seed in range(steps):
        train(trainer, seed)
        weights.append(exact_weights(trainer))
    handle.remove()
    return gradients, weights


class Adam:
    """AdamW in float64, by hand."""

    def __init__(self, weight: Tensor, state: torch.dtype = torch.float64, decay: float = 0.0) -> None:
        self.weight, self.dtype, self.decay, self.step = weight.double().clone(), state, decay, 0
        self.mean = self.square = torch.zeros_like(self.weight)

    def update(self, gradient: Tensor, rate: float, beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8) -> None:
        self.step += 1
        mean = beta1 * self.mean + (1 - beta1) * gradient
        square = beta2 * self.square + (1 - beta2) * gradient**2
        root = (square / (1 - beta2**self.step)).sqrt() + eps
        self.weight = self.weight * (1 - rate * self.decay) - rate * mean / (1 - beta1**self.step) / root
        self.mean, self.square = mean.to(self.dtype).double(), square.to(self.dtype).double()


def steps_of(layer: nn.Linear, settings: OptimizerSettings, state: torch.dtype) -> tuple[Any, Adam]:
    """Fifty updates of a layer without its bias, beside those by hand."""
    random, optimizer = torch.Generator().manual_seed(1), build_optimizer(layer, settings)
    by_hand = Adam(layer.weight.detach(), state)
    for _ in range(50):
        layer.weight.grad = (torch.randn(16, 24, generator=random) + 0.5).to(layer.weight.dtype)
        by_hand.update(layer.weight.grad.double(), settings.learning_rate)
        optimizer.step()
    return optimizer.state[layer.weight], by_hand


def test_bfloat16_weights_with_float32_state_lose_no_update():
    torch.manual_seed(0)
    start, rate = torch.randn(16, 24).bfloat16(), 1e-5
    with_state, lost = (nn.Linear(24, 16, bias=False, dtype=torch.bfloat16) for _ in range(2))
    for layer in (with_state, lost):
        layer.weight.data.copy_(start)
    state, by_hand = steps_of(with_state, OptimizerSettings(learning_rate=rate, optimizer_dtype="float32"), torch.float)
    exact = join_bits(with_state.weight.detach(), state["remainder"])
    torch.testing.assert_close(exact.double(), by_hand.weight, rtol=3e-6, atol=1e-8)
    assert {name: value.dtype for name, value in state.items()} == {
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
        "step": torch.float32,
        "remainder": torch.int16,
    }
    assert torch.equal(with_state.weight, exact.bfloat16())
    large = start.abs() > 0.1  # where rounding loses every single update
    assert (exact - start.float())[large].abs().mean() > 2e-4
    steps_of(lost, OptimizerSettings(learning_rate=rate), torch.float)
    assert torch.equal(lost.weight[large], start[large])


def test_float32_weights_with_bfloat16_state():
    torch.manual_seed(0)
    layer = nn.Linear(24, 16, bias=False)
    settings = OptimizerSettings(learning_rate=1e-3, optimizer_dtype="bfloat16")
    state, by_hand = steps_of(layer, settings, torch.bfloat16)
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    torch.testing.assert_close(layer.weight.detach().double(), by_hand.weight, rtol=0, atol=5e-5)
    assert (layer.weight.detach().double() - Adam(by_hand.weight).weight).abs().max() < 5e-5


def test_a_float32_weight_is_two_halves():
    random = torch.Generator().manual_seed(0)
    exact = torch.randn(50_000, generator=random) * torch.logspace(-38, 38, 50_000)
    weight, remainder = torch.empty(50_000, dtype=torch.bfloat16), torch.empty(50_000, dtype=torch.int16)
    split_bits(exact, weight, remainder)
    assert torch.equal(join_bits(weight, remainder), exact)
    torch.testing.assert_close(weight.float(), exact.bfloat16().float(), rtol=1 / 128, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "adam"}, "training.optimizer 'adam' is unknown: write package.module:Name"),
        ({"optimizer_dtype": "float16"}, "must be one of float32, bfloat16"),
        ({"optimizer_dtype": "bfloat16", "beta2": 0.999}, "set it below 0.996, or float32"),
    ],
)
def test_settings_of_optimisers_that_mean_nothing(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        OptimizerSettings(**settings)


@pytest.mark.parametrize("kind", KINDS)
def test_training_resumes_to_the_bit(wide: Path, tmp_path: Path, kind: str):
    trainer, restored = (make_trainer(wide, **KINDS[kind]) for _ in range(2))
    train(trainer, 0, 1, 2)
    path = checkpoint.save(trainer, tmp_path)
    after = train(trainer, 3, 4)
    checkpoint.load(restored, path)
    assert train(restored, 3, 4) == after
    assert largest_difference(exact_weights(restored), exact_weights(trainer)) == 0.0


def test_a_checkpoint_of_another_optimiser(model: Path, tmp_path: Path):
    path = checkpoint.save(make_trainer(model, optimizer="torch.optim:Adam"), tmp_path)
    with pytest.raises(
        ValueError, match=r"was written with the optimizer torch.optim:Adam, and this trainer has adamw$"
    ):
        checkpoint.load(make_trainer(model), path)
    path = checkpoint.save(make_trainer(model, **HALF), tmp_path)
    with pytest.raises(ValueError, match=r"with the optimizer adamw, and this trainer has adamw with float32 state$"):
        checkpoint.load(make_trainer(model, optimizer_dtype="float32", **HALF), path)
    # The dtype of the weights, named.
    checkpoint.load(make_trainer(model, optimizer_dtype="bfloat16", **HALF), path)


def on_ranks(ranks: Ranks, model: Path, folder: Path, start: Path, kind: str) -> dict[str, Any]:
    """Resume a checkpoint of one rank, write one after a step, and resume that."""
    trainer, restored = (make_trainer(model, ranks, **KINDS[kind]) for _ in range(2))
    checkpoint.load(trainer, start)
    resumed, logprobs = exact_weights(trainer), trainer.logprobs(example(3))
    step = train(trainer, 3)
    path = checkpoint.save(trainer, folder)
    saved = exact_weights(trainer)
    after = train(trainer, 4)
    checkpoint.load(restored, path)
    again = train(restored, 4)
    found = {"resumed": resumed, "logprobs": logprobs, "step": step, "saved": saved, "path": path}
    return found | {"after": after, "again": again}


def scenarios(
    at: Callable[[Parallelism], Ranks], size: int, folder: Path, models: dict[str, Path], _: VersionStore
) -> dict[str, Callable[[], Any]]:
    return {
        f"{kind}, {layout}": partial(
            lambda layout, folder, *more: on_ranks(at(degrees(*LAYOUTS[layout])), models["qwen3"], folder, *more),
            *(layout, folder / f"{kind} {layout}", models[kind], kind),
        )
        for kind, layout in ON_FOUR
    }


@pytest.fixture(scope="module")
def on_four(wide: Path, tmp_path_factory: pytest.TempPathFactory, published: VersionStore) -> conftest.Outcome:
    """Four ranks resume from the checkpoints of one."""
    folder, models = tmp_path_factory.mktemp("optimizers"), {"qwen3": wide}
    for kind in KINDS:
        alone = make_trainer(wide, **KINDS[kind])
        train(alone, 0, 1, 2)
        models[kind] = checkpoint.save(alone, folder / "one" / kind)
    return conftest.run(4, folder, models, published, scenarios)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.costly
@pytest.mark.parametrize(("kind", "layout"), ON_FOUR)
def test_four_ranks_resume_what_one_wrote_and_one_what_they_wrote(
    on_four: conftest.Outcome, wide: Path, tmp_path: Path, kind: str, layout: str
):
    results = on_four(f"{kind}, {layout}")
    alone = make_trainer(wide, **KINDS[kind])
    train(alone, 0, 1, 2)
    start, logprobs = exact_weights(alone), alone.logprobs(example(3))
    (step,), expected = train(alone, 3), exact_weights(alone)
    half = "weights_dtype" in KINDS[kind]
    for result in results:
        assert result["again"] == result["after"] == results[0]["after"]
        for name, weight in start.items():
            np.testing.assert_array_equal(result["resumed"][name], weight)
            np.testing.assert_array_equal(result["saved"][name], results[0]["saved"][name])
            # In bfloat16 gradients depend on the layout; Adam makes any sign of them a whole step.
            np.testing.assert_allclose(result["saved"][name], expected[name], atol=2e-3 if half else 1e-4)
        np.testing.assert_allclose(result["logprobs"], logprobs, atol=0.1 if half else 1e-5)
        if not half:  # the loss has the exponential of what bfloat16 rounds
            assert result["step"][0]["loss"] == pytest.approx(step["loss"], rel=1e-5)
    restored = make_trainer(wide, join(), **KINDS[kind])
    checkpoint.load(restored, results[0]["path"])
    for name, weight in exact_weights(restored).items():
        np.testing.assert_array_equal(weight, results[0]["saved"][name])
