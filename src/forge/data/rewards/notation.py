"""One notation for the ways in which answers are written: Unicode and LaTeX become plain text where that is simple."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

LONGEST = 4000  # characters of a final answer; longer ones compare as they are
RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))  # exponents
_WRAPPERS = (
    r"text|textrm|textit|textbf|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|mbox|hbox|underline|emph|operatorname"
    r"|textcolor\s*\{[A-Za-z]*\}|color\s*\{[A-Za-z]*\}"
)
_MINUS = str.maketrans({minus: "-" for minus in "−–‐‑"})

# In order: each rule sees what the ones before it left.
_UNICODE: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3}(?!\d))"), ","),
    (re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+"), lambda found: "^{" + "".join(map(RAISED.__getitem__, found[0])) + "}"),
    (re.compile("[¼-¾⅐-⅞]"), lambda found: " " + unicodedata.normalize("NFKC", found[0]).replace("⁄", "/")),
]
_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|displaystyle|!)", ""),
        (r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))", ","),
        (r"\\[,;: ]|~|\\quad", " "),
        (r"\{,\}", ","),
        (r"\\[()\[\]]|\\?[$€£¥₹₩₽]", ""),
        (r"\\%", "%"),
        (r"\^\s*(?:\{\\circ\}|\\circ)|°", " degrees"),
        (r"\\[dtc]?frac", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (rf"\\(?:{_WRAPPERS})\s*\{{([^{{}}]*)\}}(?:\s*\^\s*\{{?[23]\}}?)?", r" \1 "),
        (rf"\\(?:{_WRAPPERS})(?![A-Za-z])", " "),
        (r"(?<=[A-Za-z]{2})\s*\^\s*\{?[23]\}?", ""),
        (r"\s+", " "),
    )
]
_LEAD = re.compile(r"^\s*(?:=|≈|\\approx(?![A-Za-z]))\s*")
_FACTORIAL = re.compile(r"[\d)\]}]!$")
_FRACTION = re.compile(r"\\frac\s*\{\s*(-?[\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}")
_REPEATING = re.compile(r"(?<![\d.])(\d{0,30})\.(\d{0,30})\\(?:overline|bar)\s*\{?(\d{1,30})\}?")


def normalize(text: str) -> str:
    """A final answer in plain notation; a text of more than LONGEST characters only stripped."""
    if len(text) > LONGEST:
        return text.strip()
    text = plain_unicode(text)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = _unwrapped(text.strip().strip("*_`").rstrip(".,;:\\").strip())
    return _LEAD.sub("", text if _FACTORIAL.search(text) else text.rstrip("!"))


def plain_unicode(text: str) -> str:
    """Without invisible characters; digits, fractions, exponents and signs in ASCII, fractions and exponents as LaTeX
    or inline. A text of more than LONGEST characters stays as it is."""
    if text.isascii() or len(text) > LONGEST:
        return text
    text = "".join(character for character in text if unicodedata.category(character) != "Cf")
    for pattern, replace in _UNICODE:
        text = pattern.sub(replace, text)
    return unicodedata.normalize("NFKC", text).translate(_MINUS)


def inline_fractions(text: str) -> str:
    """`\\frac{1}{2}` as 1/2, and repeating decimals as fractions."""
    return _REPEATING.sub(_repeating, _FRACTION.sub(r" \1/\2", text)).strip()


def _repeating(found: re.Match[str]) -> str:
    whole, fixed, period = found.groups()
    value = Fraction(
        int(whole + fixed + period) - int(whole + fixed or "0"), 10 ** len(fixed) * (10 ** len(period) - 1)
    )
    return f" {value.numerator}/{value.denominator}"


def _unwrapped(text: str) -> str:
    """Without braces around the whole."""
    for _ in range(4):
        if text[:1] != "{" or text[-1:] != "}":
            break
        depth = 1
        for brace in re.findall(r"[{}]", text[1:-1]):
            depth += 1 if brace == "{" else -1
            if not depth:
                return text
        text = text[1:-1].strip()
    return text
