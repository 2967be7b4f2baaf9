"""The fast part of the chaos suite, as its script plays it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
CELL = re.compile(r"^\| (\w+) \| ([\w ]+) \| (\w+) \| ([\w. ]+) \| ([\w. ]+) \| ([\w ]+) \|$")


def play(*options: str, limit: float) -> dict[tuple[str, str], list[str]]:
    script = [sys.executable, str(ROOT / "benchmarks/chaos.py"), *options]
    played = subprocess.run(script, capture_output=True, text=True, timeout=limit)
    assert played.returncode == 0, played.stdout + played.stderr[-3000:]
    cells = [match.groups() for line in played.stdout.splitlines() if (match := CELL.match(line))]
    return {(component, fault): rest for component, fault, *rest in cells}


@pytest.mark.full
@pytest.mark.timeout(400)
def test_each_prompt_gets_one_group_under_any_fault():
    cells = play("--fast", limit=380)
    assert len(cells) == 6
    for (component, fault), (saw, lost, again, once) in cells.items():
        assert once == "40 of 40", (component, fault)
        raised = fault == "exception in an endpoint"
        assert saw == ("ValueError" if raised else "answer"), (component, fault)
        assert (lost == "lived on") == (again == "lived on") == raised, (component, fault)
