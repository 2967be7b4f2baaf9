"""Two emulated accelerators with gloo between them train as the CPU does, in every kind of parallelism."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge.runtime.store import VersionStore
from forge.training.distributed import Ranks
from forge.training.settings import Parallelism
from tests import emulated
from tests.training import conftest, layouts
from tests.training.cases import example, largest_difference, make_trainer
from tests.training.layouts import degrees
from tests.training.ranks import LOSS
from tests.training.test_emulated import LENGTHS, LOGPROBS, METRICS, WAITS_OF_UPDATE, WEIGHTS, misplaced, on_host

LAYOUTS = {"fsdp": (1, 2, 1, 1), "copies": (2, 1, 1, 1), "tensor": (1, 1, 1, 2), "context": (1, 1, 2, 1)}
# Two ranks add in another order than one: as far from the CPU as two of its ranks are.
APART = 10


def steps(ranks: Ranks | None, model: Path, **settings: Any) -> dict[str, Any]:
    """Two steps, what is on another device, and a move to host memory and back."""
    torch.manual_seed(0)
    trainer = make_trainer(model, *([ranks] if ranks else []), **settings)
    metrics = [trainer.train_step(example(seed, LENGTHS), LOSS) for seed in range(2)]
    outcome = {"metrics": metrics, "weights": on_host(trainer), "logprobs": trainer.logprobs(example(9, LENGTHS))}
    outcome["misplaced"] = misplaced(trainer, trainer.ranks.device.type)
    if ranks is not None:
        with emulated.current().counted() as waits:
            trainer.train_step(example(2, LENGTHS), LOSS)
        outcome["waits"] = list(waits.elements())
    return outcome


def left_behind(ranks: Ranks, model: Path) -> dict[str, str]:
    """The error of a step that uses a tensor in host memory: a fault that a CPU does not show."""
    trainer = make_trainer(model, ranks)
    norm = trainer.policy.model.model.norm
    norm.register_forward_hook(lambda module, inputs, output: output + torch.ones(output.shape))
    try:
        trainer.train_step(example(0, LENGTHS), LOSS)
    except emulated.DeviceMix as error:
        return {"error": str(error)}
    return {"error": "none"}


def scenarios(
    at: Callable[[Parallelism], Ranks], size: int, _: Path, models: dict[str, Path], __: VersionStore
) -> dict[str, Callable[[], Any]]:
    def case(layout: tuple[int, int, int, int]) -> dict[str, Any]:
        return steps(at(degrees(*layout)), models["qwen3"])

    cases = {name: partial(case, layout) for name, layout in LAYOUTS.items()}
    return cases | {"left behind": lambda: left_behind(at(degrees(1, 2, 1, 1)), models["qwen3"])}


def main(*arguments: Any) -> None:
    """One of the ranks, on its device."""
    with emulated.emulated_rank():
        layouts.main(*arguments)


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, mild: dict[str, Path], published: VersionStore
) -> conftest.Outcome:
    """What both ranks found."""
    return conftest.run(2, tmp_path_factory.mktemp("devices"), mild, published, scenarios, main)


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_on_two_emulated_devices_matches_cpu(layout: str, outcomes: conftest.Outcome, mild: dict[str, Path]):
    expected = steps(None, mild["qwen3"])
    results = outcomes(layout)
    assert results[0]["metrics"] == results[1]["metrics"]
    for found in results:
        assert found["misplaced"] == []
        assert len(found["waits"]) <= WAITS_OF_UPDATE, found["waits"]
        for metrics, others in zip(found["metrics"], expected["metrics"], strict=True):
            for name in metrics.keys() - {"micro_batches"}:
                assert metrics[name] == pytest.approx(others[name], rel=APART**2 * METRICS, abs=APART**2 * METRICS), (
                    name
                )
        weights = {name: torch.as_tensor(weight) for name, weight in found["weights"].items()}
        assert largest_difference(weights, expected["weights"]) < WEIGHTS
        np.testing.assert_allclose(found["logprobs"], expected["logprobs"], rtol=0, atol=APART * LOGPROBS)


@pytest.mark.full
@pytest.mark.processes
def test_tensor_left_in_host_memory_raises_on_emulated_device(outcomes: conftest.Outcome):
    for found in outcomes("left behind"):
        assert "are on the CPU, others on the device" in found["error"]
