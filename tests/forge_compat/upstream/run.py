"""Runs the test files of a suite, each in a process, and reports every test."""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from .suites import Suite

ROOT = Path(__file__).parents[3]
LIMIT = 900.0  # seconds of one file


class Outcome(NamedTuple):
    """What became of a test.

    status: passed, failed or skipped.
    message: the last line of its error, or why it was skipped.
    """

    file: str
    test: str
    status: str
    message: str

    @property
    def name(self) -> str:
        """The file and the test."""
        return f"{self.file}::{self.test}"


def obstacle(suite: Suite) -> str:
    """Why a suite cannot be run here; empty if it can."""
    if not suite.source:
        return f"{suite.variable} names no checkout of {suite.name}"
    absent = [name for name in ("pytest_asyncio", "pytest_unordered") if find_spec(name) is None]
    return f"its tests need {' and '.join(absent)}: pip install pytest-asyncio pytest-unordered" if absent else ""


def outcomes(suite: Suite, file: str) -> Iterator[Outcome]:
    """Run one file of a suite. FileNotFoundError: the checkout does not have it."""
    with tempfile.TemporaryDirectory(prefix="forge-upstream-") as scratch:
        folder = Path(scratch)
        suite.write(folder)
        (folder / "pytest.ini").write_text("[pytest]\n")
        yield from run_file(suite, folder, file)


def run_file(suite: Suite, folder: Path, file: str) -> Iterator[Outcome]:
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    words = ["-q", "-p", "no:cacheprovider", "-n", "0", "--import-mode=importlib", f"--rootdir={folder}"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *words,
        f"--junitxml={report}",
        str(folder / file.replace("tests/", f"{suite.name}_tests/", 1)),
    ]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | suite.environment | {"PYTHONPATH": path}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    if not report.exists():
        yield Outcome(file, "", "failed", (ended.stdout + ended.stderr).strip().splitlines()[-1])
        return
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        status = "passed" if problem is None else "skipped" if problem.tag == "skipped" else "failed"
        yield Outcome(file, case.get("name") or "", status, "" if problem is None else message(problem))


def message(problem: ElementTree.Element) -> str:
    """One line of an error: the last line of the traceback where the file itself raises."""
    summary = (problem.get("message") or "").strip()
    lines = [line for line in (problem.text or "").splitlines() if line.startswith("E ")]
    if summary == "collection failure" and lines:
        return lines[-1].removeprefix("E ").strip()
    return summary.partition("\n")[0]
