"""A run as one HTML file: the page of `forge watch` with its scripts, its styles and the data of the run."""

import html
import json
import re
from pathlib import Path

from forge.observability.console import log
from forge.system.files import write_atomic

from .views import Fields, RunView, to_json_value

# The page is the one of `forge watch`.
PAGE = Path(__file__).with_name("page")
# In the order of their imports.
SCRIPTS = (
    *("metrics.js", "parts.js", "data.js", "overview.js", "time.js", "rollouts.js", "rollout.js", "held_out.js"),
    "main.js",
)
STYLES = ("uPlot.min.css", "style.css")
# Not a module, unlike the other scripts.
CHARTS = "uPlot.iife.min.js"
# Limits of a report, which stays below about 20 MB and opens in a second.
MAX_ROWS = 1000
MAX_EVENTS = 20_000
MAX_ROLLOUTS = 60
MAX_LENGTH = 20_000  # tokens of a rollout and characters of a text
# The page may load no other file.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def report_ended_run(folder: Path, state: str) -> None:
    """Write the report of a run that ends, and log where it is."""
    write_report(folder, state)
    log.info("view the run: forge watch %s, or %s", folder.parent, folder / "report.html")


def write_report(folder: Path, state: str | None = None) -> None:
    """Write report.html from the files of a run.

    Args:
        state: of the run, if the caller still holds its lock; None to read it from the folder.
    """
    view = RunView(folder)
    # The answers of the first and of the last evaluation of each set.
    pages = []
    for name in view.answers.page({})["sets"]:
        steps = view.answers.page({"set": name})["steps"]
        pages += [view.answers.page({"set": name, "step": str(step)}) for step in dict.fromkeys([steps[0], steps[-1]])]
    data = {
        "name": folder.name,
        "about": view.about() | ({} if state is None else {"state": state}),
        "curves": view.curves(max_rows=MAX_ROWS),
        "lanes": view.lanes(max_events=MAX_EVENTS),
        "rollouts": _sample_rollouts(view),
        "held_out": pages,
    }

    # One file without requests: it can be sent, and opened without a server.
    scripts = "\n".join((PAGE / name).read_text() for name in SCRIPTS)
    # Without imports and exports, as all scripts are joined into one.
    scripts = re.sub(r"^import .*\n|^export (?=(?:async )?(?:function|const|let) )", "", scripts, flags=re.MULTILINE)
    styles = "\n".join((PAGE / name).read_text() for name in STYLES)
    page = (PAGE / "index.html").read_text()
    body = page[page.index("<body>") : page.index("</body>")]

    # "<" is written as an escape: no text of a rollout can end the element.
    inlined = json.dumps(to_json_value(data), separators=(",", ":")).replace("<", "\\u003c")
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


def _sample_rollouts(view: RunView) -> list[Fields]:
    """Return up to `MAX_ROLLOUTS` rollouts: whole groups, at even distances in the run."""
    count = view.rollouts({"page": "0"})["all"]
    rows: dict[int, Fields] = {}
    for start in range(0, count, max(1, count // 12)):
        group = view.group(start)
        if len(rows) + len(group) > MAX_ROLLOUTS and rows:
            break
        rows |= {
            row["row"]: {k: v[:MAX_LENGTH] if isinstance(v, str | list) else v for k, v in row.items()} for row in group
        }
    return [rows[number] for number in sorted(rows)]
