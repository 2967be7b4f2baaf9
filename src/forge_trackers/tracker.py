"""The interface of a tracker, and the run that it tracks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from forge.observability.lines import Row


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
    """A tracker is constructed with its section of the configuration. It gets every row whose step is at least `first`,
    with the rollouts of that step, and is closed once. Each of these may raise, and is then retried."""

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
