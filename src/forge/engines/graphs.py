"""Decode steps as CUDA graphs: one launch instead of some twenty a layer.

A step may be captured when it reads and writes the same memory each time, has the same shapes, and the host reads
nothing on the way. `tests/engines/captured.py` checks that without a GPU.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Attention's lengths are multiples of it: each has its own graph, and reads keys up to it.
GRANULE = 256
MOST = 64  # graphs that are kept, the most recently used ones: each has its own copy of all launches


class Drawn(NamedTuple):
    """The tokens that a decode step draws, one of each row; their log-probabilities; and where a row has ended,
    the position of its last token, or else -1."""

    tokens: Tensor
    logprobs: Tensor
    ended_at: Tensor


Step = Callable[[], Drawn]
Capture = Callable[[Step], Step]


class StepGraphs:
    """The captured steps of a batch, by what their shapes and their Python numbers depend on."""

    def __init__(self, capture: Capture) -> None:
        self.replayed = 0
        self._capture = capture
        self._graphs: OrderedDict[Hashable, Step | None] = OrderedDict()
        self._inputs: list[weakref.ref[object]] = []

    def run(self, key: Hashable, inputs: Sequence[object], step: Step) -> Drawn:
        """Run a step: by itself, or by its graph once it has run before.

        Args:
            inputs: what it reads that may be replaced: weights, cache and the like. Graphs of earlier ones are dropped.
        """
        # Not held: what replaces them needs their memory.
        before = [reference() for reference in self._inputs]
        if len(before) != len(inputs) or any(old is not new for old, new in zip(before, inputs, strict=True)):
            self.clear()
            self._inputs = [weakref.ref(value) for value in inputs]

        # Libraries prepare kernels of a new shape when they first run, which no capture allows; and a rare shape has no
        # graph.
        if key not in self._graphs:
            self._graphs[key] = None
            if len(self._graphs) > MOST:
                self._graphs.popitem(last=False)
            return step()

        replay = self._graphs[key]
        if replay is None:
            replay = self._capture(step)
            self._graphs[key] = replay
        self._graphs.move_to_end(key)
        self.replayed += 1

        return replay()

    def clear(self) -> None:
        """Drop all graphs, with the memory of their results."""
        self._graphs.clear()


def cuda_capture() -> Capture:
    """Return a way to capture steps on CUDA; their graphs share memory, as one runs at a time."""
    living: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def capture_step(step: Step) -> Step:
        # The pool of a graph that lives: once all of a pool's graphs are dropped, it takes no other, and torch asserts.
        shared = next((graph.pool() for graph in living), None)
        pool = torch.cuda.graph_pool_handle() if shared is None else shared
        graph = torch.cuda.CUDAGraph()
        # Another thread may read the next weights to the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            drawn = step()
        living.add(graph)

        def replay_graph() -> Drawn:
            graph.replay()
            return drawn

        return replay_graph

    return capture_step


# By the type of the device.
CAPTURES: dict[str, Callable[[], Capture]] = {"cuda": cuda_capture}


def graphs_on(device: torch.device) -> StepGraphs:
    """Return the graphs of an engine on this device.

    Raises:
        ValueError: it has none.
    """
    if device.type not in CAPTURES:
        raise ValueError(
            f"generator.cuda_graphs needs a GPU of NVIDIA or AMD, and this engine computes on {device.type}: omit it"
        )
    return StepGraphs(CAPTURES[device.type]())
