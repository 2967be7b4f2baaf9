"""Folders of finished and running runs: their state, settings and numbers."""

from __future__ import annotations

import fcntl
from collections.abc import Iterable
from pathlib import Path

from ..config.sections import flat
from ..config.yaml_files import parse_yaml
from ..system.files import decoded, is_plain, open_plain, read_plain
from ..system.masking import without_secrets
from .folder import CONFIG, ENDED, FINISHED, MARK
from .lines import Json, Lines, Row, numbers

SERVED = "serve.json"  # of a run that is served: {"url": ..., "key": ...}, for this user only
MAX_REASON = 500  # characters
MAX_CONFIG = 1 << 20  # bytes of a configuration
ABSENT = "-"
# Stands for a section that other runs lack.
SECTION = "(a section)"


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return the folders of runs among these and one level below them, by name.

    Raises:
        FileNotFoundError: one of the paths is not a folder.
    """
    folders = set()
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is not a folder of runs")
        folders |= {folder for folder in (path, *path.iterdir()) if is_plain(folder / CONFIG)}
    return sorted(folders)


def state(folder: Path) -> str:
    """Return `running`, `finished`, `failed`, or `stopped`: it was killed, preempted or interrupted.

    A run on another machine counts as running if that machine's locks are seen here, as on NFS.
    """
    return "running" if _is_locked(folder) else last_state(folder)


def last_state(folder: Path) -> str:
    """Return the `state` of a run whose lock is free."""
    if is_plain(folder / FINISHED):
        return "finished"
    return "failed" if ending(folder).startswith("failed") else "stopped"


def ending(folder: Path) -> str:
    """Return why a run ended before its last step, as "failed: KeyError: 'answer'"; empty if it is not recorded."""
    try:
        with open_plain(folder / ENDED) as file:
            return file.readline(MAX_REASON).decode(errors="replace").strip()
    except OSError:
        return ""


def _is_locked(folder: Path) -> bool:
    try:
        file = open_plain(folder / "lock")
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def settings(folder: Path) -> Row:
    """Read a run's configuration, by dotted keys. Secrets are masked, which earlier versions wrote.

    Raises:
        OSError: it cannot be read. ValueError: it is malformed or too large.
    """
    path = folder / CONFIG
    nested = parse_yaml(decoded(read_plain(path, MAX_CONFIG), path), path)
    return flat(without_secrets(nested) if isinstance(nested, dict) else {})


def rows(folder: Path) -> list[dict[str, float]]:
    """Read the rows of metrics.jsonl in the order of steps, without an incomplete last line."""
    file = Lines(folder / MARK)
    rows = []
    while True:
        rows += [row for row in map(numbers, file.read()) if "step" in row]
        if not file.behind:
            return rows


def last(rows: Iterable[dict[str, float]], metric: str) -> float | None:
    """Return the last value of a metric, which not every row has."""
    return next((row[metric] for row in reversed([*rows]) if metric in row), None)


def differences(folders: list[Path]) -> dict[str, list[Json]]:
    """Return the settings in which runs differ by key, one value for each run; `ABSENT` if a run lacks the key. A
    section that a run lacks, or sets to null, is one key, `SECTION` in the others. The section `run`, their names and
    folders, is ignored."""
    configurations = [settings(folder) for folder in folders]
    differing: dict[str, list[Json]] = {}
    for key in sorted({key for settings in configurations for key in settings if not key.startswith("run.")}):
        values = [settings.get(key, ABSENT) for settings in configurations]
        parts = key.split(".")
        # The outermost section that some run lacks stands for all of its keys.
        for length in range(1, len(parts)):
            section = ".".join(parts[:length])
            present = [any(k.startswith(f"{section}.") for k in settings) for settings in configurations]
            if not all(present):
                key = section
                values = [
                    SECTION if has_section else settings.get(section, ABSENT)
                    for has_section, settings in zip(present, configurations, strict=True)
                ]
                break
        if any(value != values[0] for value in values):
            differing[key] = values
    return differing
