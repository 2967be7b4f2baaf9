"""The 155 rows of the torchforge documents: run the tests that show them, and print what each row is here.

    python scripts/run_documents.py

A row works as printed, has another form that says what to type, is missing, or was only read.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from make_compatibility import SAME, sections  # noqa: E402

WORKS = re.compile(r"works|as printed|there|accepted|loads as printed|the same")  # with what else is to be known of it


def run_tests(names: set[str]) -> set[str]:
    """Run the tests; return the names of those that failed, without their parameters."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-n", "2", f"--junitxml={report}", *sorted(names)]
        subprocess.run(command, cwd=ROOT, check=False)
        cases = [*ElementTree.parse(report).iter("testcase")]
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {
        f"{(case.get('classname') or '').replace('.', '/')}.py::{case.get('name')}".partition("[")[0] for case in failed
    }


def main() -> int:
    """Print the counts; return 1 if a row's test failed, or a row of the 155 is in no table."""
    rows = [row for section in sections() for row in section["rows"] if "numbers" in row]
    failed = run_tests({test for row in rows for test in row.get("shown", ())})
    found: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        is_same = SAME.match(row["here"]) or WORKS.match(row["here"])
        status = "works as printed" if is_same else "has another form, which says what to type"
        status = status if row.get("shown") else "is missing" if row["here"].startswith("none:") else "was read only"
        status = "FAILED" if failed & {*row.get("shown", ())} else status
        for part in str(row["numbers"]).split(","):
            first, _, last = part.strip().partition("-")
            found[status] |= {*range(int(first), int(last or first) + 1)}

    for status, numbers in sorted(found.items()):
        print(f"{len(numbers):4} {status}: {', '.join(map(str, sorted(numbers)))}")
    absent = {*range(1, 156)} - set().union(*found.values())
    print(f"of {155 - len(absent)} of 155 rows; without a row: {sorted(absent)}" if absent else "of 155 rows")
    return int(bool(absent or found.get("FAILED")))


if __name__ == "__main__":
    sys.exit(main())
