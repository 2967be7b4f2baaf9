"""Write the table of docs/start/from_torchforge.md from docs/compatibility.yaml.

python docs/make_compatibility.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

PAGE = Path(__file__).parent / "start/from_torchforge.md"
ROWS = Path(__file__).with_name("compatibility.yaml")
BEGIN, END = "<!-- made by make_compatibility.py -->\n", "<!-- end of the table -->\n"

TITLES = ("Names", "Installation, commands and files", "Configuration", "Code")
# Rows that ask nothing of somebody who has a program of torchforge's.
SAME = re.compile(
    r"(as printed|as described|works|there)$|the same for|BSD |none: |YAML files|`make quickstart`|between hosts"
    r"|runs with|each rank|processes, replicas|several turns|optional engines|the package's own|without the driver"
)


def sections() -> list[dict[str, Any]]:
    """The tables: each has a `title` and `rows`."""
    return yaml.safe_load(ROWS.read_text())


def page(text: str) -> str:
    """The page with its table as it has to be: the rows of `TITLES` that say more than that the document holds."""
    lines = ["", "| torchforge | here |", "|---|---|"]
    for section in sections():
        rows = [row for row in section["rows"] if section["title"] in TITLES and not SAME.match(row["here"])]
        lines += [f"| {row['document']} | {row['here']} |" for row in rows]
    head, _, rest = text.partition(BEGIN)
    return "\n".join([head + BEGIN.rstrip(), *lines, "", END]) + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
