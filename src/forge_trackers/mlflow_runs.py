"""MLflow as a tracker."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from forge.config.sections import flat
from forge.observability.lines import Row

from .tracker import TrackedRun, as_table

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
