"""Every public name of torchforge's package and what it is here, as docs/torchforge_names.tsv:

    python scripts/describe_names.py CHECKOUT

`works`: it is there, a class with all public methods; `differs`: a class without some; `raises`: an error that says
what replaces it.
"""

from __future__ import annotations

import ast
import csv
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from forge_compat import actors

TABLE = Path(__file__).resolve().parents[1] / "docs/torchforge_names.tsv"
# Methods of services and endpoints that are found by name, and losses, which are called.
VERBS = {point.name for point in entry_points(group="forge.verbs")}
LOSSES = ("ReinforceLoss", "SimpleGRPOLoss")
COLUMNS = ("module", "name", "methods", "status", "here")


def public_names(module: str, text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (module, name, methods) of the classes, functions, constants and re-exports in a module's source."""
    for node in ast.parse(text).body:
        names, methods = list[str](), list[str]()
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
            methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.ImportFrom) and module.endswith(".__init__"):
            names = [alias.asname or alias.name for alias in node.names]
        public = [name for name in names if not name.startswith("_") and name != "logger" and len(name) > 1]
        called = " ".join(method for method in methods if isinstance(node, ast.ClassDef) and method[0] != "_")
        yield from ((module.removesuffix(".__init__"), name, called) for name in public)


def status_of(module: str, name: str, methods: str) -> tuple[str, str]:
    """What `from module import name` gives here, and what is said of it."""
    try:
        found = getattr(__import__(module, fromlist=[name]), name)
    except ImportError as error:
        return "raises", str(error).partition("replaces by: ")[2].rpartition(" (docs/")[0] or str(error)
    except AttributeError:
        return "absent", ""
    called = {method for method in methods.split() if not hasattr(found, method)} - {
        *VERBS,
        "forward" * (name in LOSSES),
    }
    forms = [getattr(actors, name, None)] * bool(called)
    if called and all(hasattr(form, method) for form in forms for method in called):
        return "works", "with torchforge's arguments"
    return ("differs", f"without {', '.join(sorted(called))}") if called else ("works", "")


def rows_of_checkout(checkout: Path) -> list[tuple[str, ...]]:
    """The rows of the table, of a checkout of torchforge, which may be bare."""

    def run_git(*words: str) -> str:
        return subprocess.run(["git", "-C", checkout, *words], capture_output=True, text=True, check=True).stdout

    rows = []
    for path in sorted(run_git("ls-tree", "-r", "--name-only", "HEAD", "src/forge").split()):
        if path.endswith(".py"):
            module = path.removeprefix("src/").removesuffix(".py").replace("/", ".")
            rows += [(*row, *status_of(*row)) for row in public_names(module, run_git("show", f"HEAD:{path}"))]
    return rows


def read_table() -> list[dict[str, str]]:
    """The rows of the table as it is in the documentation."""
    with TABLE.open() as opened:
        return list(csv.DictReader(opened, delimiter="\t"))


if __name__ == "__main__":
    with TABLE.open("w") as written:
        writer = csv.writer(written, delimiter="\t", lineterminator="\n")
        writer.writerows([COLUMNS, *rows_of_checkout(Path(sys.argv[1]))])
