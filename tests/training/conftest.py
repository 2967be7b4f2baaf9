"""Models written once, and one run of two processes that all tests of two ranks look at."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from forge.runtime.store import VersionStore
from forge.training import checkpoint
from tests.training import layouts, ranks
from tests.training.cases import FAMILIES, TOKENIZER, example, make_trainer, tiny_model, write_classifier, write_model

Outcome = Callable[[str], list[Any]]


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
def models(tmp_path_factory: pytest.TempPathFactory, model: Path, untied: Path) -> dict[str, Path]:
    """Tied with norms of heads, untied, tied with biases; and the other families."""
    others = [family for family in FAMILIES if family not in ("qwen3", "llama")]
    written = {family: write_model(tmp_path_factory.mktemp(family), family) for family in others}
    return {"qwen3": model, "llama": untied, **written}


@pytest.fixture(scope="session")
def mild(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by family, with weights as small as at the start of a training."""
    folders = {}
    for family in ("qwen3", "qwen3_moe", "gemma3"):
        folders[family] = tmp_path_factory.mktemp(family)
        model = tiny_model(family)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(0.1)
                elif family == "gemma3":
                    parameter.sub_(1)  # its norms multiply by 1 + weight
        model.save_pretrained(folders[family])
        TOKENIZER.save_pretrained(folders[family])
    return folders


@pytest.fixture(scope="session")
def published(processes: None) -> Iterator[VersionStore]:
    """Where four ranks put their weights."""
    store = VersionStore.create()
    yield store
    store.close()


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], published: VersionStore) -> Outcome:
    """What each of two processes got from a scenario of `tests.training.layouts`, by the scenario's name."""
    return run(2, tmp_path_factory.mktemp("two"), models, published)


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], published: VersionStore) -> Outcome:
    """The same of four."""
    return run(4, tmp_path_factory.mktemp("four"), models, published)


def run(
    size: int,
    folder: Path,
    models: dict[str, Path],
    published: VersionStore,
    which: Any = layouts.scenarios,
    main: Callable[..., None] = layouts.main,
) -> Outcome:
    """Run the ranks, which write down in `<rank>.pickle` what each scenario returned; what they got, by its name."""
    alone = make_trainer(models["qwen3"])
    for seed in range(3):
        alone.train_step(example(seed), ranks.LOSS)
    checkpoint.save_checkpoint(alone, folder / "one")
    context = mp.get_context("spawn")
    common = (size, folder, models, published, which)
    processes = [context.Process(target=main, args=(rank, *common)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(250)
    for process in processes:
        process.kill()
    by_rank = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(len(processes))]

    def of(scenario: str) -> list[Any]:
        for rank, own in enumerate(by_rank):
            if isinstance(error := own.get(scenario, "was not run"), str):
                pytest.fail(f"{scenario} on rank {rank}:\n{error}")
        return [own[scenario] for own in by_rank]

    return of
