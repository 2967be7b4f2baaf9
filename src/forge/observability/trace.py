"""The trace of a run: what each process did when, in the Trace Event Format, which ui.perfetto.dev opens.

`trace.json` is a JSON array with one event a line. Events are appended at each step: after a kill the closing bracket
is missing, which that format allows.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..system.files import room_for, write_atomic
from .metrics import Snapshot

TRACE = "trace.json"
SHOWN = ("reward", "policy_age", "policy_age/max", "buffer/size")  # of a step, beside its mark


class Trace:
    """Appends to a trace; one of an earlier start is continued."""

    def __init__(self, path: Path) -> None:
        kept = [line for line, _ in events(path)] if path.exists() else []
        write_atomic(path, "[\n" + "".join(f"{',' if i else ''}{line}\n" for i, line in enumerate(kept)))
        self._file = path.open("a", encoding="utf-8")
        self._first, self._named = not kept, set[int]()

    def write(self, snapshot: Snapshot, step: int, row: dict[str, float]) -> None:
        """Append spans, CPU and memory of all processes since the last step, and marks for it and for restarts."""
        found: list[dict[str, Any]] = []
        seen = {(span.pid, span.process) for span in snapshot.spans} | {
            (use.pid, use.process) for use in snapshot.usage
        }
        for pid, name in sorted(seen):
            if pid not in self._named:
                self._named.add(pid)
                found.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for span in snapshot.spans:
            at = {"pid": span.pid, "tid": 0, "ts": round(span.start * 1e6), "dur": round(span.duration * 1e6)}
            found.append({"ph": "X", "name": span.name, **at})
        for use in snapshot.usage:
            at = {"pid": use.pid, "ts": round(use.time * 1e6)}
            found.append({"ph": "C", "name": "cores", **at, "args": {"cores": round(use.cores, 3)}})
            found.append({"ph": "C", "name": "memory_mb", **at, "args": {"MB": round(use.memory / 1e6, 1)}})
        mark = {"ph": "i", "s": "g", "pid": os.getpid(), "tid": 0, "ts": round(time.time() * 1e6)}
        for name in row:
            if name.startswith("restarts/"):
                found.append({**mark, "name": f"restart of {name.removeprefix('restarts/')}"})
        numbers = {name: round(row[name], 4) for name in SHOWN if name in row}
        found.append({**mark, "name": f"step {step}", "args": {"step": step, **numbers}})
        lines = [json.dumps(event) for event in found]
        self._append("".join(f"{'' if self._first and not i else ','}{line}\n" for i, line in enumerate(lines)))
        self._first = False

    def close(self) -> None:
        """End the JSON list, and close the file."""
        try:
            self._append("]\n")
        finally:
            with suppress(OSError):  # a full disk, which writing has raised
                self._file.close()

    def _append(self, text: str) -> None:
        with room_for(Path(self._file.name), len(text.encode())):
            self._file.write(text)
            self._file.flush()


def events(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The whole lines of a trace and the events in them."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            line = line.strip().removeprefix(",")
            if line.startswith("{"):
                try:
                    yield line, json.loads(line)
                except ValueError:  # killed within it
                    continue
