"""Sums, differences and products of whole numbers: exercises for a policy that has a calculator."""

from __future__ import annotations

import ast
import operator
from random import Random

from apps.toys.tasks import ProceduralTask, Row

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_PATTERNS = ("+*", "*+", "-*", "*-", "**", "+-", "-+")
_LONGEST, _MOST = 4096, 32  # characters, operators


class Expression(ProceduralTask):
    """Three numbers of `low` to `high` digits under two operators, such as "12+34*5"; and its value."""

    name = "expression"

    def draw(self, rng: Random, low: int, high: int) -> Row:
        # 0 and 1 would make some of them trivial.
        lengths = [rng.randint(low, high) for _ in range(3)]
        numbers = [rng.randrange(max(2, 10 ** (digits - 1)), 10**digits) for digits in lengths]
        pattern = rng.choice(_PATTERNS)
        text = f"{numbers[0]}{pattern[0]}{numbers[1]}{pattern[1]}{numbers[2]}"
        return Row(text, str(evaluate(text)))

    def size(self, low: int, high: int) -> int:
        return len(_PATTERNS) * (10**high - 10 ** (low - 1)) ** 3


def steps(text: str) -> list[str]:
    """The calculations of two numbers that lead to the value of an expression, in order: products first.
    ValueError as `evaluate`."""
    made: list[str] = []
    _value(_parsed(text), made)
    return made


def evaluate(text: str) -> int:
    """The value of an expression. ValueError: it is something else than whole numbers under +, - and *, or too long."""
    return _value(_parsed(text), [])


def _parsed(text: str) -> ast.expr:
    if len(text) > _LONGEST or sum(map(text.count, "+-*")) > _MOST:
        raise ValueError(f"an expression may have {_LONGEST} characters and {_MOST} operators, this one has more")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise ValueError(f"{text!r} cannot be read") from None


def _value(node: ast.expr, made: list[str]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, made)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, made), _value(node.right, made)
        sign = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}[type(node.op)]  # type: ignore[index]
        made.append(f"{left}{sign}{right}")
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError("only integers, +, - and * are allowed")
