"""Equality of two final answers: the same tokens, else the same numbers and structures, else symbolically."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise

from forge.rewards.rules.comparison import are_close

from .expressions import Tree, compute_value, has_names, is_numeric, literal_value
from .notation import LONGEST, Token, join_spelling, tokenize_answer, word_set
from .structure import EQUALITIES, ORDER, Value, as_interval, is_name, order_sides, read_value, same_spelling, value_of
from .symbolic import are_equivalent
from .units import same_kind

_MOST_ITEMS = 64  # of an unordered structure, as each is compared with each
_APPROXIMATE = Fraction(1, 100)  # relative difference that the sides of "≈" may have
_CALCULUS = frozenset([r"\sum", r"\prod", r"\int", r"\lim"])

# Relations whose sides may be exchanged.
_SYMMETRIC = frozenset(["=", r"\neq", r"\perp", r"\parallel", r"\sim", r"\equiv", r"\approx"])
# A letter before one of these words starts a sentence, and is not the label of a choice.
_CONTINUED = word_set("and or nor not but is isn minus plus times divided squared cubed maybe perhaps wrong incorrect")
_PERCENT = (("percent", 1),)


def parse_number(text: str) -> tuple[Fraction, bool] | None:
    r"""Return the exact value of a text that is one number, and whether it is a percentage; None for any other text.

    The number may have thousands separators, a currency sign, a unit (which is dropped, not converted) or "million",
    and may be a fraction, a mixed number, a decimal or a power of ten. Of an equation the last side is the number, if
    the others are names or the same number.

    >>> parse_number("50\\%")
    (Fraction(50, 1), True)
    >>> parse_number("x = 1\\frac{1}{2}")
    (Fraction(3, 2), False)
    """
    value = read_value(text)
    if value.kind == "relation":
        last = value.items[-1]
        return _exact_number(last) if _equation_gives(value, last, 0.0) else None
    return _exact_number(value)


def same_text(answer: str, target: str) -> bool:
    """Return whether two texts have the same tokens; words may differ in case. False for texts without tokens.

    >>> same_text("{1, 2}", "{1,2}")
    True
    """
    tokens, target_tokens = tokenize_answer(answer), tokenize_answer(target)
    return bool(tokens) and join_spelling(tokens) == join_spelling(target_tokens)


def are_equal(answer: str, target: str, tolerance: float) -> bool | None:
    """Return whether two answers agree; None if the target takes too long to compare.

    Two numbers agree within `tolerance`, which is relative to targets between -1 and 1 and absolute for larger ones;
    only 0 agrees with 0. A percentage agrees both with its figure and with its value (50% with 50 and with 0.5). If
    both have a unit, it must be the same. Expressions without a decimal point must be equal exactly.

    >>> are_equal("0.5", "1/2", 0.0)
    True
    >>> are_equal("x=3", "3", 0.0)
    True
    """
    if not tokenize_answer(answer) or not tokenize_answer(target):
        return False
    if same_text(answer, target) or (_choices(answer) and _choices(answer) == _choices(target)):
        return True
    if max(len(answer), len(target)) > LONGEST:
        return False

    # Two choices agree if their letters do, and their texts if both have one.
    label, text = split_choice(answer)
    target_label, target_text = split_choice(target)
    if label and target_label:
        same_choice_text = not text or not target_text or join_spelling(text) == join_spelling(target_text)
        return label == target_label and same_choice_text

    # Compare the values; of an answer with a label also the value of its text.
    verdict = _same_values(read_value(answer), read_value(target), tolerance)
    if verdict is False and label and text:
        return _same_values(value_of(text), read_value(target), tolerance)
    return verdict


def split_choice(text: str) -> tuple[str, Sequence[Token]]:
    """Return the letter of a choice and the tokens of the text after it; "" and () for a text that is not a choice.

    Choices are B, (B), "B) 12", "B. 12" and "option B".

    >>> split_choice("(B)")
    ('B', ())
    """
    parts = tokenize_answer(text)
    if len(parts) > 1 and parts[0].text.lower() in ("option", "choice", "answer"):
        parts = parts[1:]

    # One letter, in brackets or followed by a mark.
    is_bracketed = len(parts) > 2 and parts[0].text == "(" and parts[2].text == ")"
    letter = parts[1 if is_bracketed else 0] if parts else None
    if letter is None or len(letter.text) != 1 or not letter.text.isalpha():
        return "", ()
    following = parts[3:] if is_bracketed else parts[2:]
    if not is_bracketed and len(parts) > 1 and parts[1].text not in (")", ".", ":"):
        return "", ()

    # Several labels are not one choice, nor is a letter before a word that continues the sentence.
    labels = (token.text for token, after in pairwise(following) if after.text in (")", ".", ":"))
    if (
        any(len(label) == 1 and label.isupper() for label in labels)
        or (following and following[0].text.lower() in ("or", "and"))
        or (following and following[0].text in _CONTINUED)
    ):
        return "", ()

    return letter.text, following


def _choices(text: str) -> list[str]:
    """Return the letters of several choices, A to J, in alphabetical order: of AC, "A, C" and "C and A"; [] for another
    text."""
    letters = sorted(token.text for token in tokenize_answer(text) if token.text not in (",", ";", "and"))
    return letters if len(set(letters)) == len(letters) > 1 and set(letters) <= set("ABCDEFGHIJ") else []


def _same_values(answer: Value, target: Value, tolerance: float) -> bool | None:
    """Return whether two values agree; None if the target takes too long to compare.

    The first of these rules that applies to the kinds of both decides.
    """
    if same_spelling(answer, target):
        return True

    # 1/x (x > 0) equals 1/x: without a condition in one of them, only the values are compared.
    if answer.kind == "where" or target.kind == "where":
        pairs = zip(*(value.items if value.kind == "where" else (value,) for value in (answer, target)), strict=False)
        return _all_true(_same_values(one_side, other_side, tolerance) for one_side, other_side in pairs)

    if "relation" in (answer.kind, target.kind):
        return _same_relation(answer, target, tolerance)

    # x < 1 or x > 3 is read as the union of two intervals if the other value is an interval or a union.
    # And R as the interval of all numbers.
    if target.kind in ("tuple", "union"):
        answer = as_interval(answer) or answer
    if answer.kind in ("tuple", "union"):
        target = as_interval(target) or target

    if answer.kind == target.kind == "expression":
        return _same_expression(answer, target, tolerance)

    # \sum_{k=1}^n k equals n(n + 1)/2: only the symbolic parser reads sums, integrals and limits.
    calculus = _calculus_tree(answer), _calculus_tree(target)
    if None not in calculus and "text" in (answer.kind, target.kind):
        return _exact_number(target) is None and are_equivalent("expression", *calculus, tolerance)  # type: ignore[arg-type]

    # x = 1, y = 2 equals (1, 2): the values in the order in which they are written.
    if _is_assignment(answer) is not _is_assignment(target):
        members = [
            [item.items[1] for item in value.items] if _is_assignment(value) else list(value.items)
            for value in (answer, target)
        ]
        unnamed = target if _is_assignment(answer) else answer
        is_ordered = unnamed.kind == "list" or unnamed.ends == ("(", ")")
        has_relation = any(item.kind == "relation" for item in unnamed.items)
        return is_ordered and not has_relation and _all_same(members[0], members[1], tolerance)

    # {1, 2} equals 2, 1. But x < 1 or x > 2 does not equal x < 1 and x > 2, nor a union an intersection.
    if {answer.kind, target.kind} <= {"list", "set"} or (answer.kind == target.kind == "union"):
        has_inequality = any(item.kind == "relation" and set(item.ends) & ORDER.keys() for item in answer.items)
        if (answer.kind == "union" or has_inequality) and answer.ends != target.ends:
            return False
        return _same_members(answer.items, target.items, tolerance)

    # (1, 2) equals (1, 2) and not (1, 2]; a text equals its own spelling only.
    if answer.kind != target.kind or answer.kind == "text" or answer.ends != target.ends:
        return False
    return _all_same(answer.items, target.items, tolerance)


def _is_assignment(value: Value) -> bool:
    """Return whether a value is a list of equations that give values to different names: x = 1, y = 2."""
    if value.kind != "list" or not all(item.kind == "relation" and item.ends == ("=",) for item in value.items):
        return False
    names = [join_spelling(item.items[0].parts) for item in value.items]
    return len(set(names)) == len(names) > 1 and all(is_name(item.items[0]) for item in value.items)


def _all_true(verdicts: Iterable[bool | None]) -> bool | None:
    """Return whether all verdicts are True: False if one is False, otherwise None if one is None (unknown)."""
    unknown = False
    for verdict in verdicts:
        if verdict is False:
            return False
        unknown = unknown or verdict is None
    return None if unknown else True


def _all_same(answers: Sequence[Value], targets: Sequence[Value], tolerance: float) -> bool | None:
    if len(answers) != len(targets):
        return False
    return _all_true(_same_values(answer, target, tolerance) for answer, target in zip(answers, targets, strict=True))


def _same_members(answers: Sequence[Value], targets: Sequence[Value], tolerance: float) -> bool | None:
    """Return whether two collections have the same values in any order; None if that is unknown."""
    if len(answers) != len(targets) or len(answers) > _MOST_ITEMS:
        return False
    unmatched = list(targets)
    for answer in answers:
        verdicts = [_same_values(answer, target, tolerance) for target in unmatched]
        if True not in verdicts:
            return None if None in verdicts else False
        del unmatched[verdicts.index(True)]
    return True


def _same_relation(answer: Value, target: Value, tolerance: float) -> bool | None:
    """Return whether two values agree, at least one of which is a relation, such as an equation or an inequality."""
    # One relation: an inequality is an interval, and an equation may give the value of the other.
    if target.kind != "relation":
        target_interval = as_interval(target)
        interval = as_interval(answer) if target_interval or target.kind in ("tuple", "union", "set") else None
        if interval is not None:
            return _same_values(interval, target_interval or target, tolerance)
        return _equation_gives(answer, target, tolerance)

    gives_value = target.ends == ("=",) and is_name(target.items[0])
    if answer.kind != "relation":
        answer_interval = as_interval(answer)
        interval = as_interval(target) if answer_interval or answer.kind in ("tuple", "union", "set") else None
        if interval is not None:
            return _same_values(answer_interval or answer, interval, tolerance)
        return gives_value and _same_values(answer, target.items[1], tolerance)

    # Two equations that give values: for the same name the values are compared; for different names, y = 2 and x = 3, a
    # number in the target is never agreed with.
    if gives_value and is_name(answer.items[0]) and set(answer.ends) <= EQUALITIES:
        if _same_name(answer.items[0], target.items[0]):
            return _equation_gives(answer, target.items[1], tolerance)
        if target.items[1].tree is not None and is_numeric(target.items[1].tree):
            return False

    # Inequalities are turned so that they rise, and with different relations they may still be the same interval.
    if set(answer.ends) | set(target.ends) <= ORDER.keys():
        (sides, ends), (target_sides, target_ends) = order_sides(answer), order_sides(target)
        answer, target = answer._replace(items=sides, ends=ends), target._replace(items=target_sides, ends=target_ends)

    if answer.ends != target.ends:
        intervals = as_interval(answer), as_interval(target)
        return None not in intervals and _same_values(intervals[0], intervals[1], tolerance)  # type: ignore[arg-type]
    verdict = _all_same(answer.items, target.items, tolerance)
    if verdict is not False or len(target.items) != 2:
        return verdict
    if target.ends[0] in _SYMMETRIC and _all_same(answer.items[::-1], target.items, tolerance):
        return True

    # Otherwise compare the differences of their sides, which may differ by a factor: 2x = 2y and x = y.
    kind = {"=": "equation", "<": "inequality", r"\leq": "inequality"}.get(target.ends[0])
    trees = [side.tree for side in (*answer.items, *target.items)]
    if kind is None or None in trees or (gives_value and is_numeric(target.items[1].tree or [])):
        return False
    differences = [["add", trees[side], ["negate", trees[side + 1]]] for side in (0, 2)]

    return are_equivalent(kind, differences[0], differences[1], tolerance)


def _same_name(name: Value, target: Value) -> bool:
    """Return whether two names are the same, or one is y and the other a function of one letter, as f(x)."""
    names = [" ".join(join_spelling(value.parts)) for value in (name, target)]
    applied = [len(value.parts) == 4 and value.parts[1].text == "(" for value in (name, target)]
    return names[0] == names[1] or ("y" in names and any(applied))


def _equation_gives(equation: Value, target: Value, tolerance: float) -> bool | None:
    """Return whether an equation gives the target; None if that could not be decided.

    The last side must agree with the target, and each side before it must be a name or equal to the target too. In an
    approximate equation, such as pi/2 ≈ 1.57, one side that agrees is enough, if the sides are close to each other.
    """
    if not set(equation.ends) <= EQUALITIES:
        return False
    sides = [side for side in equation.items if not is_name(side)] or [equation.items[-1]]
    if r"\approx" in equation.ends:
        numbers = [number[0] for side in sides if (number := _exact_number(side)) is not None]
        if numbers and max(numbers) - min(numbers) > _APPROXIMATE * max(map(abs, numbers)):
            return False
        verdicts = [_same_values(side, target, tolerance) for side in sides]
        return True if True in verdicts else (None if None in verdicts else False)

    # The last side is the answer; calculations before it must agree with it.
    verdicts = [_same_values(sides[-1], target, tolerance)]
    for side in sides[:-1]:
        value = compute_value(side.tree) if side.tree is not None and not side.unit else None
        expected = _exact_number(target)
        if value is not None and expected is not None:
            exact, is_percentage = expected
            verdicts.append(value in (exact, exact / 100 if is_percentage else exact))
        else:
            verdicts.append(_same_values(side._replace(computed=False), target, tolerance))

    return _all_true(verdicts)


def _calculus_tree(value: Value) -> Tree | None:
    """Return a tree for the symbolic comparison: SymPy's of an expression, or the LaTeX of a sum, integral or limit.

    None for a value that is neither.
    """
    if value.kind == "expression" or not any(token.text in _CALCULUS for token in value.parts):
        return value.tree
    return ["latex", " ".join(token.text for token in value.parts)]


def _exact_number(value: Value) -> tuple[Fraction, bool] | None:
    """Return the value of an expression that is one number, and whether it is a percentage; None for any other."""
    exact = None if value.tree is None else literal_value(value.tree)
    return None if exact is None else (exact, value.unit == _PERCENT)


def _same_expression(answer: Value, target: Value, tolerance: float) -> bool | None:
    if not same_kind(answer.unit, target.unit):
        return False
    assert answer.tree is not None and target.tree is not None
    answer_number, target_number = _exact_number(answer), _exact_number(target)
    # A target that is one number needs a value: a calculation such as 2 + 2 is not a result, and letters are variables.
    is_value = is_numeric(answer.tree) or (target.tree[0] == "decimal" and not has_names(answer.tree))
    if target_number is not None and (answer.computed or not is_value):
        return False
    if answer_number is not None and target_number is not None:
        return are_close(answer_number, target_number, tolerance)
    return answer.tree == target.tree or are_equivalent("expression", answer.tree, target.tree, tolerance)
