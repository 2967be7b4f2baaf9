"""Shells without a working folder or standard files."""

import subprocess
import sys
from pathlib import Path

import pytest

STANDARD = """
import os, sys
from forge.system.files import fill_standard_files

fill_standard_files()
print("lost")
print("lost", file=sys.stderr)
assert sys.stdin.read() == ""
with open(sys.argv[1], "w") as file:
    file.write(f"{file.fileno()} {os.get_inheritable(0)} {[os.readlink(f'/proc/self/fd/{n}') for n in range(3)]}")
"""


def shell(script: str, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["sh", "-c", script, "sh", *words], input="", capture_output=True, text=True, timeout=60)


@pytest.mark.processes
def test_removed_working_directory_raises_one_line_error(tmp_path: Path):
    words = [sys.executable, "-m", "forge", "runs", str(tmp_path)]
    done = shell(f'mkdir {tmp_path}/x; cd {tmp_path}/x; rmdir {tmp_path}/x; exec "$@"', *words)
    assert (done.returncode, done.stderr) == (
        1,
        "error: the working directory was removed: change to another directory\n",
    )


@pytest.mark.processes
@pytest.mark.parametrize("closed", ["<&-", "1>&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_redirected_to_dev_null(closed: str, tmp_path: Path):
    done = shell(f'exec "$@" {closed}', sys.executable, "-c", STANDARD, str(tmp_path / "said"))
    assert done.returncode == 0, done.stderr
    number, inheritable, files = (tmp_path / "said").read_text().split(" ", 2)
    assert (int(number) > 2, inheritable) == (True, "True")
    assert files.count("/dev/null") == closed.count("&-")
