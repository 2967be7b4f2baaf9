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

# The cache positions that attention reads are a multiple of GRANULE: each multiple needs its own graph.
GRANULE = 256
MAX_GRAPHS = 64  # the most recently used ones are kept: each has its own copy of all launches


class Drawn(NamedTuple):
    """Tokens and log-probabilities that a decode step samples for B rows."""

    tokens: Tensor  # (B,)
    logprobs: Tensor  # (B,), of these tokens
    ended_at: Tensor  # (B,), the position of a row's last token if the row has ended, else -1


Step = Callable[[], Drawn]
Capture = Callable[[Step], Step]


class StepGraphs:
    """Captured CUDA graphs of the decode steps of a batch. Steps with the same key have the same shapes and the same
    numbers in Python."""

    def __init__(self, capture: Capture) -> None:
        self.replayed = 0
        self._capture = capture
        self._graphs: OrderedDict[Hashable, Step | None] = OrderedDict()
        self._inputs: list[weakref.ref[object]] = []

    def run(self, key: Hashable, inputs: Sequence[object], step: Step) -> Drawn:
        """Run a step: the first with a key directly, the second while capturing it as a graph, later ones by the graph.

        Args:
            key: all that the shapes and Python numbers of the step depend on.
            inputs: the objects that it reads and that may be replaced, such as weights and cache: with other objects
                than in the last call all graphs are dropped.
        """
        # By weak references: what replaces the inputs needs their memory.
        last_inputs = [reference() for reference in self._inputs]
        if len(last_inputs) != len(inputs) or any(old is not new for old, new in zip(last_inputs, inputs, strict=True)):
            self.clear()
            self._inputs = [weakref.ref(value) for value in inputs]

        # Libraries prepare the kernels of a new shape when these first run, and no capture allows that. A shape that
        # comes only once needs no graph, either.
        if key not in self._graphs:
            self._graphs[key] = None
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
            return step()

        replay = self._graphs[key]
        if replay is None:
            replay = self._graphs[key] = self._capture(step)
        self._graphs.move_to_end(key)
        self.replayed += 1

        return replay()

    def clear(self) -> None:
        """Drop all graphs, with the memory of their results."""
        self._graphs.clear()


def cuda_capture() -> Capture:
    """Return a function that captures a step on CUDA and returns one that replays it. All graphs that it captures share
    their memory, as only one runs at a time."""
    living: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def capture_step(step: Step) -> Step:
        # The memory pool of a living graph, or else a new one: a pool whose graphs were all dropped accepts no other
        # graph, and torch fails an assertion.
        shared = next((graph.pool() for graph in living), None)
        pool = torch.cuda.graph_pool_handle() if shared is None else shared
        graph = torch.cuda.CUDAGraph()

        # "thread_local": another thread may copy the next weights to the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            drawn = step()
        living.add(graph)

        def replay_graph() -> Drawn:
            graph.replay()
            return drawn

        return replay_graph

    return capture_step


# By the type of a device: makes the function that captures steps there.
CAPTURES: dict[str, Callable[[], Capture]] = {"cuda": cuda_capture}


def graphs_on(device: torch.device) -> StepGraphs:
    """Return a new, empty `StepGraphs` for an engine on the given device.

    Raises:
        ValueError: devices of this type cannot capture steps.
    """
    if device.type not in CAPTURES:
        raise ValueError(
            f"generator.cuda_graphs needs an NVIDIA or AMD GPU, but this engine runs on {device.type}: omit it"
        )
    return StepGraphs(CAPTURES[device.type]())
