"""Time by process and phase as a trace that ui.perfetto.dev opens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .metrics import Span


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    """Write spans in the Trace Event Format (microseconds, complete events), one track a process."""
    zero = min((span.start for span in spans), default=0.0)
    events: list[dict] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for pid, name in sorted({(span.pid, span.process) for span in spans})
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": span.pid,
            "tid": 0,
            "ts": round((span.start - zero) * 1e6),
            "dur": round(span.duration * 1e6),
        }
        for span in spans
    ]
    path.write_text(json.dumps({"traceEvents": events}))
