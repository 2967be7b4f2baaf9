"""Python literals: in what a program has answered, and in the tests of a data set."""

from __future__ import annotations

import ast
import warnings
from contextlib import suppress
from typing import Any

# The parser warns of odd syntax, once for each location: a program could fill the log.
warnings.filterwarnings("ignore", module="<model output>")

Value = Any  # of any literal

# Of which expressions a test's constants are made, as `-1`, `2 ** 10`, `[1, float("inf")]`.
_CONSTANT = (ast.Constant, ast.UnaryOp, ast.unaryop, ast.BinOp, ast.expr_context, ast.Call, ast.Name)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
MAX_EXPONENT = 1024  # larger powers could take minutes


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
        is_constant = all(isinstance(each, _CONSTANT + _OPERATORS + _DISPLAYS) for each in nodes)
        if names <= {"float", "inf", "set"} and is_small and is_constant:
            scope = {"__builtins__": {}, "float": float, "inf": float("inf"), "set": set}
            return (eval(compile(ast.Expression(node), "<test>", "eval"), scope),)
    return None
