"""Experiment trackers: TensorBoard, Weights & Biases, Trackio and MLflow.

They run in one process beside the controller, which follows metrics.jsonl and rollouts.arrow in the run's folder. A
tracker that fails or hangs cannot stop or slow down training: its rows are in the files, and it retries. The process
ends when the controller closes its standard input, or dies. By hand,

    python -m forge.observability.trackers runs/x

delivers the rows that the trackers of a finished run lack.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from ..config.sections import flat
from ..system.files import write_atomic
from ..system.masking import MaskedStream, masked, masked_names, without_secrets
from ..system.scratch import Scratch
from .console import configure_logging
from .lock import RunLock
from .rollouts import ROLLOUTS, batches, texts

POLL = 0.5  # seconds between two looks at the files
RETRY = 20.0  # seconds until a tracker that failed is tried again
ENDING = 60.0  # seconds that trackers have for the last rows
ORPHANED = 10.0  # the same after the controller was killed
WANDB_START = 30.0  # seconds until the server of W&B counts as unreachable
LOGIN = """
import sys, wandb
try:
    wandb.login(verify=False)
except wandb.errors.UsageError:
    sys.exit(1)
"""

log = logging.getLogger(__name__)


def check_trackers(metrics: dict[str, Any]) -> None:
    """Check the section `metrics` of a configuration.

    Raises:
        ModuleNotFoundError: a package is missing; names it.
        ValueError: W&B has no API key here, or WANDB_MODE is none of its modes.
    """
    needs: dict[str, list[str]] = {name: [name] for name in TRACKERS if metrics.get(name)}
    if "mlflow" in needs:
        where = metrics["mlflow"]["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI", "sqlite:")
        database = where.startswith(("sqlite:", "postgresql", "mysql", "mssql"))
        needs["mlflow"] += ["pandas", *(("sqlalchemy", "alembic") if database else ())]
    for name, modules in needs.items():
        if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
            packages = [{"mlflow": "mlflow-skinny"}.get(module, module) for module in missing]
            raise ModuleNotFoundError(
                f"metrics.{name} needs the {', '.join(missing)} package{'s' * (len(missing) > 1)}: "
                f"pip install {' '.join(packages)}"
            )
    # In a process of its own; on a terminal it asks for the key.
    login = [sys.executable, "-c", LOGIN]
    online = "wandb" in needs and wandb_mode(metrics["wandb"]) == "online"
    if online and subprocess.run(login, stdout=subprocess.DEVNULL).returncode:
        raise ValueError("metrics.wandb: there is no API key: run wandb login, set WANDB_API_KEY, or set mode: offline")


def wandb_mode(section: dict[str, Any]) -> str:
    """Whether W&B is online, offline or disabled: as the section says, else as WANDB_MODE does.

    Raises:
        ValueError: WANDB_MODE is none of W&B's modes.
    """
    variable = os.environ.get("WANDB_MODE", "").strip().lower() or "online"
    mode = section["mode"] or {"dryrun": "offline", "shared": "online", "run": "online"}.get(variable, variable)
    if mode not in ("online", "offline", "disabled"):
        raise ValueError(
            f"WANDB_MODE is {variable!r}: set it to online, offline or disabled, or set metrics.wandb.mode"
        )
    return mode


class TrackerProcess:
    """The process that feeds the trackers of the run in `folder`.

    Args:
        metrics: the section of the configuration, which has passwords that config.yaml does not.
        start: the step that the run starts at.
    """

    def __init__(self, folder: Path, metrics: dict[str, Any], start: int) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        self._process: subprocess.Popen | None = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder), "--follow", str(start)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # Trackio prints there
            env=os.environ | {"PYTHONPATH": path},
            close_fds=False,  # it inherits the lock on the run's folder
            start_new_session=True,  # out of reach of a terminal's Ctrl-C
        )
        assert self._process.stdin is not None
        # Other users may read the arguments of a process.
        self._process.stdin.write(json.dumps(metrics).encode() + b"\n")
        self._process.stdin.flush()

    def check(self) -> None:
        """Warn, once, if the process is gone."""
        if self._process is not None and self._process.poll() is not None:
            log.warning("the process of the trackers ended with code %s; training continues", self._process.returncode)
            self._process = None

    def close(self) -> None:
        """Let it deliver the last rows, and end."""
        self.check()
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(ENDING + 15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            log.warning("the process of the trackers did not end and was killed")


@dataclass
class Tracked:
    """The run that is tracked, as a tracker starts.

    start: step of the checkpoint that the run resumes from, 0 for a new run; None: nothing is trained any more.
    known: what a tracker keeps in trackers.json, to continue the same run.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    start: int | None
    known: dict[str, Any]


# A tracker is made with its section of the configuration. It gets every row whose step is at least its `first`, with
# the rollouts of that step, and is closed once. Any of these may raise, and is then tried again.


class TensorBoard:
    """Event files in the run's folder, of scalars alone; a resumed run continues them."""

    def __init__(self, section: Any, run: Tracked) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.first = run.start + 1 if run.start else 0
        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        # TensorBoard drops what earlier files have from this step on.
        purge = Event(wall_time=time.time(), step=self.first, session_log=SessionLog(status=SessionLog.START))
        self._writer.add_event(purge)

    def log(self, step: int, row: dict[str, float], rollouts: list[dict[str, Any]]) -> None:
        """Write the metrics of a step as scalars."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, finished: bool) -> None:
        """Flush and close the file."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; a resumed run has the same id."""

    def __init__(self, section: dict[str, Any], run: Tracked) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb, mode, resumed = wandb, wandb_mode(section), "id" in run.known
        offline = mode != "online"
        run.known.setdefault("id", secrets.token_hex(4))
        if offline:
            # All of it is written again, so that one folder has the whole run and nothing twice.
            for old in (run.folder / "wandb").glob(f"offline-run-*-{run.known['id']}"):
                shutil.rmtree(old)
        given = {name: section[name] for name in ("project", "entity", "group", "tags")}
        given |= {"mode": mode, "name": section["name"] or run.name, "config": run.config, "dir": str(run.folder)}
        settings = wandb.Settings(console="off", silent=True, save_code=False, init_timeout=WANDB_START)
        ways: list[dict[str, Any]] = [{"id": run.known["id"], "resume": None if offline else "allow"}]
        if resumed and run.start and not offline:
            ways.insert(0, {"resume_from": f"{run.known['id']}?_step={run.start}"})
        for number, way in enumerate(ways, 1):
            try:
                self._run = wandb.init(**given, **way, settings=settings)
                break
            except Exception as error:
                wandb.teardown()  # it would take the id for one in use
                if number == len(ways):
                    raise
                log.warning(
                    "metrics.wandb: steps it has after %d stay as they are: %s", run.start, " ".join(str(error).split())
                )
        self.first = 0 if offline else self._run.starting_step

    def log(self, step: int, row: dict[str, float], rollouts: list[dict[str, Any]]) -> None:
        """Log the metrics of a step, and its rollouts as a table."""
        values: dict[str, Any] = dict(row)
        if columns := as_table(rollouts):
            data = [list(line) for line in zip(*columns.values(), strict=True)]
            values["rollouts"] = self._wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)
        self._run.log(values, step=step)

    def close(self, finished: bool) -> None:
        """Finish the run, as failed if it did not reach its last step."""
        self._run.finish(exit_code=0 if finished else 1)
        self._wandb.teardown()


class Trackio:
    """A run of Trackio, in its local database."""

    def __init__(self, section: dict[str, Any], run: Tracked) -> None:
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            os.environ.pop(name, None)
        import trackio

        self.first, self._table = 0, trackio.Table
        name = section["name"] or run.name
        hardware: dict[str, Any] = {"auto_log_cpu": False, "auto_log_gpu": False}
        self._run = trackio.init(section["project"], name=name, config=run.config, embed=False, **hardware)
        if "id" in run.known:  # a resumed run keeps its id, and is written again from its first step
            self._run.id = run.known["id"]
            with suppress(ValueError):  # nothing of the project was written
                for old in trackio.Api().runs(section["project"]):
                    if old.id == self._run.id:
                        old.delete()
        run.known["id"] = self._run.id

    def log(self, step: int, row: dict[str, float], rollouts: list[dict[str, Any]]) -> None:
        """Log the metrics of a step, and its rollouts as a table."""
        values: dict[str, Any] = {name: value for name, value in row.items() if name != "step"}  # reserved there
        if columns := as_table(rollouts):
            lines: Any = [dict(zip(columns, line, strict=True)) for line in zip(*columns.values(), strict=True)]
            values["rollouts"] = self._table(data=lines)
        self._run.log(values, step=step)

    def close(self, finished: bool) -> None:
        """Finish the run."""
        self._run.finish()


class Mlflow:
    """A run of MLflow, in a local database or on a server."""

    def __init__(self, section: dict[str, Any], run: Tracked) -> None:
        # A server that is down is tried again by us.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        logging.getLogger("alembic").setLevel(logging.WARNING)
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._metric, self.first = Metric, 0
        self._client = client = MlflowClient(section["tracking_uri"])
        if "id" not in run.known:
            name = section["experiment"] or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
            found = client.get_experiment_by_name(name)
            experiment = client.create_experiment(name) if found is None else found.experiment_id
            made = client.create_run(experiment, run_name=section["name"] or run.name)
            run.known["id"] = made.info.run_id
        self._id = run.known["id"]
        params = [Param(key, str(value)[:6000]) for key, value in flat(run.config).items()]
        if not client.get_run(self._id).data.params:  # they can be set once
            for start in range(0, len(params), 100):
                client.log_batch(self._id, params=params[start : start + 100])
        client.update_run(self._id, status="RUNNING")
        client.log_dict(self._id, run.config, "config.yaml")
        # MLflow cannot remove a value: steps that it has stay as they are.
        self.first = 1 + max((metric.step for metric in client.get_metric_history(self._id, "step")), default=-1)
        self._time = (-1, 0)

    def log(self, step: int, row: dict[str, float], rollouts: list[dict[str, Any]]) -> None:
        """Log the metrics of a step, and its rollouts as a table."""
        # With the time of the first attempt: MLflow then recognises what it has.
        if self._time[0] != step:
            self._time = step, int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(k, v, self._time[1], step) for k, v in row.items()])
        if columns := as_table(rollouts):
            self._client.log_table(self._id, columns, f"rollouts/{step:06d}.json")

    def close(self, finished: bool) -> None:
        """End the run as FINISHED or FAILED."""
        self._client.set_terminated(self._id, "FINISHED" if finished else "FAILED")


TRACKERS: dict[str, Callable[[Any, Tracked], Any]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}


def as_table(rollouts: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Columns of rollouts: numbers, and everything else as text."""
    cells = {name: [line[name] for line in rollouts] for name in (rollouts[0] if rollouts else ())}
    plain = (int, float, str, type(None))
    return {name: [v if isinstance(v, plain) else json.dumps(v) for v in column] for name, column in cells.items()}


def rows_of(folder: Path, ended: threading.Event) -> Iterator[tuple[int, dict[str, float], list[dict[str, Any]]]]:
    """Each step with its row and its rollouts, as they are written; stops at the end of the files once `ended`."""
    waiting: list[dict[str, Any]] = []
    read = 0
    with (folder / "metrics.jsonl").open() as metrics:
        while True:
            last = ended.is_set()
            rows = list(whole_lines(metrics))
            for end, batch in batches(folder / ROLLOUTS, after=read):  # those of a step are written before its row
                waiting += texts(batch)
                read = end
            for row in rows:
                own = [line for line in waiting if line["step"] <= row["step"]]
                waiting = waiting[len(own) :]
                yield int(row["step"]), row, own
            if last:
                return
            ended.wait(POLL)


def whole_lines(file: TextIO) -> Iterator[dict[str, Any]]:
    """What was added to a file of JSON lines, but for a line that is being written."""
    while True:
        at, line = file.tell(), file.readline()
        if not line.endswith("\n"):
            file.seek(at)
            return
        yield json.loads(line)


def feed(name: str, section: Any, run: Tracked, ended: threading.Event, save: Callable[[], None]) -> bool:
    """Give a tracker every row until the run has ended. Returns whether it has all of them."""
    tracker, rows, row, failed = None, rows_of(run.folder, ended), None, False
    while True:
        last = ended.is_set()
        try:
            if tracker is None:
                try:
                    tracker = TRACKERS[name](section, run)
                finally:
                    save()
            while row := row or next(rows, None):
                if row[0] >= tracker.first:
                    tracker.log(*row)
                row = None
            tracker.close((run.folder / "finished").exists())
            return True
        except Exception as error:
            if not failed:
                text = masked(" ".join(str(error).split()))[:200]
                again = f"{type(error).__name__}: {text}. Training continues; it is tried again every {RETRY:g} s"
                log.warning("metrics.%s failed with %s", name, again)
            failed = True
        if last:
            break
        ended.wait(RETRY)
    lacking = (row is not None) + sum(1 for _ in rows)
    by_hand = f"python -m {__spec__.name} {run.folder}"
    log.warning("metrics.%s lacks %d rows of metrics.jsonl: deliver them with %s", name, lacking, by_hand)
    return False


def by_hand(metrics: dict[str, Any]) -> dict[str, Any]:
    """The section of a run that has ended, with the address of MLflow from the environment if its password is masked.

    Raises:
        ValueError: it is not there.
    """
    if (section := metrics.get("mlflow")) and any(masked_names(section)):
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            raise ValueError("the password in metrics.mlflow.tracking_uri was not kept: set MLFLOW_TRACKING_URI to it")
        return metrics | {"mlflow": section | {"tracking_uri": None}}
    return metrics


def deliver(folder: Path, start: int | None) -> bool:
    """Feed all trackers that the run in `folder` names in its config.yaml. If `start` is given, their sections are the
    first line of standard input, and its end is that of the run. Returns whether each of them has all rows.

    Raises:
        ValueError: config.yaml does not hold a password that a tracker needs; says which variable does.
    """
    configure_logging()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    metrics = by_hand(config["metrics"]) if start is None else json.loads(sys.stdin.buffer.readline())
    path, lock, parent = folder / "trackers.json", threading.Lock(), os.getppid()
    known = json.loads(path.read_text()) if path.exists() else {}
    shown = without_secrets(config)

    def save() -> None:
        with lock:
            write_atomic(path, json.dumps(known))

    ended, done = threading.Event(), dict[str, bool]()

    def work(name: str, section: Any) -> None:
        run = Tracked(folder, folder.name, shown, start, known.setdefault(name, {}))
        done[name] = feed(name, section, run, ended, save)

    sections = {name: metrics[name] for name in TRACKERS if metrics.get(name)}
    threads = {n: threading.Thread(target=work, args=(n, section), daemon=True) for n, section in sections.items()}
    for thread in threads.values():
        thread.start()
    if start is not None:
        sys.stdin.buffer.read()
    ended.set()
    began = time.monotonic()
    for name, thread in threads.items():
        while thread.is_alive():
            if time.monotonic() - began > (ENDING if os.getppid() == parent else ORPHANED):
                log.warning("metrics.%s did not take the last rows in time: they are in metrics.jsonl", name)
                break
            thread.join(0.2)
    return all(done.get(name, False) for name in threads)


if __name__ == "__main__":
    run_folder, begin = Path(sys.argv[1]), int(sys.argv[3]) if "--follow" in sys.argv else None
    if begin is None:
        RunLock(run_folder)
    else:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # it ends with the controller
    # What the packages leave in the folder for temporary files is gone however this process ends.
    scratch = Scratch("forge-trackers-")
    sys.stderr = MaskedStream(sys.stderr)  # of the packages' own messages as well
    tempfile.tempdir = os.environ["TMPDIR"] = str(scratch.path)
    try:
        complete = deliver(run_folder, begin)
    except ValueError as fault:
        scratch.close()
        raise SystemExit(f"error: {fault}") from None
    scratch.close()
    sys.stderr.flush()
    os._exit(0 if complete else 1)  # without waiting for threads of a tracker that hangs
