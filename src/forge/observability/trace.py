"""The trace of a run: the activity of each process over time, in the Trace Event Format of ui.perfetto.dev.

`trace.json` is a JSON array with one event a line. Events are appended at each step. If the process is killed, the
closing bracket is missing, which that format allows.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from ..system.files import room_for, write_atomic
from .lines import Row, appended_lines, parse_line
from .metrics import Snapshot

TRACE = "trace.json"
STEP_METRICS = ("reward", "policy_age", "policy_age/max", "buffer/size")  # shown at the mark of a step


class Trace:
    """Writer of a run's trace file, which appends to the events of an earlier start of the run.

    Args:
        path: of the file; its damaged lines and its closing bracket are removed.
    """

    def __init__(self, path: Path) -> None:
        events = [json.dumps(row) for _, line in appended_lines(path) if (row := parse_line(line)) is not None]
        write_atomic(path, "[\n" + "\n,".join(events) + ("\n" if events else ""))
        self._file = path.open("a", encoding="utf-8")
        self._is_empty = not events
        self._named: set[int] = set()  # processes whose name was written

    def write(self, snapshot: Snapshot, step: int, row: dict[str, float]) -> None:
        """Append the events since the last step: spans, CPU and memory of all processes, and marks of the step and of
        restarts.

        Args:
            snapshot: what the processes have recorded since the last step.
            row: the metrics of the step.
        """
        new_events: list[Row] = []

        # The event with a process's name comes before its first span.
        processes = {(span.pid, span.process) for span in snapshot.spans}
        for pid, name in sorted(processes | {(use.pid, use.process) for use in snapshot.usage}):
            if pid not in self._named:
                self._named.add(pid)
                new_events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})

        # Kinds of events in Chrome's format: X is a span, C a counter, i a mark, M a name.
        for span in snapshot.spans:
            timing = {"pid": span.pid, "tid": 0, "ts": round(span.start * 1e6), "dur": round(span.duration * 1e6)}
            new_events.append({"ph": "X", "name": span.name, **timing})

        for use in snapshot.usage:
            counter = {"ph": "C", "pid": use.pid, "ts": round(use.time * 1e6)}
            new_events += [
                {**counter, "name": "cores", "args": {"cores": round(use.cores, 3)}},
                {**counter, "name": "memory_mb", "args": {"MB": round(use.memory / 1e6, 1)}},
            ]

        # Marks of the step, and of the components that were restarted in it.
        mark = {"ph": "i", "s": "g", "pid": os.getpid(), "tid": 0, "ts": round(time.time() * 1e6)}
        restarted = [name.removeprefix("restarts/") for name in row if name.startswith("restarts/")]
        new_events += [{**mark, "name": f"restart of {name}"} for name in restarted]
        metrics = {name: round(row[name], 4) for name in STEP_METRICS if name in row}
        new_events.append({**mark, "name": f"step {step}", "args": {"step": step, **metrics}})

        # A comma precedes every event except the first of the file, so that adding a bracket makes the file a list.
        text = ",".join(f"{json.dumps(event)}\n" for event in new_events)
        self._append_text(text if self._is_empty else f",{text}")
        self._is_empty = False

    def close(self) -> None:
        """Write the closing bracket, and close the file."""
        try:
            self._append_text("]\n")
        finally:
            with suppress(OSError):  # of a full disk, which writing has raised already
                self._file.close()

    def _append_text(self, text: str) -> None:
        with room_for(Path(self._file.name), len(text.encode())):
            self._file.write(text)
            self._file.flush()
