"""Runs in the process of the tests, as text: the program's names stand for objects in another process.

Values come back as literals, so that nothing of the program is executed here. A call that has not been answered yet
raises `Unknown`; the statement is then skipped, to find the calls of the following ones. The caller gets them answered
and runs the tests again. The verdict is that of a run in which all calls were known.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import math
import operator
import os
import random
import sys
import unittest
from collections.abc import Callable, Iterator
from typing import Any

MOST = 1000  # calls of a test
OPERATORS = {
    **{"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"},
    **{"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and_": "&", "or_": "|", "xor": "^"},
}
SCALARS = (bool, int, float, complex, str, bytes, type(None))
BRACKETS: dict[type, str] = {list: "[]", tuple: "()", set: "{}"}


class Unknown(BaseException):
    """A call without an answer."""


class Unsupported(BaseException):
    """An argument that has no literal form."""


class Died(Exception):
    """The program ended, or ran out of time, in a call."""


class State:
    """Calls [target, arguments] with the answers to the first of them; `asked` are those of this run."""

    calls: list[Any]
    answers: list[Any]
    asked: list[Any]
    used: set[int]
    unknown = False
    unsupported = False
    report: Callable[[bool], None]


def ask(target: str, args: tuple[Any, ...] | None = None, named: dict[str, Any] | None = None) -> Any:
    """The value of an expression of the program, or of a call of it: plain, or a `Remote` if it has no literal form."""
    call = [target, None if args is None else f"({encode(args)}, {encode(named or {})})"]
    place = len(State.asked)
    again = State.unknown and call in State.asked[-1:]  # perhaps a loop that waits for a value
    State.asked.append(call)
    free = (i for i, known in enumerate(State.calls) if known == call and i not in State.used)
    found = next(free, None)
    if found is not None and found < len(State.answers):
        State.used.add(found)
        return read(State.answers[found], place, args)
    if found is not None and found == len(State.answers) == place:
        raise Died(f"the program ended in {target}")
    State.unknown = True
    if again or len(State.asked) >= MOST:
        State.report(False)
    raise Unknown


def read(answer: list[Any], place: int, args: tuple[Any, ...] | None) -> Any:
    """The value that a program's process answered. Raises the exception that it raised."""
    kind, content, more = answer
    if kind == "raised":
        known = getattr(builtins, str(content), None)
        if not (isinstance(known, type) and issubclass(known, Exception)):
            known = type(str(content), (Exception,), {})
        try:
            error = known(str(more))
        except TypeError:  # a type that takes other arguments
            error = Exception(str(more))
        raise error
    for given, after in zip(args or (), () if more is None else decode(more), strict=False):
        if isinstance(given, list):
            given[:] = after
        elif isinstance(given, dict | set):
            given.clear()
            given.update(after)
    return decode(content) if kind == "value" else Remote(f"__results__[{place}]", bool(content))


class Named(ast.NodeTransformer):
    """Replaces the names inf and nan by their values, which literals lack."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The constant of inf or nan; other names stay."""
        known = {"inf": math.inf, "nan": math.nan}.get(node.id)
        return node if known is None else ast.Constant(known)


def decode(text: str) -> Any:
    """The value of a literal. ValueError: it is none."""
    return ast.literal_eval(Named().visit(ast.parse(text, mode="eval").body))


def encode(value: Any) -> str:
    """Text of a value for the program's process."""
    kind = type(value)
    if kind is Remote:
        return vars(value)["text"]
    if kind in SCALARS:
        return f"float('{value}')" if kind is float and not math.isfinite(value) else repr(value)
    if kind is dict:
        return "{" + ", ".join(f"{encode(key)}: {encode(item)}" for key, item in value.items()) + "}"
    if kind in BRACKETS:
        if kind is set and not value:
            return "set()"
        items = "".join(f"{encode(item)}, " for item in value)
        return BRACKETS[kind][0] + items + BRACKETS[kind][1]
    State.unsupported = True
    raise Unsupported(f"{kind.__name__} has no literal form")


class Remote:
    """An expression of the program; `truth` is that of an object which was evaluated and has no literal form.

    Such an object is never compared with a value of the tests, since the program decides what it equals.
    """

    def __init__(self, text: str, truth: bool | None = None) -> None:
        vars(self).update(text=text, truth=truth)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return ask(encode(self), args, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote(f"{encode(self)}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        ask(f"setattr({encode(self)}, {name!r}, {encode(value)})")

    def __getitem__(self, key: Any) -> Any:
        return ask(f"{encode(self)}[{encode(key)}]") if not isinstance(key, slice) else plain(self)[key]

    def __len__(self) -> int:
        return operator.index(ask(f"len({encode(self)})"))

    def __iter__(self) -> Iterator[Any]:
        items = ask(f"list({encode(self)})")
        return iter([items[place] for place in range(len(items))])

    def __str__(self) -> str:
        return f"{ask(f'str({encode(self)})')}"

    def __int__(self) -> int:
        return int(plain(self))

    def __float__(self) -> float:
        return float(plain(self))

    def __index__(self) -> int:
        return operator.index(plain(self))

    def __abs__(self) -> Any:
        return abs(plain(self))

    def __bool__(self) -> bool:
        value = settled(self)
        return vars(value)["truth"] if type(value) is Remote else bool(value)

    def __eq__(self, other: object) -> bool:
        one, two = settled(self), settled(other)
        if type(one) is Remote and type(two) is Remote:
            return ask(f"({encode(one)}) == ({encode(two)})") is True
        return type(one) is not Remote and type(two) is not Remote and bool(one == two)

    __hash__ = object.__hash__


def _operator(name: str, sign: str) -> None:
    def apply(one: Any, other: Any) -> Any:
        one, other = settled(one), settled(other)
        if type(one) is Remote and type(other) is Remote:
            return ask(f"({encode(one)}) {sign} ({encode(other)})")
        if type(one) is Remote or type(other) is Remote:
            return NotImplemented
        return getattr(operator, name)(one, other)

    plain_name = name.strip("_")
    setattr(Remote, f"__{plain_name}__", apply)
    if plain_name not in ("lt", "le", "gt", "ge"):
        setattr(Remote, f"__r{plain_name}__", lambda self, other: apply(other, self))


for _name, _sign in OPERATORS.items():
    _operator(_name, _sign)


def settled(value: Any) -> Any:
    """The value of a name or an attribute; an object without a literal form as it is."""
    return ask(encode(value)) if type(value) is Remote and vars(value)["truth"] is None else value


def plain(value: Any) -> Any:
    """TypeError: it has no literal form."""
    if type(value := settled(value)) is Remote:
        raise TypeError("an object of the program has no value here")
    return value


class Skipping(ast.NodeTransformer):
    """A statement that fails after an unknown call is skipped."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Wrap a statement so that its failure is recorded and the rest runs."""
        super().generic_visit(node)
        if not isinstance(node, ast.Assert | ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign):
            return node
        known = ast.parse("try:\n    pass\nexcept BaseException:\n    if not __unknown__():\n        raise").body[0]
        assert isinstance(known, ast.Try)
        known.body = [node]
        return known


def judge(test: str, calls: list[Any], answers: list[Any], mark: str, modules: list[str]) -> None:
    """Run a test and report {asked, unknown, unsupported, passed}."""
    output = os.dup(1)

    def report(passed: bool) -> None:
        found = {"asked": State.asked, "unknown": State.unknown, "unsupported": State.unsupported, "passed": passed}
        text = memoryview(f"\n{mark}{json.dumps(found)}\n".encode())
        while text:
            text = text[os.write(output, text) :]
        os._exit(0)

    State.calls, State.answers, State.asked, State.used, State.report = calls, answers, [], set(), report
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    random.seed(0)  # the same calls in each run
    unittest.main = lambda *args, **named: None  # type: ignore[assignment,misc]
    passed = False
    try:
        tree = ast.parse(test)
        loads = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {*dir(builtins)}
        names: dict[str, Any] = {name: Remote(name) for name in loads}
        names |= {name: importlib.import_module(name) for name in loads & {*modules}}
        names |= {"__name__": "tests", "__unknown__": lambda: State.unknown}
        exec(compile(ast.fix_missing_locations(Skipping().visit(tree)), "tests.py", "exec"), names)
        kinds = [k for k in names.values() if isinstance(k, type) and issubclass(k, unittest.TestCase)]
        load = unittest.defaultTestLoader.loadTestsFromTestCase
        results = [load(kind).run(unittest.TestResult()) for kind in kinds]
        passed = all(result.wasSuccessful() and result.testsRun for result in results)
    except BaseException:
        passed = False
    report(passed and not State.unknown)
