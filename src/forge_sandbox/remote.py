"""Program of the process of the tests, sent as text: the program's names stand for objects in another process.

Values come back as literals, so that no code of the program is executed here. A call that has not been answered yet
raises `Unknown`; the statement is then skipped, to find the calls of the following ones. The caller has them answered
and runs the tests again. The verdict is that of a run in which all calls were answered.
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

MAX_CALLS = 1000  # of a test
Value = Any  # plain data, or a Remote
Call = list[Any]  # the text of its target, and of its arguments
OPERATORS = {
    **{"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"},
    **{"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and_": "&", "or_": "|", "xor": "^"},
}
# Types whose values are sent as literals; objects of other types stay with the program.
SCALARS = (bool, int, float, complex, str, bytes, type(None))
BRACKETS: dict[type, str] = {list: "[]", tuple: "()", set: "{}"}


class Unknown(BaseException):
    """A call without an answer."""


class Unsupported(BaseException):
    """An argument that has no literal form."""


class Died(Exception):
    """The program ended, or ran out of time, in a call."""


class State:
    """The calls of the run before, with the answers to the first of them; `asked` are the calls of this run."""

    calls: list[Call]
    answers: list[Any]
    asked: list[Call]
    used: set[int]
    unknown = False
    unsupported = False
    report: Callable[[bool], None]


def ask(target: str, args: tuple[Value, ...] | None = None, kwargs: dict[str, Value] | None = None) -> Value:
    """Return the value of an expression of the program, or of a call: plain, or a `Remote` if it has no literal
    form."""
    call = [target, None if args is None else f"({encode(args)}, {encode(kwargs or {})})"]
    index = len(State.asked)
    repeated = State.unknown and call in State.asked[-1:]  # perhaps a loop that waits for a value
    State.asked.append(call)
    # Answers are matched by the text of the call, each once: a call may have several values.
    unused = (i for i, earlier in enumerate(State.calls) if earlier == call and i not in State.used)
    match = next(unused, None)
    if match is not None and match < len(State.answers):
        State.used.add(match)
        return read(State.answers[match], index, args)
    if match is not None and match == len(State.answers) == index:
        raise Died(f"the program ended in {target}")
    State.unknown = True
    if repeated or len(State.asked) >= MAX_CALLS:
        State.report(False)
    raise Unknown


def read(answer: list[Any], index: int, args: tuple[Value, ...] | None) -> Value:
    """Return the value of an answer of the program's process. Raises the exception that the call raised."""
    kind, content, extra = answer
    if kind == "raised":
        exception = getattr(builtins, str(content), None)
        if not (isinstance(exception, type) and issubclass(exception, Exception)):
            exception = type(str(content), (Exception,), {})
        try:
            error = exception(str(extra))
        except TypeError:  # a type that takes other arguments
            error = Exception(str(extra))
        raise error
    # The call may have changed its arguments: repeat that on the objects of the test.
    for argument, after in zip(args or (), () if extra is None else decode(extra), strict=False):
        if isinstance(argument, list):
            argument[:] = after
        elif isinstance(argument, dict | set):
            argument.clear()
            argument.update(after)
    return decode(content) if kind == "value" else Remote(f"__results__[{index}]", bool(content))


class ReplaceNames(ast.NodeTransformer):
    """Replaces the names inf and nan by their values, which are not literals."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace inf or nan by a constant; keep other names."""
        value = {"inf": math.inf, "nan": math.nan}.get(node.id)
        return node if value is None else ast.Constant(value)


def decode(text: str) -> Value:
    """Return the value of a literal. ValueError: the text is not one."""
    return ast.literal_eval(ReplaceNames().visit(ast.parse(text, mode="eval").body))


def encode(value: Value) -> str:
    """Return the text of a value for the program's process."""
    kind = type(value)
    if kind is Remote:
        return vars(value)["text"]
    # infinity and nan have no literal.
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
    """An expression of the program; `truth` is that of an evaluated object without a literal form.

    Such an object is never compared with a value of the tests, since the program decides what it equals.
    """

    def __init__(self, text: str, truth: bool | None = None) -> None:
        vars(self).update(text=text, truth=truth)

    def __call__(self, *args: Value, **kwargs: Value) -> Value:
        return ask(encode(self), args, kwargs)

    def __getattr__(self, name: str) -> Value:
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote(f"{encode(self)}.{name}")

    def __setattr__(self, name: str, value: Value) -> None:
        ask(f"setattr({encode(self)}, {name!r}, {encode(value)})")

    def __getitem__(self, key: Value) -> Value:
        return ask(f"{encode(self)}[{encode(key)}]") if not isinstance(key, slice) else plain(self)[key]

    def __len__(self) -> int:
        return operator.index(ask(f"len({encode(self)})"))

    def __iter__(self) -> Iterator[Value]:
        items = ask(f"list({encode(self)})")
        return iter([items[index] for index in range(len(items))])

    def __str__(self) -> str:
        return f"{ask(f'str({encode(self)})')}"

    def __int__(self) -> int:
        return int(plain(self))

    def __float__(self) -> float:
        return float(plain(self))

    def __index__(self) -> int:
        return operator.index(plain(self))

    def __abs__(self) -> Value:
        return abs(plain(self))

    def __bool__(self) -> bool:
        value = evaluate(self)
        return vars(value)["truth"] if type(value) is Remote else bool(value)

    def __eq__(self, other: object) -> bool:
        left = evaluate(self)
        right = evaluate(other)
        if type(left) is Remote and type(right) is Remote:
            return ask(f"({encode(left)}) == ({encode(right)})") is True
        return type(left) is not Remote and type(right) is not Remote and bool(left == right)

    __hash__ = object.__hash__


def _operator(name: str, sign: str) -> None:
    def apply(left: Value, right: Value) -> Value:
        left = evaluate(left)
        right = evaluate(right)
        # Both belong to the program, so that the program computes it.
        if type(left) is Remote and type(right) is Remote:
            return ask(f"({encode(left)}) {sign} ({encode(right)})")
        if type(left) is Remote or type(right) is Remote:
            return NotImplemented
        return getattr(operator, name)(left, right)

    plain_name = name.strip("_")
    setattr(Remote, f"__{plain_name}__", apply)
    if plain_name not in ("lt", "le", "gt", "ge"):
        setattr(Remote, f"__r{plain_name}__", lambda right, left: apply(left, right))


for _name, _sign in OPERATORS.items():
    _operator(_name, _sign)


def evaluate(value: Value) -> Value:
    """Return the value of a name or an attribute; an object without a literal form as it is."""
    return ask(encode(value)) if type(value) is Remote and vars(value)["truth"] is None else value


def plain(value: Value) -> Value:
    """Return a plain value. TypeError: it has no literal form."""
    value = evaluate(value)
    if type(value) is Remote:
        raise TypeError("an object of the program has no value here")
    return value


class SkipFailures(ast.NodeTransformer):
    """Skips a statement that fails after an unknown call."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Wrap a statement so that its failure is recorded and later statements run."""
        super().generic_visit(node)
        if not isinstance(node, ast.Assert | ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign):
            return node
        wrapper = ast.parse("try:\n    pass\nexcept BaseException:\n    if not __unknown__():\n        raise").body[0]
        assert isinstance(wrapper, ast.Try)
        wrapper.body = [node]
        return wrapper


def judge(test: str, calls: list[Call], answers: list[Any], mark: str, modules: list[str]) -> None:
    """Run a test and report {asked, unknown, unsupported, passed}."""
    output = os.dup(1)

    def report(passed: bool) -> None:
        fields = {"asked": State.asked, "unknown": State.unknown, "unsupported": State.unsupported, "passed": passed}
        text = memoryview(f"\n{mark}{json.dumps(fields)}\n".encode())
        while text:
            text = text[os.write(output, text) :]
        os._exit(0)

    State.calls = calls
    State.answers = answers
    State.asked = []
    State.used = set()
    State.report = report
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    random.seed(0)  # the same calls in each run
    unittest.main = lambda *args, **kwargs: None  # type: ignore[assignment,misc]
    passed = False
    try:
        tree = ast.parse(test)
        loads = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {*dir(builtins)}
        names: dict[str, Value] = {name: Remote(name) for name in loads}
        names |= {name: importlib.import_module(name) for name in loads & {*modules}}
        names |= {"__name__": "tests", "__unknown__": lambda: State.unknown}
        exec(compile(ast.fix_missing_locations(SkipFailures().visit(tree)), "tests.py", "exec"), names)
        kinds = [k for k in names.values() if isinstance(k, type) and issubclass(k, unittest.TestCase)]
        load = unittest.defaultTestLoader.loadTestsFromTestCase
        results = [load(kind).run(unittest.TestResult()) for kind in kinds]
        passed = all(result.wasSuccessful() and result.testsRun for result in results)
    except BaseException:
        passed = False
    report(passed and not State.unknown)
