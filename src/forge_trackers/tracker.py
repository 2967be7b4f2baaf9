"""The trackers TensorBoard and W&B, and the thread that delivers a run's metrics to trackers.

The thread follows metrics.jsonl and rollouts.arrow, so that no tracker delays training. The failure of a tracker is one
line in the log. W&B uploads in its own process, and retries there.
"""

import importlib.util
import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from forge.config.plugin import resolve
from forge.observability.lines import Lines, Row
from forge.observability.rollouts import ROLLOUTS, read_batches, texts_by_group
from forge.system.masking import mask_secrets, without_secrets


@dataclass
class TrackedRun:
    """Run that a tracker follows, as passed to its constructor.

    Attributes:
        folder: of the run.
        name: of the run.
        config: the whole configuration, without secrets.
        start: step of the checkpoint that the run resumes from, 0 for a new run.
    """

    folder: Path
    name: str
    config: Row
    start: int


class Tracker(Protocol):
    """Protocol of trackers, which receive each step from `first` on and are closed once.

    A class of the user is constructed with a `TrackedRun`; TensorBoard and W&B also with their section of the
    configuration.
    """

    first: int

    def log(self, step: int, row: dict[str, float], rollouts: Sequence[Row]) -> None:
        """Log the metrics `row` of a step by name, and its rollouts, each a mapping of columns to values."""

    def close(self, finished: bool) -> None:
        """End the tracking; `finished` is False if the run did not reach its last step."""


class TensorBoard:
    """Tracker that writes metrics as scalars to event files in the run directory; a resumed run continues them."""

    def __init__(self, section: bool, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.first = run.start + 1 if run.start else 0
        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        # TensorBoard drops the values of earlier files from this step on.
        purge = Event(wall_time=time.time(), step=self.first, session_log=SessionLog(status=SessionLog.START))
        self._writer.add_event(purge)

    def log(self, step: int, row: dict[str, float], rollouts: Sequence[Row]) -> None:
        """Write the metrics of a step as scalars."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, finished: bool) -> None:
        """Flush and close the event file."""
        self._writer.close()


class Wandb:
    """Tracker that logs to a run of Weights & Biases; the run's id is in the run directory, so that a resumed run
    continues it."""

    def __init__(self, section: Row, run: TrackedRun) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        path = run.folder / "wandb.id"
        if not path.exists():
            path.write_text(secrets.token_hex(4))
        run_id = path.read_text()

        # Offline, a resumed run writes all steps again: remove what it wrote before, so that no step is there twice.
        for old in (run.folder / "wandb").glob(f"offline-run-*-{run_id}"):
            shutil.rmtree(old)
        mode: Any = section["mode"] or os.environ.get("WANDB_MODE") or "online"
        self._run = wandb.init(
            **{name: section[name] for name in ("project", "entity", "group", "tags")},
            name=section["name"] or run.name,
            id=run_id,
            config=run.config,
            dir=str(run.folder),
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(console="off", silent=True, save_code=False),
        )
        self._table = wandb.Table
        self.first = self._run.starting_step if mode == "online" else 0

    def log(self, step: int, row: dict[str, float], rollouts: Sequence[Row]) -> None:
        """Log the metrics of a step, and its rollouts as a table."""
        values: Row = dict(row)
        if rollouts:
            columns: list[str | int] = [*rollouts[0]]
            # Numbers, texts and None as they are, everything else as JSON.
            lines = [
                [cell if isinstance(cell, int | float | str | None) else json.dumps(cell) for cell in line.values()]
                for line in rollouts
            ]
            values["rollouts"] = self._table(columns=columns, data=lines, allow_mixed_types=True)
        self._run.log(values, step=step)

    def close(self, finished: bool) -> None:
        """Finish the run, as failed if it did not reach its last step."""
        import wandb

        self._run.finish(exit_code=0 if finished else 1)
        # End its service process, which may not have written the last rows of an offline file.
        wandb.teardown()


POLL_INTERVAL = 0.5  # seconds between two reads of the files
END_TIMEOUT = 60.0  # seconds that trackers have for the last rows

# Functions that make a tracker, by its key in the section `metrics`.
STARTS: dict[str, Callable[[Any, TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "tracker": lambda name, run: resolve(name, "metrics.tracker")(run),
}

log = logging.getLogger(f"forge.{__name__}")


def check_trackers(metrics: Row) -> None:
    """Check the section `metrics` of a configuration before a run starts.

    Raises:
        ModuleNotFoundError: a package is missing; the message names it.
        ValueError: W&B has no API key here, or the class `metrics.tracker` does not exist.
    """
    if metrics.get("tracker"):
        resolve(metrics["tracker"], "metrics.tracker")
    for name in ("tensorboard", "wandb"):
        if metrics.get(name) and importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"metrics.{name} needs the {name} package: pip install {name}")
    section = metrics.get("wandb")
    if section and (section["mode"] or os.environ.get("WANDB_MODE") or "online") == "online":
        import wandb

        if not wandb.api.api_key:
            raise ValueError(
                "metrics.wandb: there is no API key: run wandb login, set WANDB_API_KEY, or set mode: offline"
            )


class Delivery:
    """Thread that delivers the steps of a run to its trackers until `close`.

    Args:
        folder: of the run.
        metrics: the section of the configuration.
        config: the whole configuration; trackers get it without secrets.
        start: step of the checkpoint that the run resumes from, 0 for a new run.
    """

    def __init__(self, folder: Path, metrics: Row, config: Row, start: int) -> None:
        self._run = TrackedRun(folder, folder.name, without_secrets(config), start)
        self._sections = {name: metrics[name] for name in STARTS if metrics.get(name)}
        self._trackers: dict[str, Tracker] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._feed_trackers, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until the trackers have the last steps, for at most a minute."""
        self._ended.set()
        self._thread.join(END_TIMEOUT)
        if self._thread.is_alive():
            log.warning("%s did not receive the last metrics in time", " and ".join(self._trackers))

    def _feed_trackers(self) -> None:
        """Start the trackers, send them every step until the run has ended, and close them; runs in the thread."""
        for name, section in self._sections.items():
            if (tracker := self._attempt_call(name, STARTS[name], section, self._run)) is not None:
                self._trackers[name] = tracker
        for step, row, rollouts in self._read_steps():
            for name, tracker in [*self._trackers.items()]:
                if step >= tracker.first:
                    self._attempt_call(name, tracker.log, step, row, rollouts)
        for name, tracker in [*self._trackers.items()]:
            self._attempt_call(name, tracker.close, (self._run.folder / "finished").exists())

    def _attempt_call(self, name: str, action: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a call of a tracker; None if it fails, which is logged, and it gets no more calls."""
        try:
            return action(*arguments)
        except Exception as error:
            self._trackers.pop(name, None)
            text = mask_secrets(" ".join(str(error).split()))[:200]
            log.warning("metrics.%s failed with %s: %s. Training continues", name, type(error).__name__, text)

    def _read_steps(self) -> Iterator[tuple[int, dict[str, float], list[Row]]]:
        """Yield number, row and rollouts of each step as it is written, to the end of the files of a run that ended."""
        metrics = Lines(self._run.folder / "metrics.jsonl")
        waiting: list[Row] = []
        position = 0

        while True:
            # Asked before the files are read, so that they are read once more after the run has ended.
            is_last = self._ended.is_set()
            rows = list(metrics.read())

            # The rollouts of a step are written before its row.
            for end, batch in read_batches(self._run.folder / ROLLOUTS, after=position):
                waiting += texts_by_group(batch)
                position = end

            for row in rows:
                rollouts = [line for line in waiting if line["step"] <= row["step"]]
                waiting = waiting[len(rollouts) :]
                yield int(row["step"]), row, rollouts

            if is_last:
                return
            self._ended.wait(POLL_INTERVAL)
