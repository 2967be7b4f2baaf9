"""`forge.observability.perf_tracker` of torchforge: timers whose steps are metrics."""

import functools
import inspect
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch

from forge.observability import Reduce, record_metric

from .env import DISABLE_PERF_METRICS, METRIC_TIMER_USES_GPU

F = TypeVar("F", bound=Callable[..., Any])


class Tracer:
    """Timer of steps between `start` and `stop`, which records times as metrics in seconds.

    Each `step` records the time since the one before as `<prefix>/<step>/duration_avg_s` and `duration_max_s`; `stop`
    records `<prefix>/total_duration_avg_s` and `total_duration_max_s`. Then the tracer may be started again.

    Args:
        prefix: of the names of the metrics.
        track_memory: also record the peak of GPU memory until `stop`, in GB, as `<prefix>/memory_peak_max_gb`.
        timer: "cpu", or "gpu" to wait for the work on the GPU at each step; the environment variable
            METRIC_TIMER_USES_GPU, true or false, has precedence. With DISABLE_PERF_METRICS nothing is recorded.
    """

    def __init__(self, prefix: str, track_memory: bool = False, timer: str = "cpu") -> None:
        if timer not in ("cpu", "gpu"):
            raise ValueError(f'timer must be "cpu" or "gpu", got {timer!r}')
        if (override := METRIC_TIMER_USES_GPU.get_value()) is not None:
            timer = "gpu" if str(override).lower() in ("true", "1", "yes") else "cpu"
        self.records = not DISABLE_PERF_METRICS.get_value()
        self.prefix = prefix
        self.track_memory = self.records and track_memory and torch.cuda.is_available()
        self.waits = timer == "gpu" and torch.cuda.is_available()
        self.began: float | None = None
        self.last = 0.0

    def start(self) -> None:
        """Start to measure. ValueError: the tracer has already been started."""
        if self.began is not None:
            raise ValueError(f"tracer {self.prefix} has already been started: call stop first")
        if self.track_memory:
            torch.cuda.reset_peak_memory_stats()
        self.began = self._now()
        self.last = self.began

    def step(self, name: str) -> None:
        """Record the time since the last step, or the start, under a name. ValueError: the tracer was not started."""
        if self.began is None:
            raise ValueError(f"tracer {self.prefix} must be started before calling step")
        now = self._now()
        self._record_seconds(f"{self.prefix}/{name}/duration", now - self.last)
        self.last = now

    def stop(self) -> None:
        """Record the time since the start. ValueError: the tracer was not started."""
        if self.began is None:
            raise ValueError(f"tracer {self.prefix} must be started before calling stop")
        self._record_seconds(f"{self.prefix}/total_duration", self._now() - self.began)
        if self.track_memory:
            name = f"{self.prefix}/memory_peak_max_gb"
            record_metric(name, torch.cuda.max_memory_allocated() / 1024**3, Reduce.MAX)
        self.began = None

    def _now(self) -> float:
        # Kernels run after the call that launches them: without this only the launches would be measured.
        if self.waits:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _record_seconds(self, name: str, seconds: float) -> None:
        mean, longest = f"{name}_avg_s", f"{name}_max_s"
        if self.records:
            record_metric(mean, seconds, Reduce.MEAN)
            record_metric(longest, seconds, Reduce.MAX)


class trace:
    """Time a block or a function with a `Tracer`: `with trace("x") as tracer:` or `@trace("x")`.

    Args:
        prefix, track_memory, timer: as of `Tracer`.
    """

    def __init__(self, prefix: str, track_memory: bool = False, timer: str = "cpu") -> None:
        self.arguments = prefix, track_memory, timer
        self.tracer = Tracer(*self.arguments)

    def __enter__(self) -> Tracer:
        self.tracer.start()
        return self.tracer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.tracer.stop()

    def __call__(self, function: F) -> F:
        arguments = self.arguments

        # A tracer for each call, as calls may overlap.
        @functools.wraps(function)
        async def timed_coroutine(*args: Any, **kwargs: Any) -> Any:
            with trace(*arguments):
                return await function(*args, **kwargs)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with trace(*arguments):
                return function(*args, **kwargs)

        # The wrapper has the signature of the function.
        return timed_coroutine if inspect.iscoroutinefunction(function) else timed  # type: ignore[return-value]
