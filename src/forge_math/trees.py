"""Trees of expressions: whether one is a number or has names, and its value."""

from __future__ import annotations

from fractions import Fraction
from math import prod
from typing import Any

Tree = list[Any]


def is_numeric(tree: Tree) -> bool:
    """Whether it has numbers alone."""
    if tree[0] in ("name", "constant", "apply"):
        return False
    return all(is_numeric(argument) for argument in tree[1:] if isinstance(argument, list))


def has_names(tree: Tree) -> bool:
    """Whether it has variables, or the imaginary unit."""
    if tree[0] in ("name", "apply") or tree == ["constant", "i"]:
        return True
    return any(has_names(argument) for argument in tree[1:] if isinstance(argument, list))


def is_rational(tree: Tree) -> bool:
    """Whether it is a number, a fraction of numbers, or either with a sign."""
    if tree[0] in ("negate", "divide"):
        return all(map(is_rational, tree[1:]))
    return tree[0] in ("number", "decimal")


def is_power_of_ten(tree: Tree) -> bool:
    """Whether it is a power of ten."""
    return tree[0] == "power" and tree[1] == ["number", "10"] and is_rational(tree[2])


def literal(tree: Tree) -> Fraction | None:
    """The value of one number as it is written: with a sign, as a fraction, times a power of ten; None of another."""
    if tree[0] == "negate":
        value = literal(tree[1])
        return None if value is None else -value
    is_scaled = tree[0] == "multiply" and len(tree) == 3 and is_rational(tree[1]) and is_power_of_ten(tree[2])
    is_plain = tree[0] in ("number", "decimal") or (tree[0] == "divide" and is_rational(tree))
    return arithmetic(tree) if is_plain or is_scaled or is_power_of_ten(tree) else None


def arithmetic(tree: Tree) -> Fraction | None:
    """The exact value of sums, products, quotients and powers of numbers; None of another tree."""
    kind, *arguments = tree
    if kind in ("number", "decimal"):
        return Fraction(arguments[0])
    if kind not in ("add", "negate", "multiply", "divide", "power"):
        return None
    values = [arithmetic(argument) for argument in arguments]
    if any(value is None for value in values):
        return None
    # Powers within bounds, so that no number becomes too large to compare.
    first, *operands = [value for value in values if value is not None]
    if kind == "negate":
        return -first
    if kind == "add":
        return first + sum(operands)
    if kind == "multiply":
        return prod(operands, start=first)
    if kind == "divide":
        return first / operands[0] if operands[0] else None
    if (
        operands[0].denominator != 1
        or abs(operands[0]) > 999
        or (not first and operands[0] < 0)
        or abs(first.numerator) > 10**60
    ):
        return None
    return first ** int(operands[0])
