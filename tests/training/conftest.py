"""Models written once, and one run of two processes that all tests of two ranks look at."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp

from forge.training import checkpoint
from tests.training import ranks
from tests.training.cases import example, make_trainer, write_classifier, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 whose head is its embedding."""
    return write_model(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a head of its own."""
    return write_model(tmp_path_factory.mktemp("untied"), "llama", tied=False)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with a head of one class."""
    return write_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, model: Path, untied: Path) -> Callable[[str], list[Any]]:
    """What each of two processes got from a scenario of `tests.training.ranks`, by the scenario's name."""
    folder = tmp_path_factory.mktemp("ranks")
    alone = make_trainer(model)
    for seed in range(3):
        alone.train_step(example(seed), ranks.LOSS)
    checkpoint.save(alone, folder / "one")
    context = mp.get_context("spawn")
    rendezvous = context.SimpleQueue()
    processes = [
        context.Process(target=ranks.main, args=(rank, rendezvous, folder, model, untied)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        process.kill()
    by_rank = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]

    def of(scenario: str) -> list[Any]:
        for rank in range(2):
            if isinstance(error := by_rank[rank][scenario], str):
                pytest.fail(f"{scenario} on rank {rank}:\n{error}")
        return [by_rank[rank][scenario] for rank in range(2)]

    return of
