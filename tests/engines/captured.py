"""A check in the place of CUDA's capture: what a graph could not hold is an error, without a GPU.

A step is run while its operators are noted: their shapes, their Python numbers, and the memory of what they read that
the step has not made itself. Each replay runs it again, and must find the same. A graph would do what was captured, and
silently read old memory or old numbers.
"""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from forge.engines.graphs import Capture, Drawn, Step
from tests.emulated import current, short_name


class NotCapturable(RuntimeError):
    """A step that a graph could not hold, or that differs from what was captured."""


class Operator(NamedTuple):
    """One operator: its name, what it reads, and the shapes of its results.

    Memory that existed before is an address with strides; of what the step has made the shape only.
    """

    name: str
    inputs: tuple[object, ...]
    results: tuple[object, ...]


class Recorder:
    """Notes the operators of a step."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self._made: dict[int, Tensor] = {}  # by storage, and held: its address is not given away meanwhile

    def __call__(self, func: Any, leaves: Sequence[Any], result: Any) -> None:
        """An operator, with the memory of its tensors."""
        if short_name(func) == "_local_scalar_dense":
            raise NotCapturable(f"the host reads a number of the device: {func}")
        inputs = tuple(self._described(leaf) for leaf in leaves)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        known = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)}
        for tensor in results:
            if tensor.untyped_storage()._cdata not in known:
                self._made[tensor.untyped_storage()._cdata] = tensor
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in results)
        self.operators.append(Operator(str(func), inputs, shapes))

    def _described(self, leaf: Any) -> object:
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        shape = tuple(leaf.shape)
        if leaf.untyped_storage()._cdata in self._made:
            return shape, leaf.dtype
        return shape, leaf.dtype, leaf.stride(), leaf.data_ptr()


def run(step: Step) -> tuple[Drawn, list[Operator]]:
    """A step with its operators. NotCapturable: the host waited for the device."""
    emulation = current()
    recorder = Recorder()
    thread = threading.get_ident()
    emulation.observers[thread] = recorder
    try:
        with emulation.counted() as waits:
            drawn = step()
    finally:
        del emulation.observers[thread]
    if waits:
        raise NotCapturable(f"the host waits for the device: {', '.join(waits)}")
    return drawn, recorder.operators


def checked_capture() -> Capture:
    """In the place of `forge.engines.graphs.cuda_capture`."""

    def capture(step: Step) -> Step:
        noted: list[Operator] = []

        def replay() -> Drawn:
            # The first run is that of the capture: what the graph would repeat.
            drawn, operators = run(step)
            current().launches += 1
            if not noted:
                noted.extend(operators)
            compare(noted, operators)
            return drawn

        return replay

    return capture


def compare(noted: Sequence[Operator], operators: Sequence[Operator]) -> None:
    """NotCapturable: the operators of two runs differ; names the first."""
    for number, (before, now) in enumerate(zip(noted, operators, strict=False)):
        if before != now:
            raise NotCapturable(f"operator {number} was {before} when it was captured, and is {now}")
    if len(noted) != len(operators):
        raise NotCapturable(f"{len(noted)} operators were captured, and now there are {len(operators)}")
