"""Count Python statements by room, and compare them with the budgets.

python scripts/measure_size.py          # the table
python scripts/measure_size.py --check  # exit code 1 beyond a budget, or for a file of src of more than 400 lines

Statements, by `ast`, and not lines: a long line wins nothing.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_LINES = 400
BUDGETS = {"src/forge": 19_000, "src/forge_tinker": 1_500, "src": 38_946, "tests": 26_000, "benchmarks": 4_000}


def count_statements(path: Path) -> int:
    """Return the number of statements of a file, nested ones included."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(path.read_text())))


def measure_rooms() -> tuple[Counter[str], list[str]]:
    """Return the statements of each room and of all above it, and the files of too many lines."""
    sizes: Counter[str] = Counter()
    long_files = []
    for top in ("src", "tests", "benchmarks"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            count = count_statements(path)
            for depth in range(1, min(len(parts), 4 if parts[1] == "forge" else 3)):
                sizes["/".join(parts[:depth])] += count
            name, lines = "/".join(parts), len(path.read_text().splitlines())
            if top == "src" and lines > MAX_LINES:
                long_files.append(f"{name} has {lines} lines, at most {MAX_LINES}: split it")
    return sizes, long_files


def main() -> None:
    """Print the table; with --check fail beyond a budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail beyond a budget")
    is_check = parser.parse_args().check
    sizes, problems = measure_rooms()
    for room in sorted(sizes):
        budget = BUDGETS.get(room)
        if budget is not None or not is_check:
            print(f"{room:24} {sizes[room]:7,}" + (f" of {budget:,}" if budget else ""))
    problems += [
        f"{room} has {sizes[room]:,} statements, {sizes[room] - budget:,} beyond its budget"
        for room, budget in BUDGETS.items()
        if sizes[room] > budget
    ]
    print("\n".join(problems))
    if is_check and problems:
        sys.exit(1)


if __name__ == "__main__":
    main()
