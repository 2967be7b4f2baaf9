"""AdamW with state of another dtype than the weights': against plain formulas."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge.training import checkpoint
from forge.training.optimizers import build_optimizer, join_bits
from forge.training.settings import OptimizerSettings
from forge.training.trainer import PolicyTrainer
from tests.training.cases import example, largest_difference, make_trainer, write_model
from tests.training.ranks import LOSS, whole

HALF = {"dtype": "bfloat16", "weights_dtype": "bfloat16"}
KINDS: dict[str, dict[str, Any]] = {
    "float32 state": {"optimizer_dtype": "float32", **HALF},
    "bfloat16 state": {"optimizer_dtype": "bfloat16"},
}


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
    """Fifty updates of a layer without its bias, alongside those by hand."""
    random, optimizer = torch.Generator().manual_seed(1), build_optimizer(layer, settings)
    by_hand = Adam(layer.weight.detach(), state)
    for _ in range(50):
        layer.weight.grad = (torch.randn(16, 24, generator=random) + 0.5).to(layer.weight.dtype)
        by_hand.update(layer.weight.grad.double(), settings.learning_rate)
        optimizer.step()
    return optimizer.state[layer.weight], by_hand


def test_bfloat16_weights_with_float32_state_keep_tiny_updates():
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


def test_bfloat16_optimizer_state_matches_adam_by_hand():
    torch.manual_seed(0)
    layer = nn.Linear(24, 16, bias=False)
    settings = OptimizerSettings(learning_rate=1e-3, optimizer_dtype="bfloat16")
    state, by_hand = steps_of(layer, settings, torch.bfloat16)
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    torch.testing.assert_close(layer.weight.detach().double(), by_hand.weight, rtol=0, atol=5e-5)
    assert (layer.weight.detach().double() - Adam(by_hand.weight).weight).abs().max() < 5e-5


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_training_with_each_optimizer_is_bit_identical(wide: Path, tmp_path: Path, kind: str):
    trainer, restored = (make_trainer(wide, **KINDS[kind]) for _ in range(2))
    train(trainer, 0, 1, 2)
    path = checkpoint.save_checkpoint(trainer, tmp_path)
    after = train(trainer, 3, 4)
    checkpoint.load_checkpoint(restored, path)
    assert train(restored, 3, 4) == after
    assert largest_difference(exact_weights(restored), exact_weights(trainer)) == 0.0


def test_resuming_checkpoint_of_other_optimizer_raises(model: Path, tmp_path: Path):
    path = checkpoint.save_checkpoint(make_trainer(model, optimizer="torch.optim:Adam"), tmp_path)
    with pytest.raises(
        ValueError, match=r"was written with the optimizer torch.optim:Adam, training.optimizer is adamw: keep"
    ):
        checkpoint.load_checkpoint(make_trainer(model), path)
    path = checkpoint.save_checkpoint(make_trainer(model, **HALF), tmp_path)
    with pytest.raises(ValueError, match=r"with the optimizer adamw, training.optimizer is adamw with float32 state"):
        checkpoint.load_checkpoint(make_trainer(model, optimizer_dtype="float32", **HALF), path)
    # The dtype of the weights, named.
    checkpoint.load_checkpoint(make_trainer(model, optimizer_dtype="bfloat16", **HALF), path)
