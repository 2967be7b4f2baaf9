"""Tests that run in another process than the program, which could find or deceive them in its own."""

from __future__ import annotations

import ast
import builtins
import json
import secrets
import sys
from pathlib import Path
from typing import Any

# What tests may use there: modules without input, output and objects that have no literal form.
MODULES = (
    *("bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "cmath", "operator", "random", "re"),
    *("statistics", "string", "typing", "unittest", "json"),
)
_IN_PROCESS = {"eval", "exec", "globals", "locals", "open", "input", "compile"}
_BUILTINS = {*dir(builtins)}
# Without an import in the test they are those of the program, or what it calls so.
_OTHERS = {*sys.stdlib_module_names, "np", "numpy", "pd", "pandas", "scipy", "sympy", "torch"} - {*MODULES}
_TEXT = (Path(__file__).parent / "remote.py").read_text("utf-8")
_FOREIGN = (ast.AsyncFunctionDef, ast.Await, ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal, ast.NamedExpr)


def of_program(test: ast.expr) -> bool:
    """Whether an expression is a call of the program: it may then return what it likes, and gains nothing by lies."""
    root = _root(test.func) if isinstance(test, ast.Call) else None
    return root is not None and root not in _BUILTINS | _OTHERS | {*MODULES}


def judges(test: str) -> bool:
    """Whether a test decides something by itself. One that does not parse, or that only executes, does not."""
    tree = _parsed(test)
    names = {_root(base) for node in _walk(tree, ast.ClassDef) for base in node.bases}
    return bool(_walk(tree, ast.Assert) or _walk(tree, ast.Raise) or "unittest" in names or "TestCase" in names)


def separable(test: str) -> bool:
    """Whether a test can run without the program: it passes plain values to it, and has all else of its own."""
    tree = _parsed(test)
    if any(isinstance(node, _FOREIGN) for node in ast.walk(tree)):
        return False
    imports = [name.name for node in _walk(tree, ast.Import) for name in node.names]
    imports += [node.module or "." for node in _walk(tree, ast.ImportFrom)]
    if any(name.partition(".")[0] not in MODULES or name == "unittest.mock" for name in imports):
        return False
    if any(node.attr.startswith("__") or node.attr in ("mock", "patch") for node in _walk(tree, ast.Attribute)):
        return False
    if any(_root(base) not in ("unittest", "TestCase") for kind in _walk(tree, ast.ClassDef) for base in kind.bases):
        return False
    if any(not kind.bases for kind in _walk(tree, ast.ClassDef)):
        return False
    bound = {node.id for node in _walk(tree, ast.Name) if isinstance(node.ctx, ast.Store)}
    if any(getattr(node.value, "id", None) in _OTHERS - bound for node in _walk(tree, ast.Attribute)):
        return False
    used = {node.id for node in _walk(tree, ast.Name)}
    if used & _IN_PROCESS or any(name.startswith("__") for name in used - {"__name__"}):
        return False
    # A function cannot be sent.
    own = {node.name for node in _walk(tree, ast.FunctionDef)}
    known = _BUILTINS | own | {"self"} | {*MODULES}
    known |= {
        name.asname or name.name.partition(".")[0]
        for node in [*_walk(tree, ast.Import), *_walk(tree, ast.ImportFrom)]
        for name in node.names
    }
    for call in _walk(tree, ast.Call):
        given = [*call.args, *(word.value for word in call.keywords)]
        functions = [arg for arg in given if isinstance(arg, ast.Lambda) or getattr(arg, "id", None) in own]
        if functions and _root(call.func) not in known:
            return False
    return True


def script(test: str, calls: list[Any], answers: list[Any], mark: str) -> str:
    """The program that runs the test, see `remote.judge`."""
    return f"{_TEXT}\njudge({test!r}, {calls!r}, {answers!r}, {mark!r}, {[*MODULES]!r})\n"


def new_mark() -> str:
    """A random text that a program cannot guess."""
    return secrets.token_hex(16)


def report(stdout: str, mark: str) -> dict[str, Any] | None:
    """What `remote.judge` has reported; None if it was cut off."""
    for line in stdout.split("\n"):
        if line.startswith(mark):
            try:
                return json.loads(line.removeprefix(mark))
            except ValueError:
                return None
    return None


def _parsed(test: str) -> ast.Module:
    try:
        return ast.parse(test)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ast.Module([], [])


def _walk(tree: ast.AST, kind: type[ast.AST]) -> list[Any]:
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None
