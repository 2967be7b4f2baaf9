"""Writes what `forge watch` says of each metric, from the tables of docs/reference.md.

python scripts/describe_metrics.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "docs/reference.md"
SCRIPT = ROOT / "src/forge_inspect/watch/page/metrics.js"
HEAD = "// Names of metrics and what they mean: made from docs/reference.md by scripts/describe_metrics.py."


def descriptions(page: str) -> dict[str, str]:
    """The meaning of each name in the tables of metrics, as plain text. Names of one row share it."""
    meanings: dict[str, str] = {}
    for cell, meaning in re.findall(r"^\| (`.*?) \| (.*) \|$", page.partition("\n## Metrics\n")[2], re.MULTILINE):
        text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", f"{cell}: {meaning}").replace("`", "")
        meanings |= dict.fromkeys(re.findall(r"`([^`]+)`", cell), text)
    return meanings


def script(page: str) -> str:
    """The script of the page that exports the descriptions."""
    lines = [f"  {json.dumps(name)}: {json.dumps(text)}," for name, text in descriptions(page).items()]
    return "\n".join([HEAD, "export const METRICS = {", *lines, "};", ""])


if __name__ == "__main__":
    SCRIPT.write_text(script(TABLES.read_text()))
