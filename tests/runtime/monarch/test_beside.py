"""Plain Monarch alongside forge's services in one process: programs of our own, and Monarch's public examples.

The examples are read from a checkout of github.com/meta-pytorch/monarch, which FORGE_MONARCH_SOURCE names.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

PLAIN = Path(__file__).with_name("plain.py")
SOURCE = os.environ.get("FORGE_MONARCH_SOURCE", "")
# Where it needs no GPU and no network, by what it prints once it has worked.
EXAMPLES = {
    "ping_pong": "Example completed successfully!",
    "getting_started": "inferred with",
    "grpo_yield": "[controller] training complete at step 20",
}


def run_program(words: list[str], limit: float) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def source_of(path: str) -> str:
    """Return a file of the checkout, which may be a bare repository."""
    words = ["git", "-C", SOURCE, "show", f"HEAD:{path}"]
    listing = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False) if SOURCE else None
    if listing is None or listing.returncode:
        pytest.skip("FORGE_MONARCH_SOURCE names no checkout of github.com/meta-pytorch/monarch")
    return listing.stdout


@pytest.mark.full
def test_monarch_actors_run_next_to_forge_service():
    assert run_program([str(PLAIN)], 150) == "PLAYED\n"
    assert run_program(["-m", "tests.runtime.monarch.beside", str(PLAIN)], 150) == "PLAYED\nSERVED True True\n"


def test_monarch_readme_code_runs_next_to_forge_service(tmp_path: Path):
    text = source_of("README.md")
    block = next(part for part in text.split("```python\n")[1:] if "spawn_procs" in part).partition("```")[0]
    (tmp_path / "readme.py").write_text(block)
    printed = run_program(["-m", "tests.runtime.monarch.beside", str(tmp_path / "readme.py")], 150)
    assert "SERVED True True" in printed.splitlines()


@pytest.mark.full
@pytest.mark.parametrize("name", EXAMPLES)
def test_monarch_example_programs_run_next_to_forge_service(name: str, tmp_path: Path):
    program = tmp_path / f"{name}.py"
    program.write_text(source_of(f"docs/source/examples/{name}.py"))
    printed = run_program(["-m", "tests.runtime.monarch.beside", str(program)], 280)
    assert EXAMPLES[name] in printed
    assert "SERVED True True" in printed.splitlines()
