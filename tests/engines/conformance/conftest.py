"""One engine of each kind for all tests: vLLM takes 15 to 30 s to start."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from forge.engines import load_engine
from forge.types import Completion

from ..conftest import EOS, random_model

SLOTS, LONGEST = 8, 512


def build(family: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    """As `random_model`, with heads of a size that vLLM has, and room for more than one block of its cache."""
    return random_model(
        family,
        tied=family == "qwen3",
        seed=seed,
        eos=EOS,
        spread=0.2,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=LONGEST,
    )


class Subject:
    """An engine under test with the models whose weights it may serve, by version."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder
        self.others = processes()  # that tests before this engine's may have left in this process
        self.models = {version: build(seed=version) for version in range(3)}
        self.models[0].save_pretrained(folder)
        self.engine: Any = None

    def open(self, **args: Any) -> Any:
        return load_engine(self.name, self.folder, slots=SLOTS, **args)

    def ready(self) -> Any:
        """The engine with the first weights, idle, and with the default way of updating."""
        if self.engine is None:
            self.engine = self.open()
        self.engine.on_update = "continue"
        self.update(0).result(60)
        wait_for(lambda: self.engine.stats()["running"] == self.engine.stats()["waiting"] == 0)
        return self.engine

    def update(self, version: int) -> Any:
        return self.engine.update_weights(self.models[version].state_dict().items(), version, digest(version))

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None


class Hold:
    """A listener that stops the embedded engine at the n-th piece of its request, until `release`: what a test does
    meanwhile happens while the request runs, however busy the machine is."""

    def __init__(self, pieces: int = 1) -> None:
        self.holds, self._released, self._pieces = threading.Event(), threading.Event(), pieces

    def __call__(self, sample: int, piece: Completion) -> None:
        self._pieces -= 1
        if self._pieces <= 0:
            self.holds.set()
            self._released.wait(60)

    def release(self) -> None:
        self._released.set()


def digest(version: int) -> str:
    return f"digest {version}"


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.001)


def processes() -> set[int]:
    """All that descend from this one, but for Python's own helper that follows shared memory, and for processes that
    have ended: vLLM kills its own after 5 s on a busy machine, and does not reap them."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            text, command = status.read_text(), (status.parent / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent = text.rpartition(")")[2].split()[:2]
        if "resource_tracker" not in command and state != "Z":
            children.setdefault(int(parent), []).append(int(status.parent.name))
    found, todo = set(), [os.getpid()]
    while todo:
        todo += children.get(todo.pop(), [])
        found.update(todo)
    return found - {os.getpid()}


@pytest.fixture(scope="session", params=["embedded", pytest.param("vllm", marks=pytest.mark.processes)])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    if request.param == "vllm" and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: make test-vllm has it")
    subject = Subject(request.param, tmp_path_factory.mktemp(request.param))
    yield subject
    subject.close()


@pytest.fixture
def engine(subject: Subject) -> Any:
    return subject.ready()
