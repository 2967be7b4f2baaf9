"""Console output: log lines, and a progress bar on a terminal or progress lines in a log.

The library logs through loggers below `forge`. `configure_logging` gives them one handler, in the controller and in
every process that it starts: messages go to stderr as `forge: message`, `forge.run` prints to stdout without prefix.
"""

import asyncio
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from tqdm import tqdm

from ..system.masking import mask_secrets

LOG_INTERVAL = 10.0  # seconds between progress lines
RECENT = 50  # number of last steps from whose mean duration the remaining time is estimated
MIN_STEPS = 4  # steps before the first estimate, since the first ones also warm up

log = logging.getLogger("forge.run")


class ConsoleHandler(logging.Handler):
    """Log handler that writes to the current sys.stdout and sys.stderr, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record above the progress bar: messages of the run to standard output, others to standard error."""
        is_plain = record.name == log.name
        stream = sys.stdout if is_plain else sys.stderr
        try:
            text = mask_secrets(self.format(record))
            with tqdm.external_write_mode():
                print(text if is_plain else f"forge: {text}", file=stream, flush=True)
        except BrokenPipeError:  # `| head`, or a `tee` that was killed: the run continues without a reader
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except Exception:  # such as a full disk
            self.handleError(record)


def configure_logging() -> None:
    """Show the library's messages of level INFO and above; do nothing if the logger `forge` already has a handler."""
    logger = logging.getLogger("forge")
    if not logger.handlers:
        logger.addHandler(ConsoleHandler())
        logger.propagate = False  # a configured root logger would print every line twice
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


def log_failure(task: asyncio.Task) -> None:
    """Log the exception of a background task that has ended, if it raised one; for `task.add_done_callback`."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        name = task.get_coro().__qualname__  # type: ignore[union-attr]
        logging.getLogger("forge").error("%s ended with %s: %s", name, type(error).__name__, error)


def report_waiting(describe: Callable[[], str | None], interval: float = LOG_INTERVAL) -> threading.Event:
    """Log the activity of a run before its first step every `interval` seconds, from a thread.

    Args:
        describe: returns it; None ends the thread.

    Returns:
        an event that also ends the thread.
    """
    ended = threading.Event()
    started = time.monotonic()

    def report() -> None:
        while not ended.wait(interval) and (text := describe()) is not None:
            log.info("%s, %.0f s after the start", text, time.monotonic() - started)

    threading.Thread(target=report, name="forge-start", daemon=True).start()
    return ended


class Progress:
    """Progress bar with step, reward, accuracy, entropy and KL, tokens per second, policy age and remaining time."""

    def __init__(self, name: str, steps: int, start: int = 0) -> None:
        self.steps = steps
        self._live = sys.stderr.isatty()
        self._bar = tqdm(total=steps, initial=start, desc=name, disable=not self._live, dynamic_ncols=True, unit="step")
        # (step, time of its end) of the last steps, without step 0, before which processes start.
        self._ends: deque[tuple[int, float]] = deque(maxlen=RECENT + 1)
        self._logged = 0.0

    def update(self, step: int, row: dict[str, float]) -> None:
        """Show a step with its most important metrics: in the bar on a terminal, otherwise as a line of the log every
        few seconds.

        Args:
            row: all metrics of the step.
        """
        now = time.perf_counter()
        if step > 0:
            self._ends.append((step, now))

        metrics = {
            "reward": ("reward", ".2f"),
            "loss": ("train/loss", ".3f"),
            "accuracy": ("accuracy", ".2f"),
            "held-out": ("eval/accuracy", ".2f"),
            "entropy": ("train/entropy", ".2f"),
            "KL": ("train/kl", ".3f"),
            "tok/s": ("generation/tokens_per_second", ".0f"),
            "age": ("policy_age", ".1f"),
        }
        if "reward" in row:  # it says more than the loss
            del metrics["loss"]
        if not row["generation/tokens_per_second"]:  # nothing is sampled
            del metrics["tok/s"]
        text = "  ".join(f"{name} {row[key]:{form}}" for name, (key, form) in metrics.items() if key in row)

        if self._live:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
            return

        if now - self._logged >= LOG_INTERVAL or step >= self.steps or "eval/accuracy" in row:
            self._logged = now
            columns = [f"step {step}/{self.steps}", text, self._time_left(step) if step else "before training"]
            log.info("%s", "  ".join(filter(None, columns)))

    def _time_left(self, step: int) -> str:
        """Return the remaining time as text, such as "120 s left"; "" until enough steps are measured."""
        first, started = self._ends[0]
        if step - first < MIN_STEPS and step < self.steps:
            return ""
        rate = (self._ends[-1][1] - started) / max(1, step - first)
        return f"{rate * (self.steps - step):.0f} s left"

    def close(self) -> None:
        """End the progress bar, whose last state stays on the screen."""
        self._bar.close()
