"""Tests that run in another process than the program, which could find or deceive them in its own process."""

from __future__ import annotations

import ast
import builtins
import json
import secrets
import sys
from pathlib import Path
from typing import Any, TypeVar

# Modules that separate tests may use: those without input, output and objects that have no literal form.
MODULES = (
    *("bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "cmath", "operator", "random", "re"),
    *("statistics", "string", "typing", "unittest", "json"),
)
# Functions that act on the process in which they are called: a test with them runs in the program's own.
_IN_PROCESS = {"eval", "exec", "globals", "locals", "open", "input", "compile"}
_BUILTINS = {*dir(builtins)}
# Names that the program must have imported or defined, if the test does not.
_FOREIGN_MODULES = {*sys.stdlib_module_names, "np", "numpy", "pd", "pandas", "scipy", "sympy", "torch"} - {*MODULES}
# Sent with the test, as the first part of its program.
_TEXT = (Path(__file__).parent / "remote.py").read_text("utf-8")
# Statements that could not be executed again with the same result, or would need an event loop.
_UNSUPPORTED = (ast.AsyncFunctionDef, ast.Await, ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal, ast.NamedExpr)


def calls_program(test: ast.expr) -> bool:
    """Whether an expression is a call of the program, which may return what it likes and gains nothing by lies."""
    root = _root(test.func) if isinstance(test, ast.Call) else None
    return root is not None and root not in _BUILTINS | _FOREIGN_MODULES | {*MODULES}


def decides(test: str) -> bool:
    """Whether a test decides something by itself; one that does not parse, or only executes statements, does not."""
    tree = _parse(test)
    names = {_root(base) for node in _walk(tree, ast.ClassDef) for base in node.bases}
    return bool(_walk(tree, ast.Assert) or _walk(tree, ast.Raise) or "unittest" in names or "TestCase" in names)


def separable(test: str) -> bool:
    """Whether a test can run without the program: it passes plain values to it, and defines or imports all else."""
    tree = _parse(test)
    # Statements that `remote.py` cannot run step by step.
    if any(isinstance(node, _UNSUPPORTED) for node in ast.walk(tree)):
        return False
    # Imports of modules that could reach beyond the process, or replace parts of it.
    imports = [name.name for node in _walk(tree, ast.Import) for name in node.names]
    imports += [node.module or "." for node in _walk(tree, ast.ImportFrom)]
    if any(name.partition(".")[0] not in MODULES or name == "unittest.mock" for name in imports):
        return False
    # Attributes that lead to the interpreter's internals.
    if any(node.attr.startswith("__") or node.attr in ("mock", "patch") for node in _walk(tree, ast.Attribute)):
        return False
    # Classes: only test cases, whose methods are statements of the test.
    if any(_root(base) not in ("unittest", "TestCase") for kind in _walk(tree, ast.ClassDef) for base in kind.bases):
        return False
    if any(not kind.bases for kind in _walk(tree, ast.ClassDef)):
        return False
    # A module that the program has imported: its functions take and return other objects than plain ones.
    bound = {node.id for node in _walk(tree, ast.Name) if isinstance(node.ctx, ast.Store)}
    if any(getattr(node.value, "id", None) in _FOREIGN_MODULES - bound for node in _walk(tree, ast.Attribute)):
        return False
    used = {node.id for node in _walk(tree, ast.Name)}
    if used & _IN_PROCESS or any(name.startswith("__") for name in used - {"__name__"}):
        return False
    # A function cannot be sent: one may only be an argument of the test's own functions.
    functions = {node.name for node in _walk(tree, ast.FunctionDef)}
    of_test = _BUILTINS | functions | {"self"} | {*MODULES}
    of_test |= {
        name.asname or name.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    for call in _walk(tree, ast.Call):
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        sends_function = any(isinstance(arg, ast.Lambda) or getattr(arg, "id", None) in functions for arg in arguments)
        if sends_function and _root(call.func) not in of_test:
            return False
    return True


def test_script(test: str, calls: list[Json], answers: list[Json], mark: str) -> str:
    """Return the program that runs a test, see `remote.judge`."""
    return f"{_TEXT}\njudge({test!r}, {calls!r}, {answers!r}, {mark!r}, {[*MODULES]!r})\n"


def new_mark() -> str:
    """Return a random text that a program cannot guess."""
    return secrets.token_hex(16)


def read_report(stdout: str, mark: str) -> dict[str, Json] | None:
    """Return the report of `remote.judge`; None if it was cut off."""
    for line in stdout.split("\n"):
        if line.startswith(mark):
            try:
                return json.loads(line.removeprefix(mark))
            except ValueError:
                return None
    return None


def _parse(test: str) -> ast.Module:
    try:
        return ast.parse(test)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ast.Module([], [])


def _walk(tree: ast.AST, kind: type[N]) -> list[N]:
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


N = TypeVar("N", bound=ast.AST)
Json = Any


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None
