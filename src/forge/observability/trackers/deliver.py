"""Delivery of a run's rows to its trackers, in a thread for each."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import yaml

from ...system.files import write_atomic
from ...system.masking import masked, without_secrets
from ..console import configure_logging
from ..lines import Row
from ..rollouts import ROLLOUTS, batches, texts
from .mlflow_runs import Mlflow
from .settings import metrics_after_run
from .tensorboard_files import TensorBoard
from .tracker import TrackedRun, Tracker
from .wandb_api import start_trackio, start_wandb

POLL_INTERVAL = 0.5  # seconds between two reads of the files
RETRY_INTERVAL = 20.0  # seconds until a tracker that failed is tried again
END_TIMEOUT = 60.0  # seconds that trackers have for the last rows
ORPHAN_TIMEOUT = 10.0  # the same after the controller was killed: its lock on the folder is inherited

STARTS: dict[str, Callable[[Any, TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": start_wandb,
    "trackio": start_trackio,
    "mlflow": Mlflow,
}

Step = tuple[int, dict[str, float], list[Row]]  # its number, its row and its rollouts

log = logging.getLogger(__name__)


def steps_of(folder: Path, ended: threading.Event) -> Iterator[Step]:
    """Yield each step with its row and its rollouts, as they are written; stops at the end of the files once
    `ended`."""
    waiting: list[Row] = []
    read = 0
    with (folder / "metrics.jsonl").open() as metrics:
        while True:
            # Read before the files: what was written until the end is read once more after it.
            last = ended.is_set()
            rows = list(complete_lines(metrics))
            # The rollouts of a step are written before its row.
            for end, batch in batches(folder / ROLLOUTS, after=read):
                waiting += texts(batch)
                read = end
            for row in rows:
                rollouts = [line for line in waiting if line["step"] <= row["step"]]
                waiting = waiting[len(rollouts) :]
                yield int(row["step"]), row, rollouts
            if last:
                return
            ended.wait(POLL_INTERVAL)


def complete_lines(file: TextIO) -> Iterator[Row]:
    """Yield the lines that were appended to a file of JSON lines, without one that is being written."""
    while True:
        position = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(position)
            return
        yield json.loads(line)


def feed(name: str, section: Any, run: TrackedRun, ended: threading.Event, save: Callable[[], None]) -> bool:
    """Send every step to a tracker until the run has ended. Return whether it has all of them."""
    tracker: Tracker | None = None
    steps = steps_of(run.folder, ended)
    step: Step | None = None  # the one to send next
    failed = False
    while True:
        last = ended.is_set()
        try:
            if tracker is None:
                try:
                    tracker = STARTS[name](section, run)
                finally:
                    save()
            while step := step or next(steps, None):
                if step[0] >= tracker.first:
                    tracker.log(*step)
                step = None
            tracker.close((run.folder / "finished").exists())
            return True
        except Exception as error:
            # One warning for a tracker that is down for hours.
            if not failed:
                text = masked(" ".join(str(error).split()))[:200]
                fault = f"{type(error).__name__}: {text}. Training continues; it is tried again every "
                log.warning("metrics.%s failed with %s%g s", name, fault, RETRY_INTERVAL)
            failed = True
        if last:
            break
        ended.wait(RETRY_INTERVAL)
    lacking = (step is not None) + sum(1 for _ in steps)
    command = f"python -m {__package__} {run.folder}"
    log.warning("metrics.%s lacks %d rows of metrics.jsonl: deliver them with %s", name, lacking, command)
    return False


def deliver(folder: Path, start: int | None) -> bool:
    """Feed all trackers that the run in `folder` names in its config.yaml. With `start`, their sections are the first
    line of standard input, whose end is that of the run. Return whether each tracker has all rows.

    Raises:
        ValueError: config.yaml lacks a password that a tracker needs; names the variable for it.
    """
    configure_logging()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    # During a run the settings come by a pipe: they may hold keys, which the configuration of the folder masks.
    metrics = metrics_after_run(config["metrics"]) if start is None else json.loads(sys.stdin.buffer.readline())
    path = folder / "trackers.json"
    states = json.loads(path.read_text()) if path.exists() else {}
    masked_config = without_secrets(config)
    lock = threading.Lock()
    ended = threading.Event()
    complete: dict[str, bool] = {}

    def save() -> None:
        with lock:
            write_atomic(path, json.dumps(states))

    def work(name: str, section: Any) -> None:
        run = TrackedRun(folder, folder.name, masked_config, start, states.setdefault(name, {}))
        complete[name] = feed(name, section, run, ended, save)

    sections = {name: metrics[name] for name in STARTS if metrics.get(name)}
    threads = {n: threading.Thread(target=work, args=(n, section), daemon=True) for n, section in sections.items()}
    parent = os.getppid()
    for thread in threads.values():
        thread.start()
    # The run closes the pipe when it ends, however it ends.
    if start is not None:
        sys.stdin.buffer.read()
    ended.set()
    # A tracker that hangs must not keep the others from being waited for, nor this process from ending.
    began = time.monotonic()
    for name, thread in threads.items():
        while thread.is_alive():
            if time.monotonic() - began > (END_TIMEOUT if os.getppid() == parent else ORPHAN_TIMEOUT):
                log.warning("metrics.%s did not take the last rows in time: they are in metrics.jsonl", name)
                break
            thread.join(0.2)
    return all(complete.get(name, False) for name in threads)
