"""Preemption: a run that has to end before its last step writes a checkpoint, and exits with a code for "start again".

The reasons are SIGTERM and SIGUSR1, which schedulers send, and a deadline. `--resume auto` continues the run.
"""

import os
import time
from collections import deque
from datetime import datetime

from ..runtime.controller import ForgeError

SLURM_END = "SLURM_JOB_END_TIME"  # environment variable: when the job is killed, in seconds since the epoch
RECENT = 16  # number of last steps and checkpoints, the longest of which is expected to recur
RESERVE = 10.0  # seconds, to end the processes


class Preempted(ForgeError):
    """Signal that a run has written a checkpoint and ended before its last step."""


def deadline_of(save_before: float | str | None) -> float | None:
    """Return the time by which a run has to end, in seconds since the epoch; None if it has no deadline.

    Args:
        save_before: the setting `run.save_before`: seconds from now, or a date and time. None: the end of the Slurm
            job, if there is one.

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
                "run.save_before must be a number of seconds or a date and time such as 2027-01-31T08:00, got "
                f"{save_before!r}"
            ) from None
    return time.time() + save_before


class Preemption:
    """Decision after every step whether a run has to stop early.

    Args:
        deadline: when the run has to have ended, in seconds since the epoch; None: no deadline.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline
        self._signal: str | None = None
        self._steps: deque[float] = deque(maxlen=RECENT)  # seconds
        self._saves: deque[float] = deque(maxlen=RECENT)
        self._previous_time: float | None = None

    def request(self, signal: str) -> None:
        """Have the run end after its current step; `signal`, such as "SIGTERM", is the reason."""
        self._signal = signal

    def saved(self, seconds: float) -> None:
        """Record how many seconds a checkpoint took, for the estimate of the next one."""
        self._saves.append(seconds)

    def reason(self) -> str | None:
        """Return the reason to stop the run now, or None; called exactly once after every step.

        The deadline counts only from the second call on: so every start of a run makes progress, and the time of the
        start is not taken for a step's.
        """
        now = time.monotonic()
        if self._previous_time is not None:
            self._steps.append(now - self._previous_time)
        self._previous_time = now

        if self._signal is not None or not self._steps:
            return self._signal

        # Another step and its checkpoint, each at twice its longest time so far.
        margin = 2 * max(self._steps) + 2 * max(self._saves, default=0.0) + RESERVE
        if self._deadline is not None and time.time() + margin > self._deadline:
            return f"the time limit, {max(0.0, self._deadline - time.time()):.0f} s from now"
        return None
