"""Equality of two expressions by their values, as a program of `forge.rewards.rules.helper_process`.

Two expressions are equal if their values agree in DIGITS digits, relative to their size, at POINTS points, positive and
negative ones, so that sqrt(x^2) is not x. In expressions of real numbers, points where both are complex are left out.
If one of them has a decimal point, their values must agree within a tolerance instead.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import sympy
from sympy.core.function import AppliedUndef

Tree = list[Any]  # as of `expressions`
Expression = Any  # of sympy, which has no types

DIGITS = 30
EXACT = 10.0**-DIGITS
POINTS = 8
_ENORMOUS = 10**5  # larger exponents and arguments of factorials make expressions unequal without being computed


class _Different(Exception):
    """Signal that an expression has no computable value, so it equals no other."""


def _build_expression(tree: Tree) -> Expression:
    """Return a tree as an expression of sympy. _Different: it has no value, or one that is too large to compute."""
    kind, *arguments = tree
    if kind in ("number", "decimal"):
        return sympy.Rational(arguments[0])
    if kind == "name":
        return sympy.Symbol(arguments[0])
    if kind == "constant":
        return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "oo": sympy.oo}[arguments[0]]
    if kind == "latex":
        return _read_latex(arguments[0])

    # Huge powers and factorials are rejected before sympy computes them.
    name = arguments.pop(0) if kind in ("call", "apply") else ""
    operands = [_build_expression(argument) for argument in arguments]
    if kind == "apply":
        return sympy.Function(name)(*operands)
    if kind == "call":
        return _call_function(name, operands)
    if kind in ("power", "factorial") and operands[-1].is_number and abs(operands[-1]) > _ENORMOUS:
        raise _Different

    return _OPERATIONS[kind](*operands)


def _read_latex(text: str) -> Expression:
    """Return the value of LaTeX with sums, products, integrals or limits, by math-verify's parser.

    Raises:
        _Different: the parser cannot read it.
    """
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    # Its guesses are turned off: mixed numbers and sets have been read by `expressions`, and case distinguishes names.
    config = ConversionConfig(
        interpret_as_mixed_fractions=False, interpret_contains_as_eq=False, lowercase_symbols=False
    )
    try:
        expression = latex2sympy(text, normalization_config=None, conversion_config=config)
    except Exception as error:  # its grammar raises errors of many kinds
        raise _Different from error
    if not isinstance(expression, sympy.Expr):
        raise _Different
    return expression.subs({symbol: sympy.Symbol(symbol.name) for symbol in expression.free_symbols}).doit()


_OPERATIONS: dict[str, Callable[..., Expression]] = {
    "add": lambda *terms: sympy.Add(*terms),
    "negate": lambda x: -x,
    "multiply": lambda *factors: sympy.Mul(*factors),
    "divide": lambda x, y: x / y,
    "power": lambda x, exponent: _real_power(x, exponent),
    "root": lambda x, degree: _real_power(x, 1 / degree),
    "degree": lambda x: x * sympy.pi / 180,
    "factorial": lambda x: sympy.factorial(x),
    "binomial": lambda n, k: sympy.binomial(n, k),
    "abs": lambda x: sympy.Abs(x),
    "floor": lambda x: sympy.floor(x),
    "ceil": lambda x: sympy.ceiling(x),
}


def _real_power(x: Expression, exponent: Expression) -> Expression:
    """Return x to an exponent as a real number if there is one: with an odd denominator also for negative x."""
    if exponent.is_Rational and exponent.q > 1 and exponent.q % 2 and not x.has(sympy.I):
        return sympy.sign(x) ** exponent.p * sympy.Abs(x) ** exponent
    return x**exponent


def _call_function(name: str, operands: list[Expression]) -> Expression:
    """Return the value of a function by name; `log` and `lg` are to base 10. _Different: it is not supported."""
    if name in ("log", "lg"):
        return sympy.log(operands[0]) / sympy.log(10)
    if name == "log_base":
        return sympy.log(operands[1]) / sympy.log(operands[0])
    if name == "det":
        raise _Different
    if name in ("gcd", "lcm") and not all(operand.is_number for operand in operands):
        return sympy.Function(name)(*sorted(operands, key=str))
    names = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "ln": "log", "min": "Min", "max": "Max"}
    return getattr(sympy, names.get(name, name))(*operands)


def _has_decimal(tree: Tree) -> bool:
    return tree[0] == "decimal" or any(_has_decimal(argument) for argument in tree[1:] if isinstance(argument, list))


def are_equal(kind: str, answer: Tree, target: Tree, tolerance: float) -> bool:
    """Return whether two trees are equal, see `forge_math.symbolic.are_equivalent`."""
    try:
        answer_value, target_value = _build_expression(answer), _build_expression(target)
    except _Different:
        return False
    if answer_value.has(sympy.nan, sympy.zoo) or target_value.has(sympy.nan, sympy.zoo):
        return False
    is_exact = _has_decimal(answer) == _has_decimal(target)
    are_same = answer_value == target_value
    # Numbers need no points.
    if kind == "expression" and (are_same or (answer_value.is_Rational and target_value.is_Rational)):
        return bool(are_same) or (not is_exact and abs(answer_value - target_value) <= tolerance)
    return _agree_at_points(kind, answer_value, target_value, EXACT if is_exact else max(EXACT, tolerance))


def _agree_at_points(kind: str, answer: Expression, target: Expression, margin: float) -> bool:
    """Return whether two expressions agree at all points, within a relative margin.

    Equations and inequalities agree if they differ by the same factor at all points, a positive one for inequalities.
    """
    # A function without a definition, f(x), stands for a separate variable for each of its arguments.
    calls = sorted(answer.atoms(AppliedUndef) | target.atoms(AppliedUndef), key=str)
    names = {call: sympy.Symbol(f"value of {call}") for call in calls}
    answer, target = answer.subs(names), target.subs(names)
    symbols = sorted(answer.free_symbols | target.free_symbols, key=str)
    are_real = bool(symbols) and not (answer.has(sympy.I) or target.has(sympy.I))

    # At each point the values are equal, or their quotient is noted to be compared with that at the other points.
    factors = []
    for point in range(POINTS if symbols else 1):
        values = {symbol: _point_coordinate(index, point) for index, symbol in enumerate(symbols)}
        answer_at, target_at = (side.subs(values).evalf(DIGITS + 15) for side in (answer, target))
        is_pole = not (answer_at.is_finite and target_at.is_finite)
        if is_pole or (are_real and not (answer_at.is_real or target_at.is_real)):
            continue  # neither is defined there
        if kind == "expression" and abs(answer_at - target_at) > margin * min(1, abs(target_at)):
            return False

        if kind != "expression":
            if min(abs(answer_at), abs(target_at)) < EXACT:
                return False
            factors.append(answer_at / target_at)
        else:
            factors.append(sympy.Integer(1))

    if not factors or max(abs(factor - factors[0]) for factor in factors) > margin * abs(factors[0]):
        return False
    return kind != "inequality" or sympy.re(factors[0]) > abs(factors[0]) / 2


def _point_coordinate(index: int, point: int) -> Expression:
    """Return the value of variable number `index` at a point.

    Values are positive, negative, large and small in turn, with signs that differ from variable to variable, so that
    sqrt(x^2 y^2) is not xy. At the last two points they are whole numbers, for which (-1)^n is real.
    """
    if point >= POINTS - 2:
        return sympy.Integer((2, 3, 5, 4, 7, 6)[(index + point) % 6])
    value = sympy.Rational(7919 * (index + 3) * (point + 2) % 9973, 3001) + sympy.Rational(1, 7)
    exact = (value, -value, value * 997 + index, -value / 3, value / 5, -value * 131)[(index + point) % 6]
    return sympy.Float(exact, DIGITS + 30)  # sympy would try to factor powers of a rational number


@cache
def _load_sympy() -> None:
    half = ["root", ["number", "1/2"], ["number", "2"]]
    are_equal("expression", half, ["power", ["decimal", "0.5"], ["decimal", "0.5"]], 1e-6)


@cache
def _load_latex() -> None:
    are_equal("expression", ["latex", r"\int_0^1 x dx"], ["number", "1/2"], 0.0)


def prepare_question(line: str) -> None:
    """Load the libraries that a question needs, before its time limit starts.

    Args:
        line: the question as JSON, the arguments of `are_equal`.
    """
    _load_sympy()
    if '["latex"' in line:
        _load_latex()
