"""Folders that runs have left, or are writing: their state, settings and numbers."""

from __future__ import annotations

import fcntl
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..config.sections import flat
from ..config.yaml_files import parse_yaml
from ..system.files import decoded, is_plain, open_plain, read_plain
from ..system.masking import without_secrets
from .folder import CONFIG, ENDED, FINISHED, MARK
from .lines import Lines, numbers

SERVED = "serve.json"  # of a run that is served: {"url": ..., "key": ...}, for this user alone
LONGEST_REASON = 500  # characters
LARGEST = 1 << 20  # bytes of a configuration
ABSENT, SECTION = "-", "(a section)"


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The folders of runs among these and one level below them, by name.

    Raises:
        FileNotFoundError: one of the paths is not a folder.
    """
    found = set()
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is not a folder of runs")
        found |= {folder for folder in (path, *path.iterdir()) if is_plain(folder / CONFIG)}
    return sorted(found)


def state(folder: Path) -> str:
    """`running`, `finished`, `failed`, or `stopped`: it was killed, preempted or interrupted.

    A run on another machine counts as running if that machine's locks are seen here, as on NFS.
    """
    return "running" if _is_locked(folder) else last_state(folder)


def last_state(folder: Path) -> str:
    """`state` of a run that does not run."""
    if is_plain(folder / FINISHED):
        return "finished"
    return "failed" if ending(folder).startswith("failed") else "stopped"


def ending(folder: Path) -> str:
    """Why a run ended before its last step, as "failed: KeyError: 'answer'"; empty where nothing says so."""
    try:
        with open_plain(folder / ENDED) as file:
            return file.readline(LONGEST_REASON).decode(errors="replace").strip()
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


def settings(folder: Path) -> dict[str, Any]:
    """A run's configuration, by dotted keys. Secrets are masked, which earlier versions wrote down.

    Raises:
        OSError: there is none that can be read. ValueError: it is malformed or too large.
    """
    path = folder / CONFIG
    nested = parse_yaml(decoded(read_plain(path, LARGEST), path), path, fast=True)
    return flat(without_secrets(nested) if isinstance(nested, dict) else {})


def rows(folder: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl in the order of steps. A line that is only half written is left out."""
    file = Lines(folder / MARK)
    found = []
    while True:
        found += [row for row in map(numbers, file.more()) if "step" in row]
        if not file.behind:
            return found


def last(of: Iterable[dict[str, float]], metric: str) -> float | None:
    """The last value of a metric, which not every row has."""
    return next((row[metric] for row in reversed([*of]) if metric in row), None)


def differences(folders: list[Path]) -> dict[str, list[Any]]:
    """By key, the settings in which runs differ, one value for each; `ABSENT` where a run lacks the key. A section that
    a run lacks is one key, `SECTION` where it is there. The section `run`, their names and folders, is left out."""
    each = [settings(folder) for folder in folders]
    found: dict[str, list[Any]] = {}
    for key in sorted({key for one in each for key in one if not key.startswith("run.")}):
        values = [one.get(key, ABSENT) for one in each]
        parts = key.split(".")
        for length in range(1, len(parts)):
            section = ".".join(parts[:length])
            there = [any(other == section or other.startswith(f"{section}.") for other in one) for one in each]
            if not all(there):
                key, values = section, [SECTION if one else ABSENT for one in there]
                break
        if any(value != values[0] for value in values):
            found[key] = values
    return found
