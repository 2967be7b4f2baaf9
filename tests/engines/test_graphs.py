"""Decode steps that a CUDA graph could hold: checked on the emulated device, step by step, with their launches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge.config import ConfigError, build
from forge.engines import EmbeddedEngine, graphs
from forge.recipes.rl_config import RLConfig
from forge.types import Sampling
from tests.emulated import NAME, Emulation, emulated, lines

from .captured import checked_capture
from .test_emulated import LONGEST, assert_equal, decode, folders

__all__ = ["folders"]  # a fixture

LAUNCHES = 3  # of a decode step: the number of rows, the graph, the copy of which rows have ended


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulation]:
    """An emulated device, on which steps are captured by the check."""
    monkeypatch.setitem(graphs.CAPTURES, NAME, checked_capture)
    with emulated() as emulation:
        yield emulation


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_cuda_graph_decode_steps_sample_the_tokens_of_cpu(family: str, folders: dict[str, Path], device: Emulation):
    """Requests of all kinds, a growing cache, updates, a release: what a graph could not hold would fail the engine."""
    expected = decode(folders[family], device="cpu")
    assert_equal(decode(folders[family], cuda_graphs=True), expected)


def steps(
    folder: Path, emulation: Emulation, tokens: int, listener: Any = None, **sampling: Any
) -> tuple[int, int, int, Any]:
    """Decode steps of three samples, those by a graph, launches and waits."""
    with EmbeddedEngine(folder, slots=4, max_seq_len=LONGEST, cuda_graphs=True) as engine:
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
def test_decode_step_launches_one_cuda_graph_and_waits_once(
    waits_a_step: int, launches_a_step: int, how: dict[str, Any], folders: dict[str, Path], device: Emulation
):
    few = steps(folders["qwen3"], device, 10, **how)
    many = steps(folders["qwen3"], device, 30, **how)
    assert (few[0], many[0]) == (10, 30)
    # All but the first, with which the libraries prepare themselves.
    assert (few[1], many[1]) == (9, 29)
    assert many[2] - few[2] <= 20 * launches_a_step
    assert (many[3] - few[3]).total() <= 20 * waits_a_step, lines(many[3] - few[3])


def test_decode_steps_with_top_logprobs_skip_cuda_graphs(folders: dict[str, Path], device: Emulation):
    assert steps(folders["qwen3"], device, 20, top_logprobs=2)[:2] == (20, 0)


def test_cuda_graphs_setting_on_cpu_raises(folders: dict[str, Path]):
    with pytest.raises(ValueError, match="cuda_graphs needs an NVIDIA or AMD GPU, but this engine runs on cpu"):
        EmbeddedEngine(folders["qwen3"], cuda_graphs=True, device="cpu")
    with pytest.raises(ValueError, match="supports dense models of the built-in families only"):
        EmbeddedEngine(folders["qwen3-moe"], cuda_graphs=True, device="cpu")
    for settings, message in (
        ({"cuda_graphs": True}, "services.generator has no GPUs"),
        ({"cuda_graphs": True, "engine": "vllm"}, "cuda_graphs is not supported by"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(RLConfig, {"model": "any", "dataset": {"path": "any"}, "generator": settings})
