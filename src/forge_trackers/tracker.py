"""The trackers: their interface, TensorBoard, W&B, Trackio, which has W&B's API, and MLflow."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from forge.config.sections import flat
from forge.observability.lines import Row

from .settings import wandb_mode


@dataclass
class TrackedRun:
    """The run that a tracker follows.

    Attributes:
        start: step of the checkpoint that the run resumes from, 0 for a new run; None: the run has ended.
        state: values that a tracker stores in trackers.json, to continue the same run.
    """

    folder: Path
    name: str
    config: Row
    start: int | None
    state: dict[str, Any]


class Tracker(Protocol):
    """A tracker is constructed with its section of the configuration and the run, one of your own with the run. It gets
    every row whose step is at least `first`, with the rollouts of that step, and is closed once. Each of these may
    raise, and is then retried."""

    first: int

    def log(self, step: int, row: dict[str, float], rollouts: Sequence[Row]) -> None:
        """Log the metrics of a step, and its rollouts as a table."""

    def close(self, finished: bool) -> None:
        """End the run; `finished` is False if it did not reach its last step."""


def as_table(rollouts: Sequence[Row]) -> dict[str, list[Any]]:
    """Return the columns of rollouts: numbers as they are, and everything else as text."""
    cells = {name: [line[name] for line in rollouts] for name in (rollouts[0] if rollouts else ())}
    plain = (int, float, str, type(None))
    return {name: [v if isinstance(v, plain) else json.dumps(v) for v in column] for name, column in cells.items()}


MAX_PARAM = 6000  # characters of a value, which is MLflow's limit
PARAMS_AT_ONCE = 100  # the limit of a request


class Mlflow:
    """A run of MLflow, in a local database or on a server."""

    def __init__(self, section: Row, run: TrackedRun) -> None:
        # This process retries by itself: MLflow would wait for minutes at a server that is down.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        logging.getLogger("alembic").setLevel(logging.WARNING)
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._metric = Metric
        self._client = client = MlflowClient(section["tracking_uri"])
        if "id" not in run.state:
            name = section["experiment"] or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
            existing = client.get_experiment_by_name(name)
            experiment = client.create_experiment(name) if existing is None else existing.experiment_id
            created = client.create_run(experiment, run_name=section["name"] or run.name)
            run.state["id"] = created.info.run_id
        self._id = run.state["id"]
        params = [Param(key, str(value)[:MAX_PARAM]) for key, value in flat(run.config).items()]
        if not client.get_run(self._id).data.params:  # they can be set once
            for start in range(0, len(params), PARAMS_AT_ONCE):
                client.log_batch(self._id, params=params[start : start + PARAMS_AT_ONCE])
        client.update_run(self._id, status="RUNNING")
        client.log_dict(self._id, run.config, "config.yaml")
        # MLflow cannot remove a value: steps that it has stay as they are.
        self.first = 1 + max((metric.step for metric in client.get_metric_history(self._id, "step")), default=-1)
        self._time = (-1, 0)

    def log(self, step: int, row: dict[str, float], rollouts: Sequence[Row]) -> None:
        """Log the metrics of a step, and its rollouts as a table."""
        # A retry has the time of the first attempt: MLflow then recognises values that it has.
        if self._time[0] != step:
            self._time = step, int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(k, v, self._time[1], step) for k, v in row.items()])
        columns = as_table(rollouts)
        if columns:
            self._client.log_table(self._id, columns, f"rollouts/{step:06d}.json")

    def close(self, finished: bool) -> None:
        """End the run as FINISHED or FAILED."""
        self._client.set_terminated(self._id, "FINISHED" if finished else "FAILED")


class TensorBoard:
    """Event files in the run's folder, with scalars only; a resumed run continues them."""

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
        """Flush and close the file."""
        self._writer.close()


START_TIMEOUT = 30.0  # seconds until the server of W&B counts as unreachable

log = logging.getLogger(f"forge.{__name__}")


class WandbApi:
    """A run behind W&B's API.

    Args:
        run: the object that `init` returned.
        first: the first step that the run lacks.
        table: makes a table from its columns.
        finish: ends the run, with whether it reached its last step.
        reserved: names that the API does not accept as metrics.
    """

    def __init__(
        self,
        run: Any,
        first: int,
        table: Callable[[dict[str, list[Any]]], object],
        finish: Callable[[bool], None],
        reserved: frozenset[str] = frozenset(),
    ) -> None:
        self._run = run
        self.first = first
        self._table = table
        self._finish = finish
        self._reserved = reserved

    def log(self, step: int, row: dict[str, float], rollouts: Sequence[Row]) -> None:
        """Log the metrics of a step, and its rollouts as a table."""
        values: dict[str, object] = {name: value for name, value in row.items() if name not in self._reserved}
        columns = as_table(rollouts)
        if columns:
            values["rollouts"] = self._table(columns)
        self._run.log(values, step=step)

    def close(self, finished: bool) -> None:
        """Finish the run, as failed if it did not reach its last step."""
        self._finish(finished)


def start_wandb(section: Row, run: TrackedRun) -> WandbApi:
    """Start a run of Weights & Biases; a resumed run has the same id."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    mode = wandb_mode(section)
    offline = mode != "online"
    resumed = "id" in run.state
    run.state.setdefault("id", secrets.token_hex(4))
    if offline:
        # All of it is written again, so that one folder has the whole run and nothing twice.
        for old in (run.folder / "wandb").glob(f"offline-run-*-{run.state['id']}"):
            shutil.rmtree(old)
    options = {name: section[name] for name in ("project", "entity", "group", "tags")}
    options |= {"mode": mode, "name": section["name"] or run.name, "config": run.config, "dir": str(run.folder)}
    settings = wandb.Settings(console="off", silent=True, save_code=False, init_timeout=START_TIMEOUT)
    # Rewinding to the checkpoint is best, and not available to every account.
    attempts: list[Row] = [{"id": run.state["id"], "resume": None if offline else "allow"}]
    if resumed and run.start and not offline:
        attempts.insert(0, {"resume_from": f"{run.state['id']}?_step={run.start}"})
    for number, resumption in enumerate(attempts, 1):
        try:
            started = wandb.init(**options, **resumption, settings=settings)
            break
        except Exception as error:
            wandb.teardown()  # otherwise it takes the id for one in use
            if number == len(attempts):
                raise
            log.warning(
                "metrics.wandb: steps it has after %d stay as they are: %s", run.start, " ".join(str(error).split())
            )

    def table(columns: dict[str, list[Any]]) -> object:
        lines = [list(line) for line in zip(*columns.values(), strict=True)]
        return wandb.Table(columns=list(columns), data=lines, allow_mixed_types=True)

    def finish(finished: bool) -> None:
        started.finish(exit_code=0 if finished else 1)
        wandb.teardown()

    return WandbApi(started, 0 if offline else started.starting_step, table, finish)


def start_trackio(section: Row, run: TrackedRun) -> WandbApi:
    """Start a run of Trackio, in its local database."""
    # With one of these set it would send the run to a server.
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        os.environ.pop(name, None)
    import trackio

    name = section["name"] or run.name
    hardware: Row = {"auto_log_cpu": False, "auto_log_gpu": False}
    started = trackio.init(section["project"], name=name, config=run.config, embed=False, **hardware)
    # A resumed run has the same id, and is written again from its first step.
    if "id" in run.state:
        started.id = run.state["id"]
        with suppress(ValueError):  # nothing of the project was written
            for old in trackio.Api().runs(section["project"]):
                if old.id == started.id:
                    old.delete()
    run.state["id"] = started.id

    def table(columns: dict[str, list[Any]]) -> object:
        lines: Any = [dict(zip(columns, line, strict=True)) for line in zip(*columns.values(), strict=True)]
        return trackio.Table(data=lines)

    return WandbApi(started, 0, table, lambda finished: started.finish(), frozenset({"step"}))
