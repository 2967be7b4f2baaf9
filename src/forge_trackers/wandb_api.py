"""Weights & Biases and Trackio as trackers: Trackio has W&B's API."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from forge.observability.lines import Row

from .settings import wandb_mode
from .tracker import TrackedRun, as_table

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
