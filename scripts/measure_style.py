"""Measure the text of the sources: names, paragraphs, docstrings, words, test names, import circles.

python scripts/measure_style.py             # the table of CONTRIBUTING.md
python scripts/measure_style.py --check     # exit code 1 where a bound is exceeded; part of `make lint`
python scripts/measure_style.py --list WHAT # the places: names, functions, paragraphs, docstrings, words, tests
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path for path in (ROOT / "src").glob("forge*") if path.is_dir())
LONG_BODY = 20  # lines

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


NOUN_FIRST = re.compile(
    r"(The|An?|Whether|All|Each|Every|One|Both|What|How|Which|Why|Where|When|Number|Its|Some|That|Any)\b"
)
# Phrases of a translation, with what the field writes.
PHRASES = {
    r"(?:that|those) of": "repeat the noun, or 's",
    r"alone": "only",
    r"beside": "alongside, in addition to",
    r"in place of": "instead of",
}
PHRASE = re.compile("|".join(rf"\b(?:{words})\b" for words in PHRASES))
# Names of tests that cannot be understood without the test.
ODD_TEST = re.compile(
    r"^(what|nothing|none|nobody|of|so|who|whoever|it|there|held(?! out))\b"
    r"|\b(told|anew|refus\w+|nobody|likeliest|goes on|gone on|will not do|cannot be$|is wrong|as ever|alone"
    r"|is none|are none|has none|that of|those of|in place of|of (its|their) own|at once)\b"
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# A function that calls one of these is not pure: an example could not show all that it does.
IMPURE = {"open", "print", "record_metric", "route", "call", "fanout", "getLogger", "environ", "monotonic", "time"}


def own_functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions of a module but for those that Python calls by itself, such as `__init__`."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))
    return [node for node in nodes if not node.name.startswith("__")]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> list[str]:
    """Return the lines of a function after its docstring."""
    has_docstring = ast.get_docstring(function) is not None and len(function.body) > 1
    first = function.body[1 if has_docstring else 0]
    return lines[first.lineno - 1 : function.end_lineno]


def is_pure(function: ast.FunctionDef) -> bool:
    """Return whether a function returns a value and seems to have no other effect."""
    nodes = [*ast.walk(function)]
    words = {node.id for node in nodes if isinstance(node, ast.Name)}
    words |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    returns = any(isinstance(node, ast.Return) and node.value is not None for node in nodes)
    return returns and not words & IMPURE and not any(isinstance(node, ast.Yield | ast.Global) for node in nodes)


def prose_of(text: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield docstrings, messages and comments with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value


class Measures:
    """Sums over the files of some packages, and the places of what is counted."""

    def __init__(self, files: list[Path]) -> None:
        self.sums: Counter[str] = Counter()
        self.places: dict[str, list[str]] = {
            name: [] for name in ("names", "functions", "paragraphs", "docstrings", "words")
        }
        for file in files:
            self._add(file)

    def _add(self, file: Path) -> None:
        text = file.read_text()
        tree = ast.parse(text)
        lines = text.splitlines()
        self.sums["lines"] += len(lines)

        for name, line in bound_names(tree):
            self.sums["names"] += 1
            if is_generic(name):
                self._note("names", file, line, name)

        for line, words in prose_of(text, tree):
            self.sums["words"] += len(words.split())
            for match in PHRASE.finditer(words):
                self._note("words", file, line, match.group())

        for node in own_functions(tree):
            self.sums["functions"] += 1
            if "_" not in node.name.strip("_"):
                self._note("functions", file, node.lineno, node.name)
            body = body_lines(node, lines)
            if len(body) >= LONG_BODY:
                self.sums["long bodies"] += 1
                if all(line.strip() for line in body):
                    self._note("paragraphs", file, node.lineno, node.name)
            docstring = ast.get_docstring(node)
            if docstring:
                self.sums["docstrings"] += 1
                if NOUN_FIRST.match(docstring):
                    self._note("docstrings", file, node.lineno, f"{node.name}: {docstring.splitlines()[0]}")

        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and is_pure(node):
                self.sums["pure functions"] += 1
                self.sums["examples"] += ">>>" in (ast.get_docstring(node) or "")
        self.sums["Any"] += sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))

    def _note(self, what: str, file: Path, line: int, text: str) -> None:
        self.places[what].append(f"{file.relative_to(ROOT)}:{line}: {text}")

    def percent(self, what: str, whole: str) -> float:
        """Return how many places of a kind there are, in percent of a sum."""
        return 100 * len(self.places[what]) / self.sums[whole]


def odd_tests() -> list[str]:
    """Return the names of tests that say nothing without the test, and those that two tests have."""
    counts: Counter[str] = Counter()
    odd = []
    for file in python_files([ROOT / "tests"]):
        for node in own_functions(ast.parse(file.read_text())):
            if not node.name.startswith("test_"):
                continue
            counts[node.name] += 1
            if ODD_TEST.search(node.name.removeprefix("test_").replace("_", " ")):
                odd.append(f"{file.relative_to(ROOT)}:{node.lineno}: {node.name}")
    return odd + [f"{count} tests have the name {name}" for name, count in counts.items() if count > 1]


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
    parser.add_argument("--list", metavar="WHAT", help="print the places of one measure")
    options = parser.parse_args()
    every = Measures(python_files(PACKAGES))
    every.places["tests"] = odd_tests()
    if options.list:
        print(*every.places[options.list], sep="\n")
        return

    entries = [path for path in PACKAGES[0].iterdir() if path.name != "__pycache__"]
    paragraphs = 100 - every.percent("paragraphs", "long bodies")
    phrases = 1000 * len(every.places["words"]) / every.sums["words"]
    # Each with its bound; a negative one is a minimum.
    rows: list[tuple[str, float, float]] = [
        ("functions with a one-word name, %", every.percent("functions", "functions"), 40),
        (f"bodies of {LONG_BODY} lines with a blank line, % (at least)", paragraphs, -75),
        ("docstrings of functions that start with a noun, %", every.percent("docstrings", "docstrings"), 10),
        (
            "pure public functions with an example, % (at least)",
            100 * every.sums["examples"] / every.sums["pure functions"],
            -10,
        ),
        ("that of, alone, beside, in place of, per 1,000 words", phrases, 0.5),
        ("odd or repeated names of tests", len(every.places["tests"]), 0),
        ("names that say nothing, % of bound names", every.percent("names", "names"), 1),
        ("Any per 1,000 lines", 1000 * every.sums["Any"] / every.sums["lines"], 15),
        ("entries of src/forge", len(entries), 19),
        ("loose files of src/forge", sum(path.is_file() for path in entries), 4),
        ("circles of imports, type checkers' included", len(circles(ROOT / "src")), 3),
    ]
    exceeded = []
    for name, value, bound in rows:
        print(f"{name:56} {value:8.2f} {abs(bound):>6g}")
        if value < -bound if bound < 0 else value > bound:
            exceeded.append(name)
    if options.check and exceeded:
        sys.exit(f"error: beyond its bound: {', '.join(exceeded)}")


if __name__ == "__main__":
    main()
