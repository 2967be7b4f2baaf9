"""Write the tables of docs/compatibility.md from docs/compatibility.yaml.

python docs/make_compatibility.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

PAGE = Path(__file__).with_name("compatibility.md")
ROWS = PAGE.with_suffix(".yaml")
BEGIN, END = "<!-- made by make_compatibility.py -->\n", "<!-- end of the tables -->\n"


def sections() -> list[dict[str, Any]]:
    """The tables: each has a `title` and `rows`."""
    return yaml.safe_load(ROWS.read_text())


def evidence(row: dict[str, Any]) -> str:
    """The names of a row's tests, and what was not run."""
    parts = [f"`{test.rpartition('::')[2]}`" for test in row.get("shown", ())]
    return "<br>".join(parts + ([f"not run: {row['not run']}"] if "not run" in row else []))


def page(text: str) -> str:
    """The page with its tables as they have to be."""
    lines = []
    for section in sections():
        numbered = ("rows",) * any("numbers" in row for row in section["rows"])
        names = (*numbered, "document", "here", "shown by")
        lines += ["", f"## {section['title']}", "", f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
        for row in section["rows"]:
            cells = [*(str(row["numbers"]) for _ in numbered), row["document"], row["here"], evidence(row)]
            lines.append(f"| {' | '.join(cells)} |")
    head, _, rest = text.partition(BEGIN)
    return "\n".join([head + BEGIN.rstrip(), *lines, "", END]) + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
