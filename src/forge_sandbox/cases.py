"""Tests of programs: their forms, and the checks that each is made of."""

import ast
import builtins
import json
import operator
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

# The parser warns of odd syntax, once for each location: a program could fill the log.
warnings.filterwarnings("ignore", module="<model output>")

Value = Any  # of any literal

# Of which expressions a test's constants are made, as `-1`, `2 ** 10`, `[1, float("inf")]`.
_CONSTANT = (ast.Constant, ast.UnaryOp, ast.unaryop, ast.BinOp, ast.expr_context, ast.Call, ast.Name)
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
MAX_EXPONENT = 1024  # larger powers could take minutes

# What a comparison is called in the harness, which compares plain values whatever the program's objects say.
_COMPARE = "__compare__"
_VALUE = "__value__"
_SIGNS: dict[type[ast.cmpop], str] = {
    **{ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="},
    **{ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not"},
}
_OPERATORS: dict[type[ast.cmpop], Callable[[Value, Value], Value]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
# Methods of unittest that compare two values by ==, and those that ask other things of values.
_EQUALITIES = {f"assert{kind}Equal" for kind in ("", "List", "Tuple", "Set", "Dict", "Sequence", "MultiLine")}
_OF_VALUES = {
    *("assertAlmostEqual", "assertNotAlmostEqual", "assertCountEqual", "assertIn", "assertNotIn"),
    *("assertGreater", "assertGreaterEqual", "assertLess", "assertLessEqual"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One test of a program: expected stdout for an input, or the value of an expression after the program has run, or
    statements that must not raise. Exactly one of the three.

    Expected output and values stay outside the sandbox, as do constants in a test of asserts only
    (`assert f(2) == 2 ** 10 and abs(f(3) - 1.5) < 1e-3`). Other tests run in the program's process, see `forgeable`.
    """

    stdin: str | None = None
    stdout: str | None = None
    call: str | None = None
    value: str | None = None
    test: str | None = None

    def __post_init__(self) -> None:
        fields = {name for name in ("stdin", "stdout", "call", "value", "test") if getattr(self, name) is not None}
        if fields not in ({"stdout"}, {"stdin", "stdout"}, {"call", "value"}, {"test"}):
            raise ValueError(f"a case has stdout (and stdin), or call and value, or test; it has {sorted(fields)}")


def read_cases(target: str) -> list[Case]:
    """Read cases from a JSON list of objects with the fields of `Case`. ValueError: another form, or an empty list."""
    try:
        cases = [Case(**row) for row in json.loads(target)]
    except (ValueError, TypeError) as error:
        raise ValueError(f"the target is not a list of test cases ({error}): {target[:80]!r}") from None
    if not cases:
        raise ValueError("the target has no test case")
    return cases


def forgeable(case: Case) -> bool:
    """Return whether a test is decided in the program's process. Its comparisons hold of plain values only, so that an
    object that equals everything does not pass; but a program that looks for the test, or replaces what it calls,
    could."""
    if case.test is None:
        return False
    checks = _assert_checks_of(0, case.test)
    deciding = (ast.Assert, ast.Raise, ast.ClassDef)
    decides = any(isinstance(node, deciding) for node in ast.walk(_parse_test(case.test)))
    return decides and (not checks or any(check.in_process for check in checks))


def parse_literal(text: str) -> tuple[Value] | None:
    """Return the value in a 1-tuple; None if the text is not a literal."""
    with suppress(ValueError, SyntaxError, TypeError, ArithmeticError, MemoryError, RecursionError):
        return (ast.literal_eval(ast.parse(text.strip(), "<model output>", mode="eval")),)
    return None


def evaluate_constant(expression: str | ast.expr) -> tuple[Value] | None:
    """Return the value of an expression of a test in a 1-tuple; None if it has names but `float`, `inf` and `set`."""
    with suppress(ValueError, SyntaxError, TypeError, ArithmeticError, MemoryError, RecursionError):
        node = ast.parse(expression.strip(), "<test>", mode="eval").body if isinstance(expression, str) else expression
        nodes = list(ast.walk(node))
        names = {each.id for each in nodes if isinstance(each, ast.Name)}
        exponents = [each.right for each in nodes if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Pow)]
        is_small = all(ast.literal_eval(each) <= MAX_EXPONENT for each in exponents)
        is_constant = all(isinstance(each, _CONSTANT + _ARITHMETIC + _DISPLAYS) for each in nodes)
        if names <= {"float", "inf", "set"} and is_small and is_constant:
            scope = {"__builtins__": {}, "float": float, "inf": float("inf"), "set": set}
            return (eval(compile(ast.Expression(node), "<test>", "eval"), scope),)
    return None


@dataclass(frozen=True, slots=True)
class Check:
    """A part of a case, which the harness executes.

    Args:
        case: index of the case.
        text: executed if `kind` is "test", else evaluated.
        kind: the form of the harness's report (a key of its `kinds`).
        right: whether the reported value is right; `NO_LITERAL` stands for one without a literal form.
        expected: text of the expected value.
        in_process: whether the harness compares, in the program's process.
    """

    case: int
    text: str
    kind: Literal["test", "value", "text", "truth"]
    right: Callable[[Value], bool]
    expected: str = ""
    in_process: bool = False


# Stands for the result of a program without a literal form: no comparison with it holds.
NO_LITERAL = object()


# An example of each way in which a test runs, for a program that defines f:
#
#   assert f(2) == 4              f(2) runs in the program's process and is compared outside of the sandbox
#   assert 3 < f(2) and f(1)      both parts likewise: f(1) can only return what it likes
#   x = f(1); assert x + x == 2   in the program's process, where the comparison is one of plain values
def checks_of(number: int, case: Case) -> list[Check]:
    """Return the checks of a case that is not one of input and output."""
    if case.call is not None:
        expected = (case.value or "").strip()
        value_of = evaluate_constant(expected)
        if value_of is not None:
            return [Check(number, case.call, "value", lambda value: bool(value == value_of[0]), expected)]
        return [Check(number, case.call, "text", lambda value: bool(value == expected), expected)]
    if case.test is None:
        return []
    guarded = ast.unparse(_Guard().visit(_parse_test(case.test))) or case.test
    return _assert_checks_of(number, case.test) or [Check(number, guarded, "test", lambda value: value is None)]


def _parse_test(test: str) -> ast.Module:
    """Return the tree of a test; an empty one where it does not parse, as it will raise in the sandbox, too."""
    with suppress(SyntaxError, ValueError, MemoryError, RecursionError):
        return ast.parse(test)
    return ast.Module([], [])


def _assert_checks_of(number: int, test: str) -> list[Check]:
    """Return the checks of a test that consists of asserts; none for other tests."""
    body = _parse_test(test).body
    tests = [statement.test for statement in body if isinstance(statement, ast.Assert)]
    return [check for test in tests for check in _assert_checks(number, test)] if len(tests) == len(body) else []


def _assert_checks(number: int, test: ast.expr) -> list[Check]:
    """Return checks of an asserted expression that keep constants on one side of a comparison out of the sandbox."""
    match test:
        # Each part of a conjunction is a separate check, so that its constants stay outside too.
        case ast.BoolOp(op=ast.And(), values=values):
            return [check for value in values for check in _assert_checks(number, value)]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return [_truth_check(number, operand, False)]
        # The constant is compared outside the sandbox, where the program cannot see or replace it.
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            compare = _OPERATORS[type(op)]
            right_value = evaluate_constant(right)
            if right_value is not None:
                return [
                    _value_check(number, left, lambda value: bool(compare(value, right_value[0])), ast.unparse(right))
                ]
            left_value = evaluate_constant(left)
            if left_value is not None:
                return [
                    _value_check(number, right, lambda value: bool(compare(left_value[0], value)), ast.unparse(left))
                ]

    return [_truth_check(number, test, True)]


def _truth_check(number: int, test: ast.expr, wanted: bool) -> Check:
    """Return a check of whether an expression holds. A call of the program gains nothing by lies: it may return what it
    likes."""
    root = re.match(r"\w+", ast.unparse(test)) if isinstance(test, ast.Call) else None
    calls_program = root is not None and root.group() not in dir(builtins)
    text = ast.unparse(_Guard().visit(test))
    return Check(number, text, "truth", lambda value: value is wanted, in_process=not calls_program)


def _value_check(number: int, node: ast.expr, right: Callable[[Value], bool], expected: str) -> Check:
    """Return a check of a value; for `abs(value - constant)` the constant stays out of the sandbox, too."""
    match node:
        case ast.Call(func=ast.Name("abs"), args=[ast.BinOp(left=first, op=ast.Sub(), right=second)], keywords=[]):
            for node_of_program, other in ((first, second), (second, first)):
                centre = evaluate_constant(other)
                if centre is not None:
                    distance = partial(lambda centre, value: right(abs(value - centre)), centre[0])
                    return Check(number, ast.unparse(node_of_program), "value", distance, expected)
    return Check(number, ast.unparse(node), "value", right, expected)


class _Guard(ast.NodeTransformer):
    """Replaces the comparisons of a test by calls of the harness, which the program's objects cannot answer."""

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """Rewrite `a == b` as `__compare__(a, ('==', b))`."""
        self.generic_visit(node)
        pairs = zip(node.ops, node.comparators, strict=True)
        signs = [ast.Tuple([ast.Constant(_SIGNS[type(sign)]), right], ast.Load()) for sign, right in pairs]
        return _call_name(_COMPARE, node.left, *signs)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Rewrite `self.assertEqual(a, b)` as `self.assertTrue(__compare__(a, ('==', b)))`."""
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in _EQUALITIES and len(node.args) >= 2:
            left, right, *_ = node.args
            node.args = [_call_name(_COMPARE, left, ast.Tuple([ast.Constant("=="), right], ast.Load()))]
            node.keywords = []
            node.func = ast.Attribute(node.func.value, "assertTrue", ast.Load())  # type: ignore[attr-defined]
        elif name in _OF_VALUES:
            node.args[:2] = [_call_name(_VALUE, argument) for argument in node.args[:2]]
        return node


def _call_name(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])
