"""Parse the tokens of an expression to a tree of exact numbers, names and operations.

A tree is nested lists, which JSON can carry to the process that computes: ["number", "3/4"], ["decimal", "3/4"] for one
written with a point, ["name", "x_1"], ["constant", "pi"], and operations with their arguments.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import prod
from typing import Any

from .notation import FUNCTIONS, GREEK, Token, find_closing

Tree = list[Any]
_CONSTANTS = {r"\pi": "pi", r"\infty": "oo", "e": "e", "i": "i"}
_ACCENTS = frozenset(
    [r"\vec", r"\bar", r"\hat", r"\dot", r"\tilde", r"\textcircled", r"\mathbb", r"\angle", r"\triangle"]
)
# Letters that are functions before a bracket, as in f(x); with other letters, x(x + 1) is a product.
_APPLIED = frozenset(["f", "g", "h", "F", "G", "H", "P", r"\phi", r"\psi", r"\omega", r"\Gamma"])
_NAMES = GREEK | frozenset([r"\ell", r"\hbar", r"\emptyset"])
_COMMANDS = frozenset([r"\frac", r"\binom", r"\pi", r"\infty", r"\lfloor", r"\lceil"])
_BRACKETS = {"(": ")", "[": "]", "{": "}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_DEEPEST = 40  # nested operations, each of which takes up to seven nested calls to parse


class Unreadable(ValueError):
    """Error: the tokens are not one expression of the grammar."""


class Parser:
    """A recursive-descent parser of the tokens of one expression, with a method for each level of precedence.

    After `read`, `computed` is True for a calculation of numbers, such as 2 + 2 or 2(2), and False for a value; powers,
    roots and fractions are values.
    """

    def __init__(self, parts: Sequence[Token]) -> None:
        self._parts, self._position = parts, 0
        self._bars = self._depth = 0
        self.computed = False

    def read(self) -> Tree:
        """Return the tree of all tokens. Unreadable: they are not one expression."""
        tree = self._parse_sum()
        if self._position < len(self._parts):
            raise Unreadable(f"unexpected {self._parts[self._position].text!r} after an expression")
        return tree

    def _peek_token(self, ahead: int = 0) -> str:
        index = self._position + ahead
        return self._parts[index].text if index < len(self._parts) else ""

    def _take_token(self, text: str = "") -> Token:
        if self._position >= len(self._parts) or (text and self._peek_token() != text):
            raise Unreadable(f"{text or 'an expression'} is missing")
        self._position += 1
        return self._parts[self._position - 1]

    def _skip_token(self, text: str) -> bool:
        """Consume the next token if it is this one; return whether it was."""
        is_next = self._peek_token() == text
        self._position += is_next
        return is_next

    def _parse_sum(self) -> Tree:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise Unreadable("brackets nest too deeply")
        terms = [self._parse_argument(self._parse_product)]
        while self._peek_token() in ("+", "-"):
            signs = self._parse_sign()
            if self._peek_token() == "-":  # 14 + -3
                signs *= self._parse_sign()
            terms.append(self._apply_sign(self._parse_product(), signs))
            self.computed = self.computed or (is_numeric(terms[-1]) and is_numeric(terms[-2]))
        self._depth -= 1
        return terms[0] if len(terms) == 1 else ["add", *terms]

    def _parse_sign(self) -> int:
        """Consume one sign before a term, if there is one, and return -1 or 1."""
        is_negative = self._skip_token("-")
        if not is_negative:
            self._skip_token("+")
        return -1 if is_negative else 1

    @staticmethod
    def _apply_sign(tree: Tree, sign: int) -> Tree:
        return tree if sign > 0 else ["negate", tree]

    def _parse_product(self) -> Tree:
        factors = [self._parse_power()]
        numeric = is_numeric(factors[0])
        while True:
            # An operator, or a factor that follows without one.
            operator = self._peek_token()
            if operator in ("*", "/", r"\div"):
                self._take_token()
                factor = self._parse_argument(self._parse_power)
                if operator != "/" and numeric and is_numeric(factor):
                    self.computed = self.computed or operator != "*" or not is_power_of_ten(factor)
            elif self._starts_factor():
                if (mixed := self._parse_mixed(factors[-1])) is not None:
                    factors[-1] = mixed
                    continue
                before = self._parts[self._position - 1].kind
                exponent = self._parts[self._position - 2].text == "^"  # 2^n 3^n
                if self._parts[self._position].kind == "number" and before in ("number", "letter") and not exponent:
                    raise Unreadable("two adjacent numbers, or a number after a name, are ambiguous")
                factor = self._parse_power()
                self.computed = self.computed or (is_rational(factors[-1]) and is_rational(factor))
            else:
                return _multiply_factors(factors)

            numeric = numeric and is_numeric(factor)
            if operator in ("/", r"\div"):
                factors = [["divide", _multiply_factors(factors), factor]]
            else:
                factors.append(factor)

    def _parse_mixed(self, integer: Tree) -> Tree | None:
        """Return the mixed number of the last token and a proper fraction after it, 1\\frac{1}{2} or 1 1/2, or None."""
        if integer[0] != "number" or self._parts[self._position - 1].text != integer[1]:
            return None
        next_parts = self._parts[self._position : self._position + 3]
        texts = [part.text for part in next_parts]

        # As a command, or as figures after a space.
        if texts[:1] == [r"\frac"]:
            top, bottom = texts[1:] if len(texts) == 3 else ("", "")
        elif texts[1:2] == ["/"] and next_parts[0].spaced:
            top, bottom = texts[0], texts[-1]
        else:
            return None

        if not (top.isdigit() and bottom.isdigit()) or int(top) >= int(bottom) or self._peek_token(3) in ("^", "!"):
            return None
        self._position += 3
        return ["number", str(Fraction(integer[1]) + Fraction(int(top), int(bottom)))]

    def _starts_factor(self) -> bool:
        if self._position >= len(self._parts):
            return False
        # A bar outside of bars opens, one inside closes.
        token = self._parts[self._position]
        if token.text == "|":
            return not self._bars
        if token.kind in ("number", "letter"):
            return True
        if token.kind == "command":
            return token.text in _NAMES | _ACCENTS | _COMMANDS or token.text[1:] in FUNCTIONS
        return token.text in _BRACKETS

    def _parse_power(self) -> Tree:
        tree = self._parse_base()
        while True:
            # Signs after a base: a power or degrees, a factorial, percent.
            if self._skip_token("^"):
                tree = ["degree", tree] if self._skip_token(r"\circ") else ["power", tree, self._parse_exponent()]
            elif self._skip_token("!"):
                if self._peek_token() == "!":
                    raise Unreadable("double factorials are not supported")
                tree = ["factorial", tree]
            elif self._skip_token("%"):
                tree = ["divide", tree, ["number", "100"]]
            else:
                return tree

    def _parse_exponent(self) -> Tree:
        sign = self._parse_sign()
        tree = self._parse_base()
        if self._skip_token("^"):
            tree = ["power", tree, self._parse_exponent()]
        elif self._skip_token("!"):
            tree = ["factorial", tree]
        return self._apply_sign(tree, sign)

    def _parse_base(self) -> Tree:
        token = self._take_token()
        text = token.text
        if token.kind == "number":
            if self._peek_token() == "_":
                raise Unreadable("a number with an index is not supported")
            return _make_number(text)
        if text in _BRACKETS:
            (inner,) = self._parse_brackets(text, several=False)
            return [text[2:], inner] if text[0] == "\\" else inner
        if text == "|":
            self._bars += 1
            inner = self._parse_sum()
            self._take_token("|")
            self._bars -= 1
            return ["abs", inner]

        # Commands take their arguments as tokens or groups.
        if text in (r"\frac", r"\binom"):
            return ["divide" if text == r"\frac" else "binomial", self._parse_argument(), self._parse_argument()]
        if text == r"\sqrt":
            # The degree of a root is optional, in brackets.
            degree: Tree = ["number", "2"]
            if self._skip_token("["):
                degree = self._parse_sum()
                self._take_token("]")
            return ["root", self._parse_argument(), degree]
        if text[1:] in FUNCTIONS and token.kind == "command":
            return self._parse_function(text[1:])
        return self._parse_name(token)

    def _parse_brackets(self, opening: str, several: bool) -> list[Tree]:
        """Return the sum in brackets, or several sums separated by commas. Bars inside have their own nesting."""
        bars, self._bars = self._bars, 0
        sums = [self._parse_sum()]
        while several and self._skip_token(","):
            sums.append(self._parse_sum())
        self._take_token(_BRACKETS[opening])
        self._bars = bars
        return sums

    def _parse_argument(self, read: Callable[[], Tree] | None = None) -> Tree:
        """Return the argument of a command such as \\frac, with its sign: by default a token or a group in braces."""
        sign = self._parse_sign()
        return self._apply_sign((read or self._parse_base)(), sign)

    def _parse_function(self, name: str) -> Tree:
        # A power and a base may stand before the argument: sin^2 x, log_2 x.
        power: Tree | None = None
        base: Tree | None = None
        for _ in range(2):
            if self._skip_token("^"):
                power = self._parse_exponent()
            elif name == "log" and self._skip_token("_"):
                base = self._parse_argument()

        function = [name] if base is None else ["log_base", base]
        tree = ["call", *function, *self._parse_operands()]
        if power == ["negate", ["number", "1"]] and name in ("sin", "cos", "tan"):
            return ["call", f"arc{name}", *tree[2:]]
        return tree if power is None else ["power", tree, power]

    def _parse_operands(self) -> list[Tree]:
        """Return the operands of a function: those in brackets, or the product up to the next function or operator."""
        if self._peek_token() in ("(", "{"):
            return self._parse_brackets(self._take_token().text, several=True)
        if self._peek_token() == "-":
            return [self._parse_argument(self._parse_product)]
        factors = [self._parse_power()]
        while (
            self._starts_factor()
            and self._peek_token() not in ("(", "[", "{", "|")
            and self._peek_token()[1:] not in FUNCTIONS - {"sqrt"}
        ):
            factors.append(self._parse_power())
        return [_multiply_factors(factors)]

    def _parse_name(self, token: Token) -> Tree:
        text = token.text
        if text in _ACCENTS:
            text += self._parse_spelled(several=text in (r"\angle", r"\triangle"))
        elif token.kind != "letter" and text not in _NAMES and text not in _CONSTANTS:
            raise Unreadable(f"{text!r} is not a name")

        # An index or a prime belongs to the name.
        is_plain = True
        while self._peek_token() in ("_", "'"):
            text += self._take_token().text
            is_plain = False
            if text[-1] == "_":
                text += self._parse_spelled()

        if self._peek_token() == "(" and text.rstrip("'").partition("_")[0] in _APPLIED:
            return ["apply", text, *self._parse_operands()]
        return ["constant", _CONSTANTS[text]] if is_plain and text in _CONSTANTS else ["name", text]

    def _parse_spelled(self, several: bool = False) -> str:
        """Return the text of an index or under an accent: a token, a group, or with `several` all following letters."""
        if self._peek_token() == "{":
            end = find_closing(self._parts, self._position)
            inner = "".join(_is_index_token(part) for part in self._parts[self._position + 1 : end])
            self._position = end + 1
            return inner if several or len(inner) < 2 else f"{{{inner}}}"
        text = _is_index_token(self._take_token())
        if len(text) > 1 and not several:
            return f"{{{text}}}"
        while several and self._position < len(self._parts) and self._parts[self._position].kind in ("letter", "word"):
            text += self._take_token().text
        return text


def parse_expression(parts: Sequence[Token]) -> tuple[Tree, bool]:
    """Return the tree of an expression, and whether it is a calculation of numbers rather than a value.

    Unreadable: the tokens are not one expression.
    """
    parser = Parser(parts)
    try:
        tree = parser.read()
    except RecursionError:
        raise Unreadable("operations nest too deeply") from None
    # Limit the depth of the tree, as every function on it recurses: walk it level by level.
    layer = [tree]
    for _ in range(_DEEPEST):
        layer = [argument for node in layer for argument in node[1:] if isinstance(argument, list)]
    if layer:
        raise Unreadable("operations nest too deeply")
    return tree, parser.computed


def _is_index_token(token: Token) -> str:
    """Return the text of a token in an index, where max is a word and not a function."""
    return token.text[1:] if token.text[1:] in FUNCTIONS else token.text


def _multiply_factors(factors: list[Tree]) -> Tree:
    return factors[0] if len(factors) == 1 else ["multiply", *factors]


def _make_number(text: str) -> Tree:
    if text.endswith(")"):
        # A repeating decimal as a fraction.
        digits, period = text[:-1].split("(")
        integer, fixed = digits.split(".")
        value = Fraction(
            int(integer + fixed + period) - int(integer + fixed or "0"), 10 ** len(fixed) * (10 ** len(period) - 1)
        )
        return ["number", str(value)]
    if len(text.lower().partition("e")[2]) > 4:
        raise Unreadable("exponents of more than three digits are not supported")
    return ["number" if text.isdigit() else "decimal", str(Fraction(text.rstrip(".")))]


def is_numeric(tree: Tree) -> bool:
    """Return whether a tree has numbers and operations only: no names, constants or functions without a definition."""
    is_number = tree[0] not in ("name", "constant", "apply")
    return is_number and all(is_numeric(argument) for argument in tree[1:] if isinstance(argument, list))


def has_names(tree: Tree) -> bool:
    """Return whether a tree has variables, functions without a definition, or the imaginary unit."""
    is_name = tree[0] in ("name", "apply") or tree == ["constant", "i"]
    return is_name or any(has_names(argument) for argument in tree[1:] if isinstance(argument, list))


def is_rational(tree: Tree) -> bool:
    """Return whether a tree is a number, a fraction of numbers, or either with a sign."""
    return tree[0] in ("number", "decimal") or (tree[0] in ("negate", "divide") and all(map(is_rational, tree[1:])))


def is_power_of_ten(tree: Tree) -> bool:
    """Return whether a tree is a power of ten, 10^n."""
    return tree[0] == "power" and tree[1] == ["number", "10"] and is_rational(tree[2])


def literal_value(tree: Tree) -> Fraction | None:
    """Return the value of one number, perhaps with a sign, as a fraction or times a power of ten; None for others."""
    if tree[0] == "negate":
        value = literal_value(tree[1])
        return None if value is None else -value
    is_scaled = tree[0] == "multiply" and len(tree) == 3 and is_rational(tree[1]) and is_power_of_ten(tree[2])
    is_plain = tree[0] in ("number", "decimal") or (tree[0] == "divide" and is_rational(tree))
    return compute_value(tree) if is_plain or is_scaled or is_power_of_ten(tree) else None


def compute_value(tree: Tree) -> Fraction | None:
    """Return the exact value of sums, products, quotients and powers of numbers; None for any other tree.

    >>> compute_value(["divide", ["number", "1"], ["add", ["number", "1"], ["number", "2"]]])
    Fraction(1, 3)
    """
    kind, *arguments = tree
    if kind in ("number", "decimal"):
        return Fraction(arguments[0])
    values = [compute_value(argument) for argument in arguments] if kind in _ARITHMETIC else [None]
    return None if None in values else _ARITHMETIC[kind](*values)


def _raise_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Return a power within bounds, so that no number becomes too large to compare; None beyond them."""
    is_small = abs(exponent) <= 999 and abs(base.numerator) <= 10**60
    is_defined = exponent.denominator == 1 and (base != 0 or exponent >= 0)
    return base ** int(exponent) if is_small and is_defined else None


_ARITHMETIC: dict[str, Callable[..., Fraction | None]] = {
    "add": lambda *terms: sum(terms, Fraction(0)),
    "negate": lambda term: -term,
    "multiply": lambda *factors: prod(factors, start=Fraction(1)),
    "divide": lambda term, divisor: term / divisor if divisor else None,
    "power": _raise_power,
}
