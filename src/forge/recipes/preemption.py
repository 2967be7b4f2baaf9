"""A run that has to end before its last step: it writes a checkpoint, and its exit code asks to be started again.

The reasons are SIGTERM and SIGUSR1, which schedulers send, and a deadline. `--resume auto` continues the run.
"""

import os
import time
from collections import deque
from datetime import datetime

from ..runtime.controller import ForgeError

SLURM_END = "SLURM_JOB_END_TIME"  # environment variable: when the job is killed, in seconds since the epoch
RECENT = 16  # steps and checkpoints whose longest is expected to come again
RESERVE = 10.0  # seconds, to end the processes


class Preempted(ForgeError):
    """A run has written a checkpoint and ended before its last step."""


def deadline_of(save_before: float | str | None) -> float | None:
    """Return the time at which a run has to have ended, in seconds since the epoch.

    Raises:
        ValueError: it is neither a number of seconds nor a date and time.
    """
    if save_before is None:
        end = os.environ.get(SLURM_END, "")
        return float(end) if end.isdigit() else None
    if isinstance(save_before, str):
        try:
            return datetime.fromisoformat(save_before).timestamp()
        except ValueError:
            raise ValueError(
                "run.save_before is a number of seconds or a date and time such as 2027-01-31T08:00, "
                f"got {save_before!r}"
            ) from None
    return time.time() + save_before


class Preemption:
    """Whether a run has to end, asked after every step.

    Args:
        deadline: in seconds since the epoch.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline
        self._signal: str | None = None
        self._steps: deque[float] = deque(maxlen=RECENT)  # seconds
        self._saves: deque[float] = deque(maxlen=RECENT)
        self._previous_time: float | None = None

    def request(self, signal: str) -> None:
        """End after the step that is being done."""
        self._signal = signal

    def saved(self, seconds: float) -> None:
        """Record how long a checkpoint took."""
        self._saves.append(seconds)

    def reason(self) -> str | None:
        """Return the reason to stop now, or None. Call it once after every step. The deadline counts from the second
        call on: every start makes progress, and its own duration is not a step's."""
        now = time.monotonic()
        if self._previous_time is not None:
            self._steps.append(now - self._previous_time)
        self._previous_time = now

        if self._signal is not None or not self._steps:
            return self._signal
        # Another step and its checkpoint, each at twice its longest time so far.
        margin = 2 * max(self._steps) + 2 * max(self._saves, default=0.0) + RESERVE
        if self._deadline is not None and time.time() + margin > self._deadline:
            remaining = max(0.0, self._deadline - time.time())
            return f"the time limit, {remaining:.0f} s from now"
        return None
