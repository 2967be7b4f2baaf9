"""Delivery of a run's rows to its trackers, in a thread for each.

A thread follows metrics.jsonl and rollouts.arrow: a tracker that fails or hangs neither stops nor delays training, and
retries with the rows of the files. W&B computes and uploads in its service process.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from forge.config.plugin import resolve
from forge.observability.lines import Lines, Row
from forge.observability.rollouts import ROLLOUTS, batches, texts
from forge.system.files import write_atomic
from forge.system.masking import masked, without_secrets

from .tracker import Mlflow, TensorBoard, TrackedRun, Tracker, start_trackio, start_wandb

POLL_INTERVAL = 0.5  # seconds between two reads of the files
RETRY_INTERVAL = 20.0  # seconds until a tracker that failed is tried again
END_TIMEOUT = 60.0  # seconds that trackers have for the last rows

STARTS: dict[str, Callable[[Any, TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": start_wandb,
    "trackio": start_trackio,
    "mlflow": Mlflow,
    "tracker": lambda name, run: resolve(name, "metrics.tracker")(run),
}
Step = tuple[int, dict[str, float], list[Row]]  # its number, its row and its rollouts

log = logging.getLogger(f"forge.{__name__}")


class Delivery:
    """Feeds the trackers of a run until `close`.

    Args:
        metrics: the section of the configuration.
        config: the whole configuration, which trackers show without its secrets.
        start: step of the checkpoint that the run resumes from, 0 for a new run; None: the run has ended.
    """

    def __init__(self, folder: Path, metrics: Row, config: Row, start: int | None) -> None:
        self.folder = folder
        self._path = folder / "trackers.json"
        self._states: dict[str, Row] = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._config, self._start = without_secrets(config), start
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._complete: set[str] = set()
        self._threads = {}
        for name in STARTS:
            if metrics.get(name):
                self._threads[name] = threading.Thread(target=self._feed, args=(name, metrics[name]), daemon=True)
                self._threads[name].start()

    def close(self) -> bool:
        """Wait until the last rows are delivered; return whether each tracker has all rows."""
        self._ended.set()
        deadline = time.monotonic() + END_TIMEOUT
        for name, thread in self._threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("metrics.%s did not take the last rows in time: %s", name, self._remedy())
        return self._complete == self._threads.keys()

    def _feed(self, name: str, section: Any) -> None:
        """Send every step to a tracker until the run has ended."""
        run = TrackedRun(self.folder, self.folder.name, self._config, self._start, self._states.setdefault(name, {}))
        tracker: Tracker | None = None
        steps = self._read_steps()
        step: Step | None = None  # the one to send next
        has_failed = False
        while True:
            is_last = self._ended.is_set()
            try:
                if tracker is None:
                    tracker = self._start_tracker(name, section, run)
                while step := step or next(steps, None):
                    if step[0] >= tracker.first:
                        tracker.log(*step)
                    step = None
                tracker.close((self.folder / "finished").exists())
                self._complete.add(name)
                return
            except Exception as error:
                if not has_failed:  # one warning for a tracker that is down for hours
                    text = masked(" ".join(str(error).split()))[:200]
                    log.warning("metrics.%s failed with %s: %s. Training continues", name, type(error).__name__, text)
                has_failed = True
            if is_last:
                break
            self._ended.wait(RETRY_INTERVAL)
        lacking = (step is not None) + sum(1 for _ in steps)
        log.warning("metrics.%s lacks %d rows of metrics.jsonl: %s", name, lacking, self._remedy())

    def _start_tracker(self, name: str, section: Any, run: TrackedRun) -> Tracker:
        try:
            return STARTS[name](section, run)
        finally:  # what it has noted to continue the same run
            with self._lock:
                write_atomic(self._path, json.dumps(self._states))

    def _read_steps(self) -> Iterator[Step]:
        """Yield each step as it is written; stops at the end of the files once the run has ended."""
        metrics = Lines(self.folder / "metrics.jsonl")
        waiting: list[Row] = []
        position = 0
        while True:
            # Asked before the files are read: what was written until the end is read once more after it.
            is_last = self._ended.is_set()
            rows = list(metrics.read())
            # The rollouts of a step are written before its row.
            for end, batch in batches(self.folder / ROLLOUTS, after=position):
                waiting += texts(batch)
                position = end
            for row in rows:
                rollouts = [line for line in waiting if line["step"] <= row["step"]]
                waiting = waiting[len(rollouts) :]
                yield int(row["step"]), row, rollouts
            if is_last:
                return
            self._ended.wait(POLL_INTERVAL)

    def _remedy(self) -> str:
        return f"deliver them with python -m {__package__} {self.folder}"


def deliver_ended_run(folder: Path) -> bool:
    """Send the rows that the trackers of a run which has ended lack; return whether each has all of them then."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    return Delivery(folder, config["metrics"], config, None).close()
