"""Parse answers to values: expressions with units, and tuples, intervals, sets, lists, matrices, equations of them."""

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from .expressions import Tree, Unreadable, literal_value, parse_expression
from .notation import Token, find_closing, join_spelling, tokenize_answer, word_set
from .units import Unit, with_unit

EQUALITIES = frozenset(["=", r"\approx"])
ORDER = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq"}
_RELATIONS = frozenset(
    [*EQUALITIES, *ORDER, r"\neq", r"\in", r"\notin", r"\subset", r"\subseteq", r"\supset", r"\supseteq"]
)
_RELATIONS |= frozenset([r"\equiv", r"\sim", r"\perp", r"\parallel", r"\to", r"\Rightarrow"])
# Words that change the value that a name stands for, or deny it.
_CHANGES = word_set(
    "not no never isn neither half twice double triple third quarter square squared cube cubed reciprocal inverse sum"
    " product difference quotient times negative opposite root minus plus ratio twofold"
)
_HEDGES = word_set("about approximately exactly only around roughly therefore thus indeed simply just then")
_NUMERALS = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_REAL_LINE = {("R",), ("all", "real", "numbers"), ("all", "reals"), ("set", "of", "real", "numbers")}
_INFINITY, _MINUS = Token(r"\infty", "command"), Token("-", "symbol")


class Value(NamedTuple):
    """The meaning of tokens (`parts`). The other fields depend on `kind`:

    "expression": `tree` and `unit`; `computed` is True for a calculation of numbers.
    "based": a number in a base; `ends` are its digits and the base.
    "list", "set": `items`; `ends` of a list is ("or",) if its values are alternatives.
    "tuple": `items`, with its brackets as `ends`; also intervals.
    "union": `items`, with the sign between them as `ends`; also intersections.
    "matrix": `items` are its rows, `ends` its environment.
    "relation": `items` are the sides, `ends` the relations between them.
    "where": `items` are a value and its condition. "such": `items` are a name and the condition of a set.
    "text": anything else.
    """

    kind: str
    parts: tuple[Token, ...]
    items: tuple["Value", ...] = ()
    ends: tuple[str, ...] = ()
    tree: Tree | None = None
    unit: Unit = ()
    computed: bool = False


@lru_cache(maxsize=1024)
def read_value(text: str) -> Value:
    """Return the value of an answer; a text if it nests too deeply."""
    parts = tokenize_answer(text)
    try:
        return value_of(parts)
    except RecursionError:
        return Value("text", parts)


def value_of(parts: Sequence[Token]) -> Value:
    """Return the value of tokens, by the first reader that recognises their structure; otherwise a text."""
    while parts and parts[0].kind == "word" and parts[0].text.lower() in _HEDGES:
        parts = parts[1:]
    while len(parts) > 1 and parts[0].text == "{" and find_closing(parts, 0) == len(parts) - 1:
        parts = parts[1:-1]
    parts = tuple(parts)

    for reader in (
        _read_signs,
        _read_reversed,
        _read_list,
        _read_relation,
        _read_union,
        _read_bracketed,
        _read_matrix,
        _read_based,
        _read_ratio,
        _read_condition,
    ):
        if (value := reader(parts)) is not None:
            return value

    return _read_expression(parts)


def split_tokens(
    parts: Sequence[Token], separators: Collection[str], words: Collection[str] = ()
) -> tuple[list[tuple[Token, ...]], list[str]]:
    """Return the pieces of tokens between separators, and the text of each separator.

    Separators inside brackets and environments do not count.

    Args:
        separators: texts of tokens.
        words: texts of word tokens in lower case that separate too.
    """
    pieces: list[tuple[Token, ...]] = []
    between: list[str] = []
    depth = start = 0
    for index, token in enumerate(parts):
        depth += token.text in ("(", "[", "{", r"\{", r"\begin")
        depth -= token.text in (")", "]", "}", r"\}", r"\end")
        if depth <= 0 and (token.text in separators or (token.kind == "word" and token.text.lower() in words)):
            pieces.append(tuple(parts[start:index]))
            between.append(token.text)
            start = index + 1
    return [*pieces, tuple(parts[start:])], between


def _read_signs(parts: tuple[Token, ...]) -> Value | None:
    """Return the list of both values of tokens with a plus-minus sign: 1 ± 2 is 1 + 2, 1 - 2; None without one."""
    if not any(token.text in (r"\pm", r"\mp") for token in parts):
        return None
    both = ({r"\pm": "+", r"\mp": "-"}, {r"\pm": "-", r"\mp": "+"})
    spelled = ([token._replace(text=signs.get(token.text, token.text)) for token in parts] for signs in both)
    return Value("list", parts, tuple(map(value_of, spelled)))


def _read_list(parts: tuple[Token, ...]) -> Value | None:
    """Return a list of values between commas, "and" or "or"; None if there is no separator."""
    pieces, separators = split_tokens(parts, (",", ";", r"\vee"), ("and", "or"))
    if not separators:
        return None
    # In "1, 2, or 3" the piece between the comma and the word is empty: remove it.
    words = [separator for separator in separators if separator.isalpha() or separator == r"\vee"]
    for index in range(len(separators) - 1, 0, -1):
        if separators[index] in words and separators[index - 1] == "," and not pieces[index]:
            del pieces[index]
    if not all(pieces):
        return Value("text", parts)
    values = map(value_of, pieces)
    items = tuple(item for value in values for item in (value.items if value.kind == "list" else (value,)))
    return Value("list", parts, items, ("or",) if any(word.lower() != "and" for word in words) else ())


def _read_relation(parts: tuple[Token, ...]) -> Value | None:
    """Return an equation, an inequality or another relation; None without a sign of one."""
    sides, relations = split_tokens(parts, _RELATIONS)
    if not relations:
        return None
    if any(not side for side in sides):
        return Value("text", parts)
    return Value("relation", parts, tuple(map(value_of, sides)), tuple(relations))


def _read_union(parts: tuple[Token, ...]) -> Value | None:
    for sign in (r"\cup", r"\cap", r"\setminus"):
        pieces, separators = split_tokens(parts, (sign,))
        if separators:
            return Value("tuple" if sign == r"\setminus" else "union", parts, tuple(map(value_of, pieces)), (sign,))
    return None


def _read_bracketed(parts: tuple[Token, ...]) -> Value | None:
    """Return a tuple, an interval or a set in brackets, or the value that brackets are around; None without them."""
    if len(parts) < 2:
        return Value("text", parts) if not parts else None
    first, last = parts[0].text, parts[-1].text
    inner = parts[1:-1]
    if first == r"\langle" and last == r"\rangle":
        first, last = "(", ")"
    elif first not in ("(", "[", r"\{") or find_closing(parts, 0) != len(parts) - 1:
        return None

    if first == r"\{":
        return _read_set(parts, inner)

    # Brackets around one value are none.
    pieces, separators = split_tokens(inner, (",", ";"))
    if not separators:
        return value_of(inner) if inner and (first, last) in (("(", ")"), ("[", "]")) else Value("text", parts)
    return Value("tuple", parts, tuple(map(value_of, pieces)), (first, last))


def _read_reversed(parts: tuple[Token, ...]) -> Value | None:
    """Return an interval whose open ends are written with outward brackets, as ]0, 1[; None for other tokens."""
    if len(parts) < 5 or (parts[0].text, parts[-1].text) not in (
        ("]", "["),
        ("]", "]"),
        ("[", "["),
        ("]", ")"),
        ("(", "["),
    ):
        return None
    pieces, separators = split_tokens(parts[1:-1], (",", ";"))
    if len(separators) != 1 or any(token.text in "[]" for token in parts[1:-1]):
        return None
    ends = (parts[0].text.replace("]", "("), parts[-1].text.replace("[", ")"))
    return Value("tuple", parts, tuple(map(value_of, pieces)), ends)


def _read_set(parts: tuple[Token, ...], inner: tuple[Token, ...]) -> Value:
    """Return a set by its elements, {1, 2}, or by a condition, {x | x > 0}; `inner` is what its braces contain."""
    pieces, bars = split_tokens(inner, ("|", ":"))
    if len(bars) == 1:
        name = value_of(split_tokens(pieces[0], (r"\in",))[0][0])
        condition_set = Value("such", parts, (name, value_of(pieces[1])))
        return as_interval(condition_set) or condition_set
    if not inner:
        return Value("expression", parts, tree=["name", r"\emptyset"])
    members = value_of(inner)
    return Value("set", parts, members.items if members.kind == "list" else (members,))


def _read_matrix(parts: tuple[Token, ...]) -> Value | None:
    if len(parts) < 4 or parts[0].text != r"\begin" or parts[-2].text != r"\end" or parts[1].text != parts[-1].text:
        return None
    rows = [row for row in split_tokens(parts[2:-2], (r"\\",))[0] if row]
    items = tuple(Value("tuple", row, tuple(map(value_of, split_tokens(row, ("&",))[0]))) for row in rows)
    return Value("matrix", parts, items, (parts[1].text,))


def _read_based(parts: tuple[Token, ...]) -> Value | None:
    """Return a number with its base, as 1A_{16} or (12)_8; None for other tokens."""
    if len(parts) < 3 or parts[-2].text != "_":
        return None
    base = _NUMERALS.get(parts[-1].text, parts[-1].text)
    digits = "".join(token.text for token in parts[:-2]).removeprefix("(").removesuffix(")").upper()
    is_number = base.isdigit() and re.fullmatch(r"-?(?=[\dA-F]*\d)[\dA-F]+(?:\.[\dA-F]+)?", digits)
    if not is_number or (base != "16" and not digits.lstrip("-")[0].isdigit()):
        return None
    return Value("based", parts, ends=(digits.lstrip("0") or "0", base))


def _read_ratio(parts: tuple[Token, ...]) -> Value | None:
    """Return a ratio, 3:4, as the fraction of its terms, and 1:2:3 as a tuple of the first one's fractions of the
    others; None for other tokens."""
    pieces, colons = split_tokens(parts, (":",))
    terms = [_read_expression(piece) for piece in pieces if piece]
    has_all = colons and len(terms) > len(colons) and all(term.tree is not None for term in terms)
    if not has_all or len({term.unit for term in terms}) > 1:
        return None
    fractions = [Value("expression", parts, tree=["divide", terms[0].tree, term.tree]) for term in terms[1:]]
    return fractions[0] if len(fractions) == 1 else Value("tuple", parts, tuple(fractions), (":",))


def _read_condition(parts: tuple[Token, ...]) -> Value | None:
    """Return a value with a condition in brackets after it, as \\frac{1}{x}(x > 0); None for other tokens."""
    if len(parts) < 5 or parts[-1].text != ")":
        return None
    # Find the bracket that the last one closes, from the end. After another bracket it would be a factor: (x)(y).
    deep = accumulate((part.text in (")", "]", "}")) - (part.text in ("(", "[", "{")) for part in parts[:0:-1])
    start = next((len(parts) - count for count, depth in enumerate(deep, 1) if not depth), 1)
    if parts[start].text != "(" or parts[start - 1].text == ")":
        return None
    condition = value_of(parts[start + 1 : -1])
    return Value("where", parts, (value_of(parts[:start]), condition)) if condition.kind == "relation" else None


def _read_expression(parts: tuple[Token, ...]) -> Value:
    """Return an expression with its unit, or a text if the tokens are no expression."""
    # First without the unit, then with all tokens, as what looks like a unit may be variables.
    core, unit = with_unit(parts)
    for pieces, its_unit in ((core, unit), (list(parts), ())):
        scale = SCALES.get(pieces[-1].text.lower()) if len(pieces) > 1 else None
        try:
            tree, computed = parse_expression(pieces if scale is None else pieces[:-1])
        except Unreadable:
            continue

        if scale is not None:
            if (value := literal_value(tree)) is None:
                continue
            tree = ["number", str(value * scale)]

        return Value("expression", parts, tree=tree, unit=its_unit, computed=computed)

    return Value("text", parts)


def is_name(value: Value) -> bool:
    """Return whether a value is a name, so that an equation with it as a side gives its value.

    Names are x, a_n, f(2), P(A), AB, |AB|, (x, y) and "the area", but not 2x, xy, x(x + 1) or "half of x".
    """
    texts = [token.text for token in value.parts]
    if any(token.kind == "word" and token.text.lower() in _CHANGES for token in value.parts):
        return False
    if len(texts) > 2 and texts[0] == "|" == texts[-1] and "".join(texts[1:-1]).isupper():
        return True
    if value.kind == "union" or (value.kind == "tuple" and value.ends in (("(", ")"), (r"\cap",))):
        return all(map(is_name, value.items))

    # With words it is a description of a quantity, perhaps with its letter: the area A.
    symbols = [token for token in value.parts if token.kind != "word"]
    if len(symbols) < len(texts):
        return len(symbols) <= 4 and all(token.kind == "letter" or token.text in "()'-" for token in symbols)

    # A function of something, an inverse, or a plain name.
    tree = value.tree
    if tree is None or value.computed:
        return False
    if tree[0] == "apply" or (tree[0] == "multiply" and "".join(texts).isalpha() and "".join(texts).isupper()):
        return True
    inverse = texts[1:6] == ["^", "{", "-", "1", "}"]  # of a function or a matrix
    if inverse and (texts[0].isupper() or texts[6:7] == ["("]):
        return True
    call = re.fullmatch(r"([A-Z]\w*)\((.*)\)", "".join(texts))  # E(X), Var(X), S(n)

    return tree[0] == "name" or (call is not None and call[1] not in call[2])


def as_interval(value: Value) -> Value | None:
    """Return an inequality, a set of one variable or the real line as an interval or a union of intervals; None for
    other values."""
    if join_spelling(value.parts) in _REAL_LINE:
        bounds = (_read_expression((_MINUS, _INFINITY)), _read_expression((_INFINITY,)))
        return Value("tuple", value.parts, bounds, ("(", ")"))

    if value.kind == "such":
        name, condition = value.items
        # {x | condition of x}: the condition's interval.
        interval = as_interval(condition)
        return interval if interval is not None and _to_text(name) == _bounded_variable(condition) else None

    if value.kind == "list" and value.ends == ("or",):
        # x < 1 or x > 3: a union, if all of them bound the same variable.
        members = tuple(filter(None, map(as_interval, value.items)))
        if len(members) < len(value.items) or len({_bounded_variable(item) for item in value.items}) > 1:
            return None
        return Value("union", value.parts, members, (r"\cup",))

    if value.kind == "relation" and value.ends == (r"\in",) and is_name(value.items[0]):
        return value.items[1] if value.items[1].kind in ("tuple", "union", "set") else as_interval(value.items[1])

    # An inequality of one letter, with one bound or two.
    variable = _bounded_variable(value) if value.kind == "relation" else None
    if variable is None or not set(value.ends) <= ORDER.keys():
        return None
    sides, relations = order_sides(value)
    if not all(relation in ("<", r"\leq") for relation in relations) or len(sides) > 3:
        return None
    if len(sides) == 2 and _to_text(sides[0]) == variable:
        sides, relations = (_read_expression((_MINUS, _INFINITY)), *sides), ("<", *relations)
    elif len(sides) == 2:
        sides, relations = (*sides, _read_expression((_INFINITY,))), (*relations, "<")

    if _to_text(sides[1]) != variable:
        return None
    ends = ("(" if relations[0] == "<" else "[", ")" if relations[1] == "<" else "]")
    return Value("tuple", value.parts, (sides[0], sides[2]), ends)


def order_sides(value: Value) -> tuple[tuple[Value, ...], tuple[str, ...]]:
    """Return the sides and the relations of an inequality, turned round if it falls: 3 > x becomes x < 3."""
    if value.ends[0] in (">", r"\geq"):
        return value.items[::-1], tuple(ORDER.get(relation, relation) for relation in value.ends[::-1])
    return value.items, value.ends


def _bounded_variable(value: Value) -> str | None:
    """Return the variable that an inequality bounds, a letter that is one side and in no other; None for none."""
    if value.kind == "list":
        return _bounded_variable(value.items[0])
    if value.kind != "relation":
        return None
    letters = [_to_text(side) for side in value.items if len(side.parts) == 1 and side.parts[0].kind == "letter"]
    names = [token.text for side in value.items for token in side.parts if token.kind == "letter"]
    return letters[0] if len(letters) == 1 and names.count(letters[0]) == 1 else None


def _to_text(value: Value) -> str:
    return " ".join(token.text for token in value.parts)


def same_spelling(first: Value, second: Value) -> bool:
    """Return whether two values have the same tokens."""
    return join_spelling(first.parts) == join_spelling(second.parts)
