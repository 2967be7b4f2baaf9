"""Run directories, finished or running: their state, settings and numbers."""

import fcntl
from collections.abc import Collection, Iterable
from pathlib import Path

import yaml

from forge.config.sections import flatten_config
from forge.observability.folder import CONFIG, ENDED, FINISHED, MARK, last_state, read_ending
from forge.observability.lines import Json, Row, finite_numbers, last_rows, read_rows
from forge.observability.rollouts import ROLLOUTS, count_rows
from forge.system.masking import without_secrets

METRICS = ("reward", "eval/accuracy")  # their last values are in a summary
ABSENT = "-"  # stands for a setting that a run does not have


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return the run directories among these paths and one level below them, sorted.

    Raises:
        FileNotFoundError: one of the paths is not a folder.
    """
    folders = set()
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is not a directory of runs")
        folders |= {folder for folder in (path, *path.iterdir()) if (folder / CONFIG).is_file()}
    return sorted(folders)


def read_state(folder: Path) -> str:
    """Return "running", "finished", "failed", or "stopped" if the run was killed, preempted or interrupted.

    A run on another machine counts as running if its lock is visible here, as on NFS.
    """
    path = folder / "lock"
    if path.is_file():
        # A shared lock cannot be taken while the run holds its exclusive one; closing the file releases it.
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return "running"
    return last_state(folder)


def read_settings(folder: Path) -> Row:
    """Return a run's configuration by dotted keys, such as "training.steps", without secrets.

    Raises:
        OSError: it cannot be read.
        ValueError: it is malformed.
    """
    try:
        # The parser in C: a list of runs reads many of these.
        nested = yaml.load((folder / CONFIG).read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ValueError(f"{folder / CONFIG} is damaged: {' '.join(str(error).split())}") from None
    return flatten_config(without_secrets(nested) if isinstance(nested, dict) else {})


def read_metric_rows(folder: Path) -> list[dict[str, float]]:
    """Return the rows of a run's metrics.jsonl in the order of steps, each a number by the name of the metric."""
    return [row for row in map(finite_numbers, read_rows(folder / MARK)) if "step" in row]


def last_value(rows: Iterable[dict[str, float]], metric: str) -> float | None:
    """Return the last value of a metric, which not every row has; None if no row has it.

    >>> last_value([{"step": 1, "reward": 0.5}, {"step": 2}], "reward")
    0.5
    """
    return next((row[metric] for row in reversed([*rows]) if metric in row), None)


def last_values(folder: Path, names: Collection[str]) -> dict[str, float]:
    """Return the last values of a run's metrics, the last step among them, from the end of its metrics.jsonl back to
    where all of these names were found, and at most a MiB."""
    values: dict[str, float] = {}
    for row in map(finite_numbers, last_rows(folder / MARK)):
        values = row | values if "step" in row else values
        if values.keys() >= {*names}:
            break
    return values


def summarise_run(folder: Path) -> Row:
    """Return a run's state, step, number of rollouts and last values of `METRICS`, as an entry of a list of runs.

    `steps` is None if the configuration is damaged; `written` is when the last step was written, in seconds since 1970.

    Raises:
        OSError, ValueError: another file is damaged.
    """
    newest = last_values(folder, METRICS)
    try:
        steps = finite_numbers({"steps": read_settings(folder).get("training.steps")}).get("steps")
    except (ValueError, OSError):
        steps = None

    return {
        "state": read_state(folder),
        "ending": read_ending(folder),
        "step": newest.get("step", 0),
        "steps": steps,
        "written": (folder / MARK).stat().st_mtime if (folder / MARK).exists() else 0.0,
        "rollouts": count_rows(folder / ROLLOUTS),
        **{name: newest.get(name) for name in METRICS},
    }


def file_signature(folder: Path) -> list[tuple[int, int, int]]:
    """Return a value that changes when one of the files changes that `summarise_run` reads."""
    files = [folder / name for name in (CONFIG, MARK, ROLLOUTS, FINISHED, ENDED)]
    stats = [file.stat() for file in files if file.is_file()]
    return [(stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats]


def list_differences(folders: list[Path]) -> dict[str, list[Json]]:
    """Return the settings in which runs differ: by dotted key, one value for each run, `ABSENT` if it has none.

    The section `run`, with names and folders, is ignored.
    """
    configurations = [read_settings(folder) for folder in folders]
    keys = sorted({key for settings in configurations for key in settings if not key.startswith("run.")})
    values_by_key = {key: [settings.get(key, ABSENT) for settings in configurations] for key in keys}
    return {key: values for key, values in values_by_key.items() if any(value != values[0] for value in values)}
