"""Write the tables of what was tested, on what, to docs/benchmarks.md and README.md, from docs/tested.yaml.

python docs/make_tested.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parent
ROWS = DOCS / "tested.yaml"
PAGE, README = DOCS / "benchmarks.md", DOCS.parent / "README.md"
BEGIN, END = "<!-- made by make_tested.py -->\n", "<!-- end of the table -->\n"
COLUMNS = ("what", "cpu", "h100", "gpus", "machines")


def tested() -> dict[str, Any]:
    """The document: `h100`, the days on one; `hardware` and `rows`."""
    return yaml.safe_load(ROWS.read_text())


def tables() -> dict[Path, list[str]]:
    """The lines of each page's table."""
    document = tested()
    head = ["", "CPUs", f"one H100, {document['h100']}", "several GPUs", "several machines", "shown by"]
    rows = [
        [*(row[name] for name in COLUMNS), ", ".join(f"`{path}`" for path in row["shown"])] for row in document["rows"]
    ]
    short = [[row["where"], row["seen"]] for row in document["hardware"]]
    return {
        path: ["| " + " | ".join(row) + " |" for row in [names, ["---"] * len(names), *cells]]
        for path, names, cells in ((PAGE, head, rows), (README, ["hardware", "seen"], short))
    }


def page(path: Path) -> str:
    """The text of a page with its table as it has to be."""
    head, _, rest = path.read_text().partition(BEGIN)
    return "\n".join([head + BEGIN.rstrip(), "", *tables()[path], "", END]) + rest.partition(END)[2]


if __name__ == "__main__":
    for path in (PAGE, README):
        path.write_text(page(path))
