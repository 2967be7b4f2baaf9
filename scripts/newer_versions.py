"""Which packages have versions beyond what pyproject.toml admits, or the lock of CI holds, and what breaks with one.

    python scripts/newer_versions.py                                  # a table: weekly
    python scripts/newer_versions.py --try 'numpy==2.5.*' --tests tests/data tests/engines
    python scripts/newer_versions.py --lock                           # constraints.txt from this environment

It runs in the environment of `make test`. `--try` installs the version in a folder that comes first for one run of the
tests, so that the environment stays as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "constraints.txt"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
OURS = canonicalize_name("torchforge-rl")


def requirements() -> Iterator[Requirement]:
    """What the package and its extras need, each once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    parsed = {str(Requirement(text)): Requirement(text) for group in groups for text in group}
    yield from (requirement for requirement in parsed.values() if canonicalize_name(requirement.name) != OURS)


def newest(name: str) -> str:
    """The newest version of a package for this Python; empty where the index has none."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    first = re.match(rf"{re.escape(name)} \((\S+)\)", done.stdout)  # a line such as "numpy (2.4.6)"
    return first.group(1) if first else ""


def installed(name: str) -> str:
    """The version in this environment; empty where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def table() -> int:
    """Print a line for each requirement; returns how many exclude the newest version."""
    excluded = 0
    print("| package | admitted | here | newest | |\n|---|---|---|---|---|")
    for requirement in sorted(requirements(), key=lambda requirement: requirement.name.lower()):
        latest = newest(requirement.name)
        here = installed(requirement.name)
        remark = "" if latest else "not in the index"
        if latest and not requirement.specifier.contains(latest):
            remark = f"excluded: --try '{requirement.name}=={latest}'"
            excluded += 1
        elif latest and here and latest != here.partition("+")[0]:
            remark = "newer"
        print(f"| {requirement.name} | {requirement.specifier or 'any'} | {here} | {latest} | {remark} |", flush=True)
    return excluded


def attempt(packages: list[str], tests: list[str]) -> int:
    """Run tests with other versions of packages; returns pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*PIP, "install", "--target", folder, *packages], check=True)
        # torch is one build, and a second copy of it would be loaded beside the first.
        has_torch = (Path(folder) / "torch").exists()
        if has_torch and not any(package.startswith("torch==") for package in packages):
            sys.exit(f"{', '.join(packages)} brings torch along: try it in an environment made for it")
        path = os.pathsep.join([folder, str(ROOT / "src"), str(ROOT)])
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "not full and not slow", *tests]
        return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False).returncode


def write_lock() -> None:
    """Write the versions of this environment. torch is not among them: the Makefile names its build."""
    freeze = [*PIP, "freeze", "--exclude-editable"]
    lines = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout.splitlines()
    LOCK.write_text("".join(f"{line}\n" for line in lines if "==" in line and not line.startswith("torch==")))


def main() -> None:
    """Print the table, try versions, or write the lock."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--try", dest="packages", nargs="+", metavar="PACKAGE==VERSION")
    parser.add_argument("--tests", nargs="+", default=["tests"])
    parser.add_argument("--lock", action="store_true")
    args = parser.parse_args()
    if args.lock:
        write_lock()
    elif args.packages:
        sys.exit(attempt(args.packages, args.tests))
    else:
        print(f"{table()} requirements exclude the newest version")


if __name__ == "__main__":
    main()
