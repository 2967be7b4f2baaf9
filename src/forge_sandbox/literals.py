"""Python literals in text."""

from __future__ import annotations

import ast
import copy
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

# Python warns of odd syntax as it parses, once for each place: a program could fill the log.
warnings.filterwarnings("ignore", module="<model output>")

_LARGEST = 1 << 16  # bits of an integer

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def literal(text: str | ast.expr, fold: bool = True) -> tuple[Any] | None:
    """The value in a 1-tuple; None if it is not a literal.

    Args:
        fold: also accept `float("inf")` and arithmetic on small numbers.
    """
    try:
        tree = (
            ast.parse(text.strip(), "<model output>", mode="eval").body
            if isinstance(text, str)
            else copy.deepcopy(text)
        )
        tree = (_Folded() if fold else _Named()).visit(tree)
        return (ast.literal_eval(tree),)
    except (ValueError, SyntaxError, TypeError, ArithmeticError, MemoryError, RecursionError):
        return None


class _Named(ast.NodeTransformer):
    """`inf`, the repr of infinity."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(math.inf) if node.id == "inf" else node


class _Folded(_Named):
    def visit_Call(self, node: ast.Call) -> ast.expr:
        match node:
            case ast.Call(func=ast.Name("float"), args=[ast.Constant(str(text))], keywords=[]):
                return ast.Constant(float(text))
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        one, other = ast.literal_eval(self.visit(node.left)), ast.literal_eval(self.visit(node.right))
        holds = _ARITHMETIC.get(type(node.op))
        if holds is None or not all(isinstance(number, int | float | complex) for number in (one, other)):
            raise ValueError("not arithmetic on numbers")
        if isinstance(node.op, ast.Pow) and (abs(one) > 1e9 or abs(other) > 1024):
            raise ValueError("this power may be large")
        value = holds(one, other)
        if isinstance(value, int) and value.bit_length() > _LARGEST:
            raise ValueError("this integer is large")
        return ast.Constant(value)
