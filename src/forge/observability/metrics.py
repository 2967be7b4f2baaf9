"""Metrics from all processes, merged exactly by the controller once per step.

`record_metric("reward", 1.0, Reduce.MEAN)` adds to this process's collector, and `drain` empties it into a `Snapshot`.
Snapshots of several processes merge without loss: a mean stays the mean of all values, not of means.
"""

import asyncio
import enum
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field

from ..system.extras import find_foreign_name as __getattr__  # noqa: F401  (other names of torchforge)
from .machine import Usage, measure_usage


class Reduce(enum.Enum):
    """Reduction by which values of one metric combine, within a process and across processes."""

    MEAN = "mean"
    STD = "std"  # population standard deviation over all values
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(slots=True)
class Moments:
    """Sufficient statistics for every reduction: count, sum, centred sum of squares, extremes."""

    count: float = 0.0
    total: float = 0.0
    m2: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def merge(self, moments: "Moments") -> None:
        """Add the statistics of other values, by the method of Chan et al. (1979): the result is the same however the
        values are split."""
        if not moments.count:
            return

        if self.count:
            delta = moments.total / moments.count - self.total / self.count
            self.m2 += delta * delta * self.count * moments.count / (self.count + moments.count)

        self.m2 += moments.m2
        self.count += moments.count
        self.total += moments.total
        self.low = min(self.low, moments.low)
        self.high = max(self.high, moments.high)

    def reduce(self, reduction: Reduce) -> float:
        """Return the reduction of all recorded values, such as their mean, as one number."""
        match reduction:
            case Reduce.MEAN:
                return self.total / self.count
            case Reduce.STD:
                return math.sqrt(max(0.0, self.m2 / self.count))
            case Reduce.SUM:
                return self.total
            case Reduce.MAX:
                return self.high
            case Reduce.MIN:
                return self.low


@dataclass(frozen=True, slots=True)
class Span:
    """A timed block: `start` in seconds since the epoch, `duration` in seconds."""

    name: str
    process: str
    pid: int
    start: float
    duration: float


@dataclass(slots=True)
class Snapshot:
    """Metrics, spans, CPU and memory of one or more processes since the last drain."""

    moments: dict[tuple[str, Reduce], Moments] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    usage: list[Usage] = field(default_factory=list)

    def merge(self, snapshot: "Snapshot") -> None:
        """Add the metrics, spans and usage of another snapshot to this one."""
        for key, moments in snapshot.moments.items():
            self.moments.setdefault(key, Moments()).merge(moments)
        self.spans.extend(snapshot.spans)
        self.usage.extend(snapshot.usage)

    def values(self) -> dict[str, float]:
        """Return {metric: number}. A metric recorded with STD is called `name/std`, with MAX `name/max`, with MIN
        `name/min`, and otherwise `name`."""
        suffix = {Reduce.STD: "/std", Reduce.MAX: "/max", Reduce.MIN: "/min"}
        return {
            name + suffix.get(reduction, ""): moments.reduce(reduction)
            for (name, reduction), moments in self.moments.items()
        }


_lock = threading.Lock()
_current = Snapshot()
PROCESS_NAME = "FORGE_PROCESS"  # environment variable: the process's name in traces, set by the controller
METRICS_OF = "FORGE_METRICS_OF"  # environment variable: the policy with which names of this process's metrics start
_label: ContextVar[str | None] = ContextVar("forge_metrics_of", default=None)


@contextmanager
def metrics_of(policy: str) -> Iterator[None]:
    """Within a block, record all metrics under the name of a policy, such as `rival/reward`; "" for no policy."""
    token = _label.set(policy)
    try:
        yield
    finally:
        _label.reset(token)


def add_label(name: str) -> str:
    """Return the full name of a metric, `policy/name` if the block (`metrics_of`) or the process has a policy.

    >>> add_label("reward")
    'reward'
    """
    if (label := _label.get()) is None:
        label = os.environ.get(METRICS_OF, "")
    return f"{label}/{name}" if label else name


def record_metric(name: str, value: float, reduce: Reduce = Reduce.MEAN, weight: float = 1.0) -> None:
    """Add one value to this process's collector, see `record_values`."""
    record_values(name, [value], reduce, weight)


def record_values(name: str, values: Iterable[float], reduce: Reduce = Reduce.MEAN, weight: float = 1.0) -> None:
    """Add values to this process's collector, one after the other.

    Args:
        name: of the metric.
        reduce: how values of this metric are combined.
        weight: number of observations that each value stands for (a mean over 100 tokens has weight 100); SUM ignores
            it.

    Raises:
        ValueError: a value is not finite; averaging over it would hide a bug.
    """
    name = add_label(name)
    for value in map(float, values):
        if not math.isfinite(value):
            raise ValueError(f"metric {name!r} got {value}")

        # A mean is stored as a sum, so that collectors of different sizes merge exactly.
        total = value if reduce is Reduce.SUM else value * weight
        with _lock:
            _current.moments.setdefault((name, reduce), Moments()).merge(Moments(weight, total, 0.0, value, value))


class Clock:
    """Stopwatch of one task's phases, in which each second counts for only one phase."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.task: asyncio.Task | None = None
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Measure the current task from now on, without its child tasks."""
        self.task, self.thread = asyncio.current_task(), threading.current_thread()
        _clock.set(self)

    def take(self) -> dict[str, float]:
        """Return {phase: seconds} since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Count the time of a block for the named phase, nested phases included."""
        # Without a clock, nested phases count nothing: each second belongs to one phase.
        token = _clock.set(None)
        began = time.perf_counter()
        try:
            yield
        finally:
            _clock.reset(token)
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began


_clock: ContextVar[Clock | None] = ContextVar("forge_clock", default=None)


def on_the_clock(name: str) -> AbstractContextManager[None]:
    """Return a context that counts its time for a phase, if the current task has a clock."""
    clock = _clock.get()
    # Child tasks and threads inherit the clock of the task that started them, but are not measured.
    if clock is None or threading.current_thread() is not clock.thread or asyncio.current_task() is not clock.task:
        return nullcontext()
    return clock.within(name)


def record_span(name: str, start: float, duration: float) -> None:
    """Record a timed block in the metric `seconds/<name>` and in the trace.

    Args:
        start: when it started, in seconds since the epoch.
        duration: in seconds.
    """
    record_metric(f"seconds/{name}", duration, Reduce.SUM)
    span = Span(name, process_name(), os.getpid(), start, duration)
    with _lock:
        _current.spans.append(span)


def process_name() -> str:
    """Return the name of this process in traces."""
    return os.environ.get(PROCESS_NAME, "controller")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Time a block, and add its duration to the metric `seconds/<name>`, to the trace and to the current task's
    clock."""
    with on_the_clock(name):  # it includes recording the span, so that the phases of a task leave no gap
        start, started = time.time(), time.perf_counter()  # the time of day, and a clock for durations
        try:
            yield
        finally:
            record_span(name, start, time.perf_counter() - started)


def drain() -> Snapshot:
    """Return and clear the metrics and spans recorded in this process since the last call, with its CPU and memory
    usage."""
    global _current
    with _lock:
        snapshot, _current = _current, Snapshot()
    snapshot.usage.append(measure_usage(process_name()))
    return snapshot
