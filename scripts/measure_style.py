"""What a reader of the sources feels, as numbers: names that say nothing, `Any`, comments, lengths, entries, circles.

python scripts/measure_style.py             # the table of CONTRIBUTING.md
python scripts/measure_style.py --check     # exit code 1 where a bound is exceeded; part of `make lint`
python scripts/measure_style.py --names     # also the places of names that say nothing
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path for path in (ROOT / "src").glob("forge*") if path.is_dir())

# fmt: off
# Words that name a role in a sentence, and not what a variable holds.
GENERIC = {
    "found", "own", "there", "place", "how", "of", "each", "both", "one", "given", "known", "chosen", "what", "made",
    "asked", "answer", "said", "other", "more", "most", "least", "left", "rest", "here", "at", "way", "told",
    "wanted", "mine", "theirs", "whose", "which", "who", "where", "when", "why", "ours", "others", "odd", "such",
    "same", "them", "it", "he", "they", "far", "near", "thing", "things", "stuff", "that", "this", "those", "these",
    "got", "had", "gone", "done", "taken", "kept", "shown", "meant", "named", "called", "held", "whole", "bare",
}
# fmt: on


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Each name that is bound in a module, with its line: assignments, loops, parameters, `as`, in any function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, node.lineno


def is_generic(name: str) -> bool:
    """Whether a name says nothing of its value."""
    return name.strip("_") in GENERIC


def own_comments(text: str) -> tuple[int, int]:
    """Comments that have a line of their own, and lines that have code."""
    comments, code = 0, set()
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            before = token.line[: token.start[1]]
            marker = token.string.startswith(("# type:", "# noqa", "# fmt:"))
            comments += not before.strip() and not marker
        elif token.type not in skipped:
            code.update(range(token.start[0], token.end[0] + 1))
    return comments, len(code)


def docstring_lines(tree: ast.AST) -> int:
    """Lines of the docstrings of a module."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [
        node.body[0] for node in ast.walk(tree) if isinstance(node, owners) and ast.get_docstring(node) is not None
    ]
    return sum((text.end_lineno or 0) - text.lineno + 1 for text in texts)


class Measures:
    """Sums over the files of some packages."""

    def __init__(self, files: list[Path]) -> None:
        self.sums: Counter[str] = Counter()
        self.generic: list[str] = []
        self.classes: dict[str, list[str]] = {}
        for file in files:
            self._add(file)

    def _add(self, file: Path) -> None:
        text = file.read_text()
        tree = ast.parse(text)
        sums = self.sums
        sums["files"] += 1
        sums["lines"] += text.count("\n")
        comments, code = own_comments(text)
        sums["comments"] += comments
        sums["code"] += code - docstring_lines(tree)
        for name, line in bound_names(tree):
            sums["names"] += 1
            if is_generic(name):
                self.generic.append(f"{file.relative_to(ROOT)}:{line}: {name}")
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                sums["functions"] += 1
                sums["function lines"] += (node.end_lineno or 0) - node.lineno + 1
                sums["checks"] += node.name.lstrip("_").startswith("check")
            elif isinstance(node, ast.Name) and node.id == "Any":
                sums["Any"] += 1
            elif isinstance(node, ast.NamedExpr):
                sums["walrus"] += 1
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                sums["tuple assignments"] += isinstance(node.targets[0], ast.Tuple)
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                self.classes.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
            elif isinstance(node, (ast.Import, ast.ImportFrom)) and node.col_offset:
                sums["imports in functions"] += 1

    @property
    def generic_share(self) -> float:
        """Names that say nothing, in percent of all that are bound."""
        return 100 * len(self.generic) / self.sums["names"]

    @property
    def repeated_classes(self) -> dict[str, list[str]]:
        """Public class names that have two meanings, with their files."""
        return {name: files for name, files in sorted(self.classes.items()) if len(files) > 1}

    def per_thousand(self, name: str) -> float:
        """Occurrences per 1,000 source lines."""
        return 1000 * self.sums[name] / self.sums["lines"]

    @property
    def comment_share(self) -> float:
        """Comments on lines of their own, in percent of the lines of code."""
        return 100 * self.sums["comments"] / self.sums["code"]


def imported(file: Path, name: str, modules: Collection[str]) -> set[str]:
    """The modules that a module imports anywhere: at its top, in functions, and for type checkers alone."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    targets: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            inner = {f"{source}.{alias.name}" for alias in node.names}
            targets |= {target if target in modules else source for target in inner}
    return targets & set(modules) - {name}


def circles(root: Path) -> list[list[str]]:
    """Groups of modules that import one another in a circle, by Tarjan (1972)."""
    files = {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for file in sorted(root.rglob("*.py"))
    }
    graph = {name: imported(file, name, files.keys()) for name, file in files.items()}
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for target in graph[module]:
            if target not in order:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], order[target])
        if lowest[module] == order[module]:
            group = stack[stack.index(module) :]
            del stack[-len(group) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for module in graph:
        if module not in order:
            visit(module)
    return groups


def python_files(folders: list[Path]) -> list[Path]:
    """The modules of some packages."""
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def main() -> None:
    """Print the table, and check the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit code 1 where a bound is exceeded")
    parser.add_argument("--names", action="store_true", help="print the places of names that say nothing")
    options = parser.parse_args()
    every, forge = Measures(python_files(PACKAGES)), Measures(python_files(PACKAGES[:1]))
    entries = [path for path in PACKAGES[0].iterdir() if path.name != "__pycache__"]
    # Each with its bound; None where a lower figure is not better in itself.
    rows: list[tuple[str, float, float | None]] = [
        ("names that say nothing, % of bound names", every.generic_share, 1.0),
        ("Any per 1,000 lines", every.per_thousand("Any"), 15.0),
        ("comments on own lines, % of code lines (at least)", every.comment_share, -4.0),
        ("tuple assignments per 1,000 lines", every.per_thousand("tuple assignments"), None),
        ("walrus per 1,000 lines", every.per_thousand("walrus"), None),
        ("imports in functions per 1,000 lines", every.per_thousand("imports in functions"), None),
        ("class names with two meanings", len(every.repeated_classes), None),
        ("functions named check*", every.sums["checks"], None),
        ("lines a function", every.sums["function lines"] / every.sums["functions"], None),
        ("entries of src/forge", len(entries), 19),
        ("circles of imports, type checkers' included", len(circles(ROOT / "src")), 3),
        ("loose files of src/forge", sum(path.is_file() for path in entries), 4),
        ("lines of src/forge", forge.sums["lines"], None),
        ("lines of src", every.sums["lines"], None),
    ]
    exceeded = []
    for name, value, bound in rows:
        limit = "" if bound is None else f"{abs(bound):g}"
        print(f"{name:52} {value:10.2f} {limit:>8}")
        if bound is not None and (value < -bound if bound < 0 else value > bound):
            exceeded.append(name)
    if options.names:
        print(*every.generic, sep="\n")
        for name, files in every.repeated_classes.items():
            print(f"class {name}: {', '.join(files)}")
    if options.check and exceeded:
        sys.exit(f"error: beyond its bound: {', '.join(exceeded)}")


if __name__ == "__main__":
    main()
