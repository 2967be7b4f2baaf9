"""Equality of two final answers: as text, as numbers, then symbolically."""

from __future__ import annotations

import re
from fractions import Fraction

from .symbolic import equivalent

_LONGEST_NUMBER = 400
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_NOT_UNITS = {"and", "or", "to", "pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "mod", "frac", "not"}
_GLUED_UNITS = set(
    ["am", "pm", "cm", "mm", "km", "kg", "mg", "ml", "lb", "lbs", "oz", "ft", "in", "mph", "kmh", "min", "hrs"]
)

_UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>\d+)\s+(?=\d+\s*/))?(?P<top>{_UNSIGNED})(?:\s*/\s*(?P<bottom>{_UNSIGNED}))?"
    r"(?:(?:[eE]|\s*(?:\\times|\\cdot|×|x|\*)\s*10\s*(?:\^|\*\*)\s*)\{?(?P<exponent>[-+]?\d{1,3})\}?(?!\d))?"
    r"(?P<rest>[^\d\\=^{}]*)"
)
# In order: each rule sees what the ones before it left.
_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|displaystyle|!)", ""),
        (r"\\[,;: ]|~|\\quad", " "),
        (r"\{,\}", ","),
        (r"\\[()\[\]]|\\?[$€£]", ""),
        (r"\\%", "%"),
        (r"\^\s*(?:\{\\circ\}|\\circ)|°", " degrees"),
        (r"\\[dtc]?frac", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}(?:\s*\^\s*\{?[23]\}?)?", r" \1 "),
        (r"(?<=[A-Za-z]{2})\s*\^\s*\{?[23]\}?", ""),
        (r"[−–]", "-"),
        (r"\s+", " "),
    )
]
_FRACTION = re.compile(r"\\frac\s*\{\s*(-?[\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}")


def _normalize(text: str) -> str:
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text.strip().strip("*_`").rstrip(".,;:!").strip()


def number(text: str) -> tuple[Fraction, bool] | None:
    """The value of a text that is one number, exactly, and whether it is written as a percentage; else None.

    Reads thousands separators, currency signs, units, fractions, mixed numbers, decimals, powers of ten and
    "million"; of an equation it reads the right-hand side. Units are dropped, never converted.
    """
    if len(text) > _LONGEST_NUMBER:
        return None
    *others, text = re.split(r"=|≈|\\approx", _normalize(text))
    if any("," in other for other in others):  # "x = 1, x = 5" is two answers
        return None
    text = re.sub(r"^(?:about|approximately|exactly|only)\b", "", _FRACTION.sub(r" \1/\2", text).strip(), flags=re.I)
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    rest, percent = match["rest"].strip(), False
    if rest.startswith("%"):
        rest, percent = rest[1:].strip(), True
    words = re.findall(r"[a-z]+", rest.lower())
    if match["rest"][:1].isalpha() and not _GLUED_UNITS & set(words[:1]):  # "5x" and "5xy" are no quantities
        return None
    if rest and (len("".join(words)) < 2 or _NOT_UNITS & set(words)):
        return None
    if re.search(r"[^A-Za-z\s/.,'()-]", rest):
        return None
    top, bottom = (Fraction((match[name] or "1").replace(",", "").rstrip(".")) for name in ("top", "bottom"))
    if not bottom:
        return None
    value = (int(match["whole"] or 0) + top / bottom) * Fraction(10) ** int(match["exponent"] or 0)
    value *= _SCALES.get(words[0], 1) if words else 1
    return (-value if match["sign"] == "-" else value), percent


def equal(answer: str, target: str, tolerance: float) -> bool | None:
    """Whether two answers agree; None where the target takes too long to compare.

    Two numbers agree within `tolerance`, which is relative to targets between -1 and 1 and absolute beyond. A
    percentage agrees both with its figure and with its value (50% with 50 and with 0.5). No text makes it raise.
    """
    if _key(answer) == _key(target):
        return bool(_key(target))
    left, right = number(answer), number(target)
    if left is None or right is None:
        if not all(re.search(r"[\d\\^+*/=<>()\[\]]", text) for text in (answer, target)):
            return False
        undollared = (re.sub(r"\\[()\[\]]|\\?[$€£]", "", text).strip().rstrip(".") for text in (answer, target))
        return equivalent(*undollared)
    (value, percent), (wanted, percent_wanted) = left, right
    margin = Fraction(str(tolerance))
    if abs(value - wanted) <= margin * (min(Fraction(1), abs(wanted)) or 1):
        return True
    if percent == percent_wanted:
        return False
    value, wanted = (value / 100, wanted) if percent else (value, wanted / 100)
    return abs(value - wanted) <= margin * min(Fraction(1), abs(wanted))


def _key(text: str) -> str:
    key = re.sub(r"\s+", "", _normalize(text)).casefold()
    return re.sub(r"^\((\w)\)$", r"\1", key)  # a choice: (B) is B
