"""The trace of a run: the activity of each process over time, in the Trace Event Format of ui.perfetto.dev.

`trace.json` is a JSON array with one event a line. Events are appended at each step: after a kill the closing bracket
is missing, which that format allows.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..system.files import room_for, write_atomic
from .lines import Row
from .metrics import Snapshot

# In Chrome's format, which Perfetto shows too.
TRACE = "trace.json"
STEP_METRICS = ("reward", "policy_age", "policy_age/max", "buffer/size")  # of the mark of a step


class Trace:
    """Appends to a trace; an earlier start's is continued."""

    def __init__(self, path: Path) -> None:
        lines = [line for line, _ in read_events(path)] if path.exists() else []
        write_atomic(path, "[\n" + "".join(f"{',' if i else ''}{line}\n" for i, line in enumerate(lines)))
        self._file = path.open("a", encoding="utf-8")
        self._first = not lines
        self._named: set[int] = set()  # processes whose name was written

    def write(self, snapshot: Snapshot, step: int, row: dict[str, float]) -> None:
        """Append spans, CPU and memory of all processes since the last step, and marks for it and for restarts."""
        new_events: list[Row] = []
        spans = {(span.pid, span.process) for span in snapshot.spans}
        processes = spans | {(use.pid, use.process) for use in snapshot.usage}

        # A process has its name before its first span.
        for pid, name in sorted(processes):
            if pid not in self._named:
                self._named.add(pid)
                new_events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})

        # Kinds of events in Chrome's format: X is a span, C a counter, i a mark, M a name.
        for span in snapshot.spans:
            timing = {"pid": span.pid, "tid": 0, "ts": round(span.start * 1e6), "dur": round(span.duration * 1e6)}
            new_events.append({"ph": "X", "name": span.name, **timing})

        for use in snapshot.usage:
            timing = {"pid": use.pid, "ts": round(use.time * 1e6)}
            new_events.append({"ph": "C", "name": "cores", **timing, "args": {"cores": round(use.cores, 3)}})
            new_events.append({"ph": "C", "name": "memory_mb", **timing, "args": {"MB": round(use.memory / 1e6, 1)}})

        mark = {"ph": "i", "s": "g", "pid": os.getpid(), "tid": 0, "ts": round(time.time() * 1e6)}
        for name in row:
            if name.startswith("restarts/"):
                new_events.append({**mark, "name": f"restart of {name.removeprefix('restarts/')}"})
        numbers = {name: round(row[name], 4) for name in STEP_METRICS if name in row}
        new_events.append({**mark, "name": f"step {step}", "args": {"step": step, **numbers}})
        lines = [json.dumps(event) for event in new_events]

        # Every event but the first of the file follows a comma, so that the file is a list whenever a bracket is added.
        self._append_text("".join(f"{'' if self._first and not i else ','}{line}\n" for i, line in enumerate(lines)))
        self._first = False

    def close(self) -> None:
        """End the JSON list, and close the file."""
        try:
            self._append_text("]\n")
        finally:
            with suppress(OSError):  # a full disk, which writing has raised
                self._file.close()

    def _append_text(self, text: str) -> None:
        with room_for(Path(self._file.name), len(text.encode())):
            self._file.write(text)
            self._file.flush()


def read_events(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield the complete lines of a trace and their events."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            line = line.strip().removeprefix(",")
            if line.startswith("{"):
                try:
                    yield line, json.loads(line)
                except ValueError:  # the process was killed within this line
                    continue
