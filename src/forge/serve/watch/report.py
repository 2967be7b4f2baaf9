"""A run as one HTML file: the page of `forge watch` with its scripts, its styles and the data of the run in it."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from ...system.files import write_atomic
from .views import RunView, plain

PAGE = Path(__file__).with_name("page")
# In the order in which they use one another.
SCRIPTS = (
    "parts.js",
    "data.js",
    "overview.js",
    "time.js",
    "rollouts.js",
    "rollout.js",
    "held_out.js",
    "chat.js",
    "main.js",
)
STYLES = ("uPlot.min.css", "style.css")
CHARTS = "uPlot.iife.min.js"
MOST_ROWS, MOST_EVENTS, MOST_ROLLOUTS = 1000, 20_000, 60
LONGEST = 20_000  # tokens of a rollout and characters of a text, in a report
# Nothing is fetched.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def write_report(folder: Path, state: str | None = None) -> None:
    """Write report.html from the files of a run.

    Args:
        state: of the run, where its lock is still held by the caller; None: what its folder says.
    """
    view = RunView(folder)
    view.read_all()
    data = {
        "name": folder.name,
        "about": view.about() | ({} if state is None else {"state": state}),
        "curves": view.curves(most=MOST_ROWS),
        "lanes": view.lanes(most=MOST_EVENTS),
        "rollouts": _sample(view),
        "held_out": _held_out(view),
    }
    scripts = "\n".join(_inlined(name) for name in SCRIPTS)
    styles = "\n".join((PAGE / name).read_text() for name in STYLES)
    page = (PAGE / "index.html").read_text()
    body = page[page.index("<body>") : page.index("</body>")]
    # "<" is written as an escape: no text of a rollout ends the element.
    inlined = json.dumps(plain(data), separators=(",", ":")).replace("<", "\\u003c")
    write_atomic(
        folder / "report.html",
        f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width"><title>{html.escape(folder.name)}</title>
<style>{styles}</style></head>
{body}<script type="application/json" id="data">{inlined}</script>
<script>{(PAGE / CHARTS).read_text()}</script>
<script type="module">{scripts}</script></body></html>
""",
    )


def _sample(view: RunView) -> list[dict[str, Any]]:
    """Rollouts from the whole run, those of a group together."""
    found = view.rollouts({"page": "0"})["all"]
    rows: dict[int, dict[str, Any]] = {}
    starts = range(0, found, max(1, found // 12)) if found else ()
    for start in starts:
        group = view.group(start)
        if len(rows) + len(group) > MOST_ROLLOUTS and rows:
            break
        for row in group:
            rows[row["row"]] = {k: v[:LONGEST] if isinstance(v, str | list) else v for k, v in row.items()}
    return [rows[number] for number in sorted(rows)]


def _held_out(view: RunView) -> list[dict[str, Any]]:
    """Answers of the first and of the last evaluation."""
    steps = view.held_out({})["steps"]
    return [view.held_out({"step": str(step)}) for step in dict.fromkeys([*steps[:1], *steps[-1:]])]


def _inlined(name: str) -> str:
    """A script without its imports and exports: all of them become one."""
    text = (PAGE / name).read_text()
    return re.sub(r"^import .*\n|^export (?=(?:async )?(?:function|const|let) )", "", text, flags=re.MULTILINE)
