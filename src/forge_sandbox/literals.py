"""Python literals in text."""

from __future__ import annotations

import ast
import copy
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

# The parser warns of odd syntax, once for each location: a program could fill the log.
warnings.filterwarnings("ignore", module="<model output>")

MAX_BITS = 1 << 16  # of an integer: arithmetic on larger ones could take minutes

Value = Any  # of any literal

# Arithmetic of constants, as in `1e-9 * 2` or `-1`.
_ARITHMETIC: dict[type[ast.operator], Callable[[Value, Value], Value]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def literal(text: str | ast.expr, fold: bool = True) -> tuple[Value] | None:
    """Return the value in a 1-tuple; None if the text is not a literal.

    Args:
        fold: also accept `float("inf")` and arithmetic on small numbers.
    """
    try:
        tree = (
            ast.parse(text.strip(), "<model output>", mode="eval").body
            if isinstance(text, str)
            else copy.deepcopy(text)
        )
        tree = (_Fold() if fold else _ReplaceNames()).visit(tree)
        return (ast.literal_eval(tree),)
    except (ValueError, SyntaxError, TypeError, ArithmeticError, MemoryError, RecursionError):
        return None


class _ReplaceNames(ast.NodeTransformer):
    """Replaces `inf`, the repr of infinity, which is not a literal."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(math.inf) if node.id == "inf" else node


class _Fold(_ReplaceNames):
    """Also evaluates `float("inf")` and arithmetic on small numbers."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        match node:
            case ast.Call(func=ast.Name("float"), args=[ast.Constant(str(text))], keywords=[]):
                return ast.Constant(float(text))
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        left = ast.literal_eval(self.visit(node.left))
        right = ast.literal_eval(self.visit(node.right))
        operation = _ARITHMETIC.get(type(node.op))
        if operation is None or not all(isinstance(number, int | float | complex) for number in (left, right)):
            raise ValueError("not arithmetic on numbers")
        if isinstance(node.op, ast.Pow) and (abs(left) > 1e9 or abs(right) > 1024):
            raise ValueError("this power may be large")
        value = operation(left, right)
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise ValueError("this integer is large")
        return ast.Constant(value)
