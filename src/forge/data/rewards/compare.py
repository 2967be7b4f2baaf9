"""Equality of two final answers: as text, as numbers, then symbolically."""

from __future__ import annotations

import re
from fractions import Fraction

from .notation import LONGEST, inline_fractions, normalize, plain_unicode
from .symbolic import equivalent

_LONGEST_NUMBER = 400
_SCALES = {"dozen": 12, "hundred": 100, **{f"{k}illion": 10**n for k, n in (("m", 6), ("b", 9), ("tr", 12))}}
_SCALES |= {"thousand": 1000}
# Words that are no units: what follows changes the number, takes it back or gives another.
_NOT_UNITS = re.compile(
    r"and|n?or|but|to|pi|sqrt|sin|cos|tan|log|ln|exp|mod|frac|plus|minus|divided|multiplied|squared|cubed|root|half|third"
    r"|quarter|zero|one|two|three|(?:four|six|seven|eight|nine)(?:teen|ty)?|five|ten|eleven|twelve|thirteen|fifteen"
    r"|eighteen|eighty|twenty|thirty|forty|fifty|twice|double|triple|dozen|hundred|thousand|[mb]illion|trillion|not?|never"
    r"|wrong|incorrect|false|untrue|maybe|perhaps|possibly|probably|guess|unless|except|than|base|if"
)
_MOST_WORDS = 6
_GLUED_UNITS = set(
    ["am", "pm", "cm", "mm", "km", "kg", "mg", "ml", "lb", "lbs", "oz", "ft", "in", "mph", "kmh", "min", "hrs"]
)
_CHOICE = re.compile(r"\(?([A-Za-z])[).:](?!\w)(?!.*\b[A-Z][).:])")

_UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>\d+)\s+(?=\d+\s*/))?(?P<top>{_UNSIGNED})(?:\s*/\s*(?P<bottom>{_UNSIGNED}))?"
    r"(?:(?:[eE]|\s*(?:\\times|\\cdot|×|x|\*)\s*10\s*(?:\^|\*\*)\s*)\{?(?P<exponent>[-+]?\d{1,3})\}?(?!\d))?"
    r"(?P<rest>[^\d\\=^{}]*)"
)
_EQUALS = re.compile(r"=|≈|\\approx(?![A-Za-z])")
_NO_NAME = re.compile(r"[-+*/^<>,×·÷]|\\(?:frac|sqrt|pm|cdot|times|div|leq?|geq?|neq?)(?![A-Za-z])|^[^A-Za-z]*(?:\d|$)")
_UNEVALUATED = re.compile(
    # An operator between numbers, or a variable: not the value of a number.
    r"[+*×·÷]|\\(?:times|cdot|div|pm|mp)(?![A-Za-z])|(?<=[\w)}!])\s*-|[\d)]\s*\(|(?<![A-Za-z\\])[a-df-hj-zA-Z](?![A-Za-z])"
)
_WORD = re.compile(r"(?<![A-Za-z\\])(?:[A-Za-z]{3,}|or|no|is)(?![A-Za-z])")
_UNIT_AFTER = re.compile(r"(?<=[\d)}\]])\s[A-Za-z][A-Za-z .]*$")
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "min", "max", "gcd", "lcm", "det"}
_FUNCTIONS |= {"arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"}
_FUNCTIONS = {"".join(sorted(name)) for name in _FUNCTIONS}
_CUT = re.compile(r"[-+*/^=<>_(\[{]$")
_GAPS = re.compile(r"\d\s+[\d.]|\d_")  # "4 5" is not 45, and 1010_2 not 1010


def number(text: str) -> tuple[Fraction, bool] | None:
    """The value of a text that is one number, exactly, and whether it is written as a percentage; else None.

    Reads thousands separators, currency signs, units, fractions, mixed numbers, decimals, powers of ten and
    "million"; of an equation the right-hand side, if the others are names or the same number. Units are dropped, never
    converted.
    """
    if len(text) > 2 * _LONGEST_NUMBER or len(text := normalize(text)) > _LONGEST_NUMBER:
        return None
    *others, last = map(str.strip, _EQUALS.split(text))
    found = _number(last)
    if found is None or not others:
        return found
    value, percent = found
    margin = 0 if "≈" not in text and "approx" not in text else abs(value) / 100
    for other in others:
        same = _arithmetic(other)
        known = [value, value / 100] if percent else [value]
        if not _is_name(other) and (same is None or min(abs(same - one) for one in known) > margin):
            return None
    return found


def _number(text: str) -> tuple[Fraction, bool] | None:
    text = re.sub(r"^(?:about|approximately|exactly|only)\b", "", inline_fractions(text), flags=re.I)
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    rest, percent = match["rest"].strip(), False
    if rest.startswith("%"):
        rest, percent = rest[1:].strip(), True
    scale, words = 1, re.findall(r"[a-z]+", rest.lower())
    if match["rest"][:1].isalpha() and not _GLUED_UNITS & set(words[:1]):  # "5x" and "5xy" are no quantities
        return None
    if words and words[0] in _SCALES:
        scale = _SCALES[words[0]]
        rest, words = rest[len(words[0]) :].strip(), words[1:]
    if rest and not _is_unit(rest, words):
        return None
    top, bottom = (Fraction((match[name] or "1").replace(",", "").rstrip(".")) for name in ("top", "bottom"))
    if not bottom:
        return None
    value = (int(match["whole"] or 0) + top / bottom) * Fraction(10) ** int(match["exponent"] or 0) * scale
    return (-value if match["sign"] == "-" else value), percent


def _is_name(text: str) -> bool:
    """Whether an equation with this side gives its value: x, f(2), P(A), but not 2x."""
    return not _NO_NAME.search(re.sub(r"(?<=[A-Za-z]{2})-(?=[A-Za-z]{2})", "", text))


def _is_unit(rest: str, words: list[str]) -> bool:
    if len("".join(words)) < 2 or len(words) > _MOST_WORDS or any(map(_NOT_UNITS.fullmatch, words)):
        return False
    if re.search(r"[^A-Za-z\s/.'()-]", rest) or not (rest[-1].isalpha() or rest[-1] == ")"):
        return False
    return rest.count("(") == rest.count(")")


def _arithmetic(text: str) -> Fraction | None:
    """The value of sums, products and quotients of numbers, such as "6 * 7"; None of another text."""
    text = re.sub(r"\\(?:times|cdot)(?![A-Za-z])|[×·]", "*", inline_fractions(text))
    terms = re.split(r"(?<=[\d).%])\s*([+-])", text.strip())
    total = Fraction(0)
    for sign, term in zip(["+", *terms[1::2]], terms[::2], strict=True):
        product = Fraction(1)
        for factor in term.split("*"):
            found = _number(factor)
            if found is None:
                return None
            product *= found[0]
        total += -product if sign == "-" else product
    return total


def equal(answer: str, target: str, tolerance: float) -> bool | None:
    """Whether two answers agree; None where the target takes too long to compare.

    Two numbers agree within `tolerance`, which is relative to targets between -1 and 1 and absolute beyond. A
    percentage agrees both with its figure and with its value (50% with 50 and with 0.5). No text makes it raise.
    """
    if same_text(answer, target):
        return True
    wanted_key = _key(target)
    if len(wanted_key) == 1 and wanted_key.isalpha():
        label = _CHOICE.match(normalize(answer))
        return label is not None and label[1].casefold() == wanted_key
    left, right = number(answer), number(target)
    if left is None or right is None:
        return _equal_expressions(answer, target, right is not None)
    (value, percent), (wanted, percent_wanted) = left, right
    margin = Fraction(str(tolerance))
    if abs(value - wanted) <= margin * (min(Fraction(1), abs(wanted)) or 1):
        return True
    if percent == percent_wanted:
        return False
    value, wanted = (value / 100, wanted) if percent else (value, wanted / 100)
    return abs(value - wanted) <= margin * min(Fraction(1), abs(wanted))


def _equal_expressions(answer: str, target: str, is_number: bool) -> bool | None:
    """As `equal`, of two texts that are not both numbers. What is not one expression is not equal to any."""
    if max(len(answer), len(target)) > LONGEST or not all(
        re.search(r"[\d\\^+*/=<>()\[\]]", text) for text in (answer, target)
    ):
        return False
    plain, wanted = normalize(answer), normalize(target)
    unit = _UNIT_AFTER.search(plain)
    prose = plain[: unit.start()] if unit and _is_unit(unit[0].strip(), unit[0].lower().split()) else plain
    # Products of variables are the same in any order.
    words, known = ({"".join(sorted(word.lower())) for word in _WORD.findall(text)} for text in (prose, wanted))
    if words - known - _FUNCTIONS:
        return False
    if _CUT.search(plain) or (_GAPS.search(plain) and not _GAPS.search(wanted)):
        return False
    *names, last = _EQUALS.split(plain)
    if names and not _EQUALS.search(wanted) and "," not in plain:
        if not all(map(_is_name, names)):
            return False
        answer = plain = last.strip()
    if is_number and _UNEVALUATED.search(plain):
        return False
    undollared = (re.sub(r"\\[()\[\]]|\\?[$€£]", "", plain_unicode(text)) for text in (answer, target))
    return equivalent(*(text.strip().rstrip(".") for text in undollared))


def same_text(answer: str, target: str) -> bool:
    """Whether the texts are the same and not empty, apart from notation, case and white space."""
    return _key(answer) == _key(target) != ""


def _key(text: str) -> str:
    key = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", normalize(text)).casefold()  # "4 5" is not 45
    return re.sub(r"^\((\w)\)$", r"\1", key)  # a choice: (B) is B
