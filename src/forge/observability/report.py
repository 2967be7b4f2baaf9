"""The report of a run (curves, numbers and rollouts as HTML) and its trace of time by process."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path

from ..files import write_atomic
from .metrics import Span

MOST_ROLLOUTS = 12
# Panels of the figure: title, and the metrics drawn in it.
PANELS: list[tuple[str, list[str]]] = [
    ("reward and accuracy", ["reward", "accuracy", "eval/accuracy"]),
    ("loss", ["train/loss"]),
    ("entropy (nats)", ["train/entropy"]),
    ("largest |ratio - 1|, clip fraction", ["train/ratio_max_deviation", "train/clip_fraction"]),
    ("KL to the reference (nats)", ["train/kl"]),
    ("gradient norm", ["train/grad_norm"]),
    ("policy age (versions)", ["policy_age", "policy_age/max"]),
    ("groups without signal", ["groups_without_signal"]),
    ("completion length, share truncated", ["generation/completion_length", "generation/truncated"]),
    ("tokens a second", ["generation/tokens_per_second", "train/tokens_per_second"]),
]


def write_report(folder: Path, history: Sequence[dict[str, float]]) -> None:
    """Write curves.png and report.html from the rows of metrics.jsonl."""
    _draw(folder / "curves.png", history)
    picture = base64.b64encode((folder / "curves.png").read_bytes()).decode()
    totals: dict[str, float] = {}
    for name, value in (item for row in history for item in row.items() if item[0].startswith("seconds/")):
        totals[name[8:]] = totals.get(name[8:], 0.0) + value
    phases = [(name, f"{total:.1f}") for name, total in sorted(totals.items(), key=lambda item: -item[1])]
    rollouts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    shown = rollouts[:: max(1, len(rollouts) // MOST_ROLLOUTS)][:MOST_ROLLOUTS]
    fields = sorted({name for row in shown for name in row}, key=lambda name: (name != "step", name))
    page = f"""<!doctype html><meta charset="utf-8"><title>{html.escape(folder.name)}</title>
<style>body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }}
table {{ border-collapse: collapse }} td, th {{ padding: .2em .8em; text-align: left; border-bottom: 1px solid #ddd }}
img {{ width: 100% }} pre {{ background: #f6f6f6; padding: 1em; overflow: auto }}</style>
<h1>{html.escape(folder.name)}</h1>
<img alt="curves" src="data:image/png;base64,{picture}">
<h2>Time by phase</h2>{_table(("phase", "seconds in all"), phases)}
<h2>Last step</h2>{_table(("metric", "value"), [(k, f"{v:.6g}") for k, v in sorted(history[-1].items())])}
<h2>Rollouts</h2>{_table(fields, [[str(row.get(name, "")) for name in fields] for row in shown])}
<h2>Configuration</h2><pre>{html.escape((folder / "config.yaml").read_text())}</pre>
"""
    write_atomic(folder / "report.html", page)


def _draw(path: Path, history: Sequence[dict[str, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [(title, [m for m in metrics if any(m in row for row in history)]) for title, metrics in PANELS]
    panels = [(title, metrics) for title, metrics in panels if metrics]
    columns = min(3, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.2 * columns, 2.8 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (title, metrics) in zip(axes.flat, panels, strict=False):
        for metric in metrics:
            points = [(row["step"], row[metric]) for row in history if metric in row]
            marker = "o" if metric.startswith("eval") else None
            axis.plot(*zip(*points, strict=True), label=metric, marker=marker, markersize=3, linewidth=1.2)
        axis.set_title(title, fontsize=10)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        if len(metrics) > 1:
            axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line("th", head) + "".join(line("td", row) for row in rows) + "</table>"


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    """Write spans in the Trace Event Format for ui.perfetto.dev (microseconds), one track per process."""
    zero = min((span.start for span in spans), default=0.0)
    processes = sorted({(span.pid, span.process) for span in spans})
    events: list[dict] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in processes
    ]
    for span in spans:
        times = {"ts": round((span.start - zero) * 1e6), "dur": round(span.duration * 1e6)}
        events.append({"ph": "X", "name": span.name, "pid": span.pid, "tid": 0, **times})
    write_atomic(path, json.dumps({"traceEvents": events}))
