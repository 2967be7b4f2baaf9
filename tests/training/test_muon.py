"""Muon's matrices divided over ranks: the bits of every rank computing all of them, and each matrix computed once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from forge.runtime.store import VersionStore
from forge.training import muon
from forge.training.distributed import Ranks
from forge.training.settings import Parallelism
from forge.training.trainer import PolicyTrainer
from tests.training import conftest
from tests.training.cases import example, make_trainer
from tests.training.layouts import degrees
from tests.training.ranks import LOSS

# Copies, shards, context, tensor. Three ranks have parts of different sizes.
LAYOUTS: dict[int, dict[str, tuple[tuple[int, int, int, int], str]]] = {
    2: {
        "fsdp": ((1, 2, 1, 1), "qwen3"),
        "copies": ((2, 1, 1, 1), "qwen3"),
        "tensor": ((1, 1, 1, 2), "qwen3"),
        "experts": ((1, 2, 1, 1), "qwen3_moe"),
    },
    3: {"uneven": ((1, 3, 1, 1), "qwen3")},
    4: {
        "fsdp": ((1, 4, 1, 1), "qwen3"),
        "fused": ((1, 4, 1, 1), "phi3"),
        "hsdp": ((2, 2, 1, 1), "qwen3"),
        "fsdp and tensor": ((1, 2, 1, 2), "llama"),
        "copies and tensor": ((2, 1, 1, 2), "qwen3"),
    },
}
CASES = [(size, name) for size, layouts in LAYOUTS.items() for name in layouts]


def states(trainer: PolicyTrainer) -> list[torch.Tensor]:
    """This rank's parts of all weights and of their momentum."""
    parameters = list(trainer.policy.parameters())
    by_parameter = [trainer.optimizer.state[parameter] for parameter in parameters]
    buffers = [state["momentum_buffer"] for state in by_parameter if "momentum_buffer" in state]
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in [*parameters, *buffers]]
    return [tensor.detach().clone() for tensor in local]


def compare(ranks: Ranks, model: Path, **settings: Any) -> dict[str, Any]:
    """Two steps with the work divided, and two with all of it on every rank."""
    computed = list[int]()

    def counted(update: torch.Tensor) -> torch.Tensor:
        computed.append(update.numel())
        return plain(update)

    plain = muon.newton_schulz
    results = []
    for is_divided in (muon._is_divided, lambda _: False):
        torch.manual_seed(0)
        trainer = make_trainer(model, ranks, optimizer="muon", learning_rate=1e-2, **settings)
        computed.clear()
        with mock.patch.object(muon, "_is_divided", is_divided), mock.patch.object(muon, "newton_schulz", counted):
            for seed in range(2):
                trainer.train_step(example(seed), LOSS)
        results.append((states(trainer), sum(computed), len(computed)))
    (mine, work, count), (others, all_work, all_count) = results
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(mine, others, strict=True)),
        "apart": max(float((a - b).abs().max()) for a, b in zip(mine, others, strict=True) if a.numel()),
        "work": work,
        "all work": all_work,
        "matrices": (count, all_count),
    }


def scenarios(
    at: Callable[[Parallelism], Ranks], size: int, _: Path, models: dict[str, Path], __: VersionStore
) -> dict[str, Callable[[], Any]]:
    comparisons = {
        name: partial(lambda layout, family: compare(at(degrees(*layout)), models[family]), *case)
        for name, case in LAYOUTS[size].items()
    }
    half = {"dtype": "bfloat16", "weights_dtype": "bfloat16", "optimizer_dtype": "float32"}
    return comparisons | {"half": lambda: compare(at(degrees(1, size, 1, 1)), models["qwen3"], **half)}


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], published: VersionStore
) -> dict[int, conftest.Outcome]:
    """What each rank of two and of four found, by the number of ranks."""
    return {
        size: conftest.run(size, tmp_path_factory.mktemp(f"muon{size}"), models, published, scenarios)
        for size in LAYOUTS
    }


@pytest.mark.processes
@pytest.mark.parametrize(("size", "name"), [*CASES, (2, "half"), (4, "half")])
def test_the_divided_work_has_the_bits_of_the_whole(outcomes: dict[int, conftest.Outcome], size: int, name: str):
    results = outcomes[size](name)
    for result in results:
        assert result["equal"], result
    if name == "experts":
        # Experts are whole on their ranks: nothing is gathered, and each has its own.
        assert sum(result["work"] for result in results) < sum(result["all work"] for result in results)
        return
    # Each matrix is computed once, by a rank; without the division every rank computes all of them.
    total = results[0]["all work"]
    assert sum(result["work"] for result in results) == total
    assert all(result["all work"] == total for result in results)
    assert max(result["work"] for result in results) < 1.5 * total / size


def test_matrices_of_one_process_are_alone():
    matrices = [torch.zeros(4, 6), torch.zeros(8, 2)]
    assert [[tuple(matrix.shape) for matrix in group] for group in muon.rounds(matrices)] == [[(4, 6)], [(8, 2)]]
