"""Decode steps that a CUDA graph could hold: checked on the emulated device, step by step, with their launches."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from forge.config import ConfigError, build
from forge.engines import EmbeddedEngine, graphs
from forge.engines.interface import EngineFailed
from forge.recipes.rl_config import RLConfig
from forge.types import Sampling
from tests.emulated import NAME, Emulation, emulated, lines

from .captured import NotCapturable, checked_capture, compare, run, step_of
from .test_emulated import LONGEST, assert_equal, decode, folders

__all__ = ["folders"]  # a fixture

LAUNCHES = 3  # of a decode step: the number of rows, the graph, the copy of which rows have ended


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulation]:
    """An emulated device, on which steps are captured by the check."""
    monkeypatch.setitem(graphs.CAPTURES, NAME, checked_capture)
    with emulated() as emulation:
        yield emulation


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_captured_steps_draw_the_tokens_of_the_cpu(family: str, folders: dict[str, Path], device: Emulation):
    """Requests of all kinds, a growing cache, updates, a release: what a graph could not hold would fail the engine."""
    expected = decode(folders[family], device="cpu")
    assert_equal(decode(folders[family], cuda_graphs=True), expected)


class CardGraph:
    """A graph as CUDA's allocator sees it: a pool of which all graphs are dropped takes no other."""

    users: ClassVar = Counter[int]()
    pools: ClassVar = count(1)

    def __init__(self) -> None:
        self._pool = 0

    def pool(self) -> int:
        return self._pool

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        self.users[self._pool] -= 1

    @classmethod
    @contextmanager
    def capture(cls, graph: CardGraph, pool: int, capture_error_mode: str) -> Iterator[None]:
        assert cls.users.get(pool) != 0, "use_count > 0 INTERNAL ASSERT FAILED"
        cls.users[pool] += 1
        graph._pool = pool
        yield


def test_graphs_that_replace_dropped_ones_have_another_pool(monkeypatch: pytest.MonkeyPatch):
    """Found on an H100: new weights drop all graphs, and the pool with them."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CardGraph)
    monkeypatch.setattr(torch.cuda, "graph", CardGraph.capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(CardGraph.pools))
    drawn = step_of(torch.zeros(1))
    steps = graphs.StepGraphs(graphs.cuda_capture())
    for _ in range(3):
        weights = object.__new__(type("Weights", (), {}))
        for key in (1, 2, 1, 2, 1):
            assert steps.run(key, [weights], lambda: drawn) is drawn
        gc.collect()
    assert steps.replayed == 9
    assert sorted(CardGraph.users.values()) == [0, 0, 2]  # two graphs share the pool of the last weights


def steps(
    folder: Path, emulation: Emulation, tokens: int, listener: Any = None, read_every: int = 1, **sampling: Any
) -> tuple[int, int, int, Any]:
    """Decode steps of three samples, those by a graph, launches and waits."""
    with EmbeddedEngine(folder, slots=4, max_seq_len=LONGEST, cuda_graphs=True, read_every=read_every) as engine:
        launches = emulation.launches
        with emulation.counted() as waits:
            asked = Sampling(n=3, max_tokens=tokens, seed=1, **sampling)
            engine.submit([5, 6, 7], asked, listener=listener).result(60)
        found = engine._batch.graphs
        assert found is not None
        return engine.stats()["decode_steps"], found.replayed, emulation.launches - launches, waits


@pytest.mark.parametrize(
    ("waits_a_step", "launches_a_step", "how"),
    [
        (1, LAUNCHES, {}),
        (1, LAUNCHES, {"top_p": 0.9, "top_k": 7}),
        (1, LAUNCHES, {"temperature": 0.0}),
        # All rows' tokens and log-probabilities go to the host together.
        (2, LAUNCHES + 6, {"listener": lambda *_: None}),
    ],
)
def test_a_step_is_one_graph_and_one_wait(
    waits_a_step: int, launches_a_step: int, how: dict[str, Any], folders: dict[str, Path], device: Emulation
):
    few = steps(folders["qwen3"], device, 20, **how)
    many = steps(folders["qwen3"], device, 60, **how)
    assert (few[0], many[0]) == (20, 60)
    # All but the first, with which the libraries prepare themselves.
    assert (few[1], many[1]) == (19, 59)
    assert many[2] - few[2] <= 40 * launches_a_step
    assert (many[3] - few[3]).total() <= 40 * waits_a_step, lines(many[3] - few[3])


def test_without_graphs_each_operator_is_a_launch(folders: dict[str, Path], device: Emulation):
    counts = []
    for tokens in (20, 60):
        with EmbeddedEngine(folders["qwen3"], slots=4) as engine:
            launches = device.launches
            engine.submit([5, 6, 7], Sampling(n=3, max_tokens=tokens, seed=1)).result(60)
            counts.append(device.launches - launches)
    # As docs/engines.md says, of two layers.
    assert round((counts[1] - counts[0]) / 40) == 141


def test_top_logprobs_decode_without_a_graph(folders: dict[str, Path], device: Emulation):
    assert steps(folders["qwen3"], device, 20, top_logprobs=2)[:2] == (20, 0)


def test_faults_of_a_capture_are_found(device: Emulation):
    """What a graph would repeat silently."""
    state = torch.zeros(4, device=device.device)
    other = torch.zeros(4, device=device.device)
    numbers = iter(range(9))
    shapes = iter([4, 3])
    memory = iter([state, other])
    faults = {
        "the host reads": lambda: step_of(state + float(state.sum())),
        "the host waits": lambda: step_of(torch.ones(4).to(device.device)),
        "waits for the device": lambda: step_of(state.nonzero()),
        "operator 0": lambda: step_of(state.add(next(numbers))),
        "operator 1": lambda: step_of(state.clone()[: next(shapes)] + 1),
        "is Operator": lambda: step_of(next(memory) * 2),
    }
    for message, step in faults.items():
        with pytest.raises(NotCapturable, match=message):
            compare(run(step)[1], run(step)[1])
    compare(run(lambda: step_of(state + 1))[1], run(lambda: step_of(state + 1))[1])


def test_memory_that_is_replaced_without_a_word_is_found(folders: dict[str, Path], device: Emulation):
    """A fault in the batch itself: a state that every step replaces."""
    with EmbeddedEngine(folders["qwen3"], slots=4, max_seq_len=LONGEST, cuda_graphs=True) as engine:
        batch = engine._batch
        advance = batch._captured

        def replacing(*arguments: Any) -> Any:
            batch.state.temperature = batch.state.temperature.clone()
            return advance(*arguments)

        batch._captured = replacing  # type: ignore[method-assign]
        with pytest.raises(EngineFailed, match="when it was captured"):
            engine.submit([5, 6, 7], Sampling(max_tokens=9, seed=1)).result(60)


def test_graphs_are_refused_where_there_are_none(folders: dict[str, Path]):
    with pytest.raises(ValueError, match="cuda_graphs needs a GPU of NVIDIA or AMD, and this engine computes on cpu"):
        EmbeddedEngine(folders["qwen3"], cuda_graphs=True, device="cpu")
    with pytest.raises(ValueError, match="does not support mixtures of experts"):
        EmbeddedEngine(folders["qwen3-moe"], cuda_graphs=True, device="cpu")
    for settings, message in (
        ({"cuda_graphs": True}, "services.generator has no GPUs"),
        ({"cuda_graphs": True, "engine": "vllm"}, "vLLM has its own"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(RLConfig, {"model": "any", "dataset": {"path": "any"}, "generator": settings})
