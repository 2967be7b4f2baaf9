"""Tests of programs, and the checks into which each test is split."""

import ast
import builtins
import json
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

# The parser warns of unusual syntax, once for each location: programs could fill the log.
warnings.filterwarnings("ignore", module="<model output>")

Value = Any  # of a Python literal

# The kinds of expressions in a test's constants, such as `-1`, `2 ** 10`, `[1, float("inf")]`.
_CONSTANT = (ast.Constant, ast.UnaryOp, ast.unaryop, ast.BinOp, ast.expr_context, ast.Call, ast.Name)
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
_CONSTANT_NAMES = {
    "float": float,
    "inf": float("inf"),
    "set": set,
    "nan": float("nan"),
    "true": True,
    "false": False,
    "null": None,
}
MAX_EXPONENT = 1024  # larger powers could take minutes

# The names of functions of the harness in guarded tests. They compare plain values, without methods of the program's
# objects.
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
# Methods of unittest that compare two values by ==, and others whose first two arguments are values.
_EQUALITIES = {f"assert{kind}Equal" for kind in ("", "List", "Tuple", "Set", "Dict", "Sequence", "MultiLine")}
_OF_VALUES = {
    *("assertAlmostEqual", "assertNotAlmostEqual", "assertCountEqual", "assertIn", "assertNotIn"),
    *("assertGreater", "assertGreaterEqual", "assertLess", "assertLessEqual"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One test of a program, in one of three forms.

    stdin, stdout: the input, "" if None, and the output that the program must print.
    call, value: an expression that is evaluated after the program has run, and the value that it must have: in JSON, as
        a Python literal, or as any other text, which must be the value itself or its `repr`.
    test: statements that must not raise an error after the program has run.

    A program cannot see the expected outputs and values, which stay outside the sandbox, nor the constants in a test of
    assert statements only, such as `assert f(2) == 2 ** 10 and abs(f(3) - 1.5) < 1e-3`. Other tests are decided in the
    program's process, see `forgeable`.
    """

    stdin: str | None = None
    stdout: str | None = None
    call: str | None = None
    value: str | None = None
    test: str | None = None

    def __post_init__(self) -> None:
        fields = {name for name in ("stdin", "stdout", "call", "value", "test") if getattr(self, name) is not None}
        if fields not in ({"stdout"}, {"stdin", "stdout"}, {"call", "value"}, {"test"}):
            raise ValueError(
                f"a test case must have stdout (and stdin), or call and value, or test; got {sorted(fields)}"
            )


def read_cases(target: str) -> list[Case]:
    """Return the cases in a JSON list of objects with the fields of `Case`; `value` may also be any JSON.

    Raises:
        ValueError: the target is not such a list, or is empty.

    >>> read_cases('[{"call": "f(1)", "value": "2"}]')
    [Case(stdin=None, stdout=None, call='f(1)', value='2', test=None)]
    """
    try:
        cases = [
            Case(**{name: text if name != "value" or isinstance(text, str) else json.dumps(text) for name, text in row})
            for row in map(dict.items, json.loads(target))
        ]
    except (ValueError, TypeError) as error:
        raise ValueError(f"the target is not a list of test cases ({error}): {target[:80]!r}") from None
    if not cases:
        raise ValueError("the target must have at least one test case")
    return cases


def forgeable(case: Case) -> bool:
    """Return whether a wrong program could pass a test, because the test is decided in the program's process.

    There, an object that claims to equal everything does not pass, as only plain values are compared. But a program
    that looks for the test, or replaces functions that the test calls, could pass.

    >>> forgeable(Case(test="assert f(2) == 4")), forgeable(Case(test="x = f(2)\\nassert x == 4"))
    (False, True)
    """
    if case.test is None:
        return False
    # A test without any of these passes whenever it raises no error: there is nothing to forge.
    can_fail = (ast.Assert, ast.Raise, ast.ClassDef)
    if not any(isinstance(node, can_fail) for node in ast.walk(_parse_test(case.test))):
        return False
    checks = _assert_checks_of(0, case.test)
    return not checks or any(check.in_process for check in checks)


def parse_literal(text: str) -> tuple[Value] | None:
    """Return the value of a Python literal in a 1-tuple, as it may be None; None if the text is not a literal.

    >>> parse_literal("[1, None]"), parse_literal("f(1)")
    (([1, None],), None)
    """
    with suppress(ValueError, SyntaxError, TypeError, ArithmeticError, MemoryError, RecursionError):
        return (ast.literal_eval(ast.parse(text.strip(), "<model output>", mode="eval")),)
    return None


def evaluate_constant(expression: str | ast.expr) -> tuple[Value] | None:
    """Return the value of a constant expression of a test in a 1-tuple; None if the expression is not constant.

    The only names that it may contain are `float`, `inf`, `nan`, `set`, and `true`, `false` and `null` of JSON.

    >>> evaluate_constant("2 ** 10"), evaluate_constant("[true, null]"), evaluate_constant("f(1)")
    ((1024,), ([True, None],), None)
    """
    with suppress(ValueError, SyntaxError, TypeError, ArithmeticError, MemoryError, RecursionError):
        node = ast.parse(expression.strip(), "<test>", mode="eval").body if isinstance(expression, str) else expression
        parts = list(ast.walk(node))
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        exponents = [part.right for part in parts if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Pow)]
        is_small = all(ast.literal_eval(exponent) <= MAX_EXPONENT for exponent in exponents)
        is_constant = all(isinstance(part, _CONSTANT + _ARITHMETIC + _DISPLAYS) for part in parts)
        if names <= _CONSTANT_NAMES.keys() and is_small and is_constant:
            return (eval(compile(ast.Expression(node), "<test>", "eval"), {"__builtins__": {}, **_CONSTANT_NAMES}),)
    return None


def _expected_value(text: str) -> tuple[Value] | None:
    """Return the value of a text in JSON, or of a constant expression, in a 1-tuple; None for any other text."""
    with suppress(ValueError, RecursionError):
        return (json.loads(text),)
    return evaluate_constant(text)


@dataclass(frozen=True, slots=True)
class Check:
    """A part of a case that the harness executes, and that passes or fails separately.

    Args:
        case: the index of the case.
        text: statements if `kind` is "test", otherwise an expression.
        kind: what the harness reports: for "value" the expression's value as a literal, for "text" its `repr`, for
            "truth" whether it is true; for "test" None, once the statements have run without an error.
        right: returns whether the reported value is right; `NO_LITERAL` stands for a value without a literal form.
        expected: the text of the expected value.
        in_process: whether the value is compared in the program's process, by the harness.
    """

    case: int
    text: str
    kind: Literal["test", "value", "text", "truth"]
    right: Callable[[Value], bool]
    expected: str = ""
    in_process: bool = False


def check_passable(cases: Sequence[Case]) -> None:
    """Check that a program could pass each case. ValueError: none can pass one of them, and why."""
    for number, case in enumerate(cases):
        try:
            "".join([case.stdin or "", case.stdout or "", case.call or "", case.test or ""]).encode()
            compile((case.call or "0").strip(), "<model output>", "eval")
            compile((case.test or "").strip(), "<model output>", "exec")
            for check in checks_of(number, case):
                if not _is_passable(check):
                    raise ValueError(f"{check.text} is never {check.expected or 'true'}")
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ValueError(f"no program can pass test {number + 1}: {error}") from None


def _is_passable(check: Check) -> bool:
    """Return whether some program can pass a check: a constant check is true, and no NaN is expected."""
    constant = evaluate_constant(check.text) if check.kind in ("value", "truth") else None
    if constant is not None:
        return check.right(constant[0] if check.kind == "value" else bool(constant[0]))
    expected = _expected_value(check.expected)
    return re.search(r"(?<!['\w])nan\b", repr(expected)) is None or check.right(NO_LITERAL)


# Stands for a value of a program without a literal form. It equals no expected value.
NO_LITERAL = object()


# An example of each way in which a test runs, for a program that defines f:
#
#   assert f(2) == 4              f(2) is evaluated in the program's process, and its value compared outside the sandbox
#   assert 3 < f(2) and f(1)      two checks; f(1) need not be compared: the program decides what it returns anyway
#   x = f(1); assert x + x == 2   all of it runs in the program's process, where the harness compares plain values
def checks_of(number: int, case: Case) -> list[Check]:
    """Return the checks of a case with a call or a test; none for a case of input and output.

    Args:
        number: the index of the case.
    """
    if case.call is not None:
        expected = (case.value or "").strip()
        if (value_of := _expected_value(expected)) is not None:
            return [Check(number, case.call, "value", lambda value: bool(value == value_of[0]), expected)]
        texts = (expected, case.value)
        is_text = lambda shown: any(text in texts for text in (shown, *(parse_literal(str(shown)) or ())))  # noqa: E731
        return [Check(number, case.call, "text", is_text, expected)]
    if case.test is None:
        return []
    guarded = ast.unparse(_Guard().visit(_parse_test(case.test))) or case.test
    return _assert_checks_of(number, case.test) or [Check(number, guarded, "test", lambda value: value is None)]


def _parse_test(test: str) -> ast.Module:
    """Return the tree of a test; an empty one if it is not valid Python, as the sandbox will report the error."""
    with suppress(SyntaxError, ValueError, MemoryError, RecursionError):
        return ast.parse(test)
    return ast.Module([], [])


def _assert_checks_of(number: int, test: str) -> list[Check]:
    """Return the checks of a test that consists of assert statements only; none for other tests."""
    body = _parse_test(test).body
    conditions = [statement.test for statement in body if isinstance(statement, ast.Assert)]
    if len(conditions) < len(body):
        return []
    return [check for condition in conditions for check in _assert_checks(number, condition)]


def _assert_checks(number: int, test: ast.expr) -> list[Check]:
    """Return the checks of an asserted condition. Constants with which values are compared stay outside the sandbox."""
    match test:
        # Each part of a conjunction is a separate check, so that its constants stay outside too.
        case ast.BoolOp(op=ast.And(), values=values):
            return [check for value in values for check in _assert_checks(number, value)]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return [_truth_check(number, operand, False)]
        # A comparison with a constant: the other side's value is reported, and compared outside the sandbox, where the
        # program cannot see or replace the constant.
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            compare = _OPERATORS[type(op)]
            if (right_value := evaluate_constant(right)) is not None:
                return [
                    _value_check(number, left, lambda value: bool(compare(value, right_value[0])), ast.unparse(right))
                ]
            if (left_value := evaluate_constant(left)) is not None:
                return [
                    _value_check(number, right, lambda value: bool(compare(left_value[0], value)), ast.unparse(left))
                ]

    return [_truth_check(number, test, True)]


def _truth_check(number: int, test: ast.expr, wanted: bool) -> Check:
    """Return a check of whether an expression is true or false, as `wanted`."""
    # A call of the program itself cannot be forged: the program decides what it returns anyway.
    root = re.match(r"\w+", ast.unparse(test)) if isinstance(test, ast.Call) else None
    calls_program = root is not None and root.group() not in dir(builtins)
    return Check(
        number, ast.unparse(_Guard().visit(test)), "truth", lambda value: value is wanted, in_process=not calls_program
    )


def _value_check(number: int, node: ast.expr, right: Callable[[Value], bool], expected: str) -> Check:
    """Return a check of an expression's value. For `abs(value - constant)` it is the value, without the constant."""
    match node:
        case ast.Call(func=ast.Name("abs"), args=[ast.BinOp(left=first, op=ast.Sub(), right=second)], keywords=[]):
            for node_of_program, other in ((first, second), (second, first)):
                if (centre := evaluate_constant(other)) is not None:
                    distance = partial(lambda centre, value: right(abs(value - centre)), centre[0])
                    return Check(number, ast.unparse(node_of_program), "value", distance, expected)
    return Check(number, ast.unparse(node), "value", right, expected)


class _Guard(ast.NodeTransformer):
    """AST transformer that replaces comparisons in a test by harness calls, which call no methods of the program's
    objects."""

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """Rewrite `a == b` as `__compare__(a, ('==', b))`."""
        self.generic_visit(node)
        signs = [
            ast.Tuple([ast.Constant(_SIGNS[type(sign)]), right], ast.Load())
            for sign, right in zip(node.ops, node.comparators, strict=True)
        ]
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
